"""The planner's pictures, drawn with matplotlib: SVG for the report, PNG for a file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from k3jax.plan.analytic import Prediction
from k3jax.plan.answer import Answer, duration, variant

# One colour a purpose, on every picture the same.
COLOURS = {
    "routed experts": "#1f4e79",
    "dense weights": "#5b9bd5",
    "optimizer state": "#9dc3e6",
    "KDA state": "#548235",
    "MLA cache": "#a9d18e",
    "batch": "#d9d9d9",
    "gradients": "#c55a11",
    "between layers": "#f4b183",
    "activations": "#ffd966",
    "exchange": "#bf9000",
    "gathered weights": "#7f6084",
    "unsummed gradients": "#c9a0dc",
    "a layer's experts": "#7f6084",
    "loss": "#a5a5a5",
    "logits": "#a5a5a5",
}
ROOFLINES = {"compute": "#1f4e79", "memory": "#548235", "communication": "#c55a11"}
AXES = ("#1f4e79", "#5b9bd5", "#c55a11", "#f4b183", "#548235", "#a9d18e", "#7f6084", "#bf9000", "#a5a5a5")
MOST = 6  # bars of one picture


def memory(chosen: Sequence[Prediction]) -> Figure:
    """Stacked bars: bytes a device by purpose, against what there is."""
    chosen = chosen[:MOST]
    figure, axes = _bars(len(chosen))
    left = [0.0] * len(chosen)
    for purpose, colour in COLOURS.items():
        widths = [(p.arguments | p.temporaries).get(purpose, 0.0) / 1e9 for p in chosen]
        if max(widths) > 0.002 * max(p.memory for p in chosen) / 1e9:
            axes.barh(range(len(chosen)), widths, left=left, color=colour, label=purpose, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, p in enumerate(chosen):
        axes.plot([p.capacity / 1e9] * 2, [i - 0.42, i + 0.42], color="black", linewidth=1.6)
        axes.annotate(f" {p.memory / 1e9:.1f}", (max(left[i], p.capacity / 1e9), i), va="center", fontsize=8)
    axes.set_xlim(0, 1.08 * max(max(p.memory, p.capacity) for p in chosen) / 1e9)
    _finish(axes, chosen, "GB a device; the black line is what there is")
    return figure


def rooflines(chosen: Sequence[Prediction]) -> Figure:
    """Three bars a strategy: the least time for products, memory and links."""
    chosen = chosen[:MOST]
    figure, axes = _bars(len(chosen), 0.25)
    longest = max(max(p.compute_seconds, p.memory_seconds, p.communication_seconds) for p in chosen)
    unit, name_of_unit = (1, "seconds") if longest >= 1 else (1e3, "milliseconds")
    for place, (name, colour) in enumerate(ROOFLINES.items()):
        seconds = [getattr(p, f"{name}_seconds") for p in chosen]
        middles = [i + 0.26 * (place - 1) for i in range(len(chosen))]
        axes.barh(middles, [unit * t for t in seconds], height=0.24, color=colour, label=name)
        for middle, t in zip(middles, seconds, strict=True):
            axes.annotate(f" {duration(t)}", (unit * t, middle), va="center", fontsize=7)
    axes.set_xlim(0, 1.1 * unit * longest)
    _finish(axes, chosen, f"{name_of_unit} a step, each alone at its peak")
    return figure


def sent(chosen: Sequence[Prediction]) -> Figure:
    """Stacked bars: bytes that a device sends in a step, by collective and mesh axes."""
    chosen = chosen[:MOST]
    figure, axes = _bars(len(chosen))
    by = [{(kind, over): n for kind, found in p.communication.items() for over, n in found.items()} for p in chosen]
    total = {key: sum(row.get(key, 0.0) for row in by) for row in by for key in row}
    largest = sorted(total, key=lambda key: -total[key])
    named, rest = largest[: len(AXES) - 1], largest[len(AXES) - 1 :]
    left = [0.0] * len(chosen)
    for key, colour in zip([*named, None], AXES, strict=False):
        widths = [(row.get(key, 0.0) if key else sum(row.get(other, 0.0) for other in rest)) / 1e9 for row in by]
        if max(widths) > 0:
            label = f"{key[0]} over {key[1].replace('*', ', ')}" if key else "everything else"
            axes.barh(range(len(chosen)), widths, left=left, color=colour, label=label, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, n in enumerate(left):
        axes.annotate(f" {n:,.0f}" if n >= 100 else f" {n:.3g}", (n, i), va="center", fontsize=8)
    axes.set_xlim(0, 1.08 * max(*left, 1e-9))
    _finish(axes, chosen, "GB that a device sends in a step", legend=3)
    return figure


def front(answer: Answer) -> Figure:
    """Step time against memory of every strategy that fits; the front is what none beats in both."""
    ranked, best = answer.found.ranked, answer.found.front
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    point = lambda found: ([p.memory / 1e9 for p in found], [p.step_seconds for p in found])  # noqa: E731
    for bound, colour in ROOFLINES.items():
        found = [p for p in ranked if p.bound == bound]
        if found:
            axes.scatter(*point(found), s=16, alpha=0.6, color=colour, linewidths=0, label=f"bound by {bound}")
    axes.plot(
        *point(best), color="black", linewidth=1, marker="o", markersize=5, fillstyle="none", label="Pareto front"
    )
    middle = (min(p.memory for p in ranked) + ranked[0].capacity) / 2
    for p, above in ((best[0], False), (best[-1], True))[: min(len(best), 2)]:
        right = p.memory > middle
        axes.annotate(
            f"{p.row}{variant(p)}",
            (p.memory / 1e9, p.step_seconds),
            xytext=(-6 if right else 6, 9 if above else -15),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=8,
        )
    axes.axvline(ranked[0].capacity / 1e9, color="black", linestyle=":", linewidth=1)
    axes.margins(x=0.06, y=0.14)
    axes.set_yscale("log")
    ticks = lambda y, _: f"{y:g} s" if y >= 1 else f"{1e3 * y:g} ms"  # noqa: E731
    axes.yaxis.set_major_formatter(ticks)
    slow, fast = (found(p.step_seconds for p in ranked) for found in (max, min))
    axes.yaxis.set_minor_formatter(ticks if slow < 8 * fast else "")
    axes.tick_params(which="both", labelsize=8)
    axes.set_xlabel(f"GB a device (dotted: what {ranked[0].hardware} has)", fontsize=9)
    axes.set_ylabel("a step takes at least", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_front(path: str | Path, answers: Sequence[Answer]) -> None:
    """The first search's picture as a PNG file.

    Raises:
        ValueError: no answer rests on a search of which something fits.
    """
    drawn = [answer for answer in answers if answer.found and answer.found.ranked]
    if not drawn:
        raise ValueError(f"--png {path}: only a search gives a picture; add --search")
    front(drawn[0]).savefig(path, format="png", dpi=150)


def svg(figure: Figure, name: str) -> str:
    """The picture as an element of a page; `name` keeps its ids apart from other pictures'."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = text.getvalue()
    found = found[found.index("<svg") :]
    # Several pictures share a page, and matplotlib numbers the parts of each alike.
    for prefix in ('id="', 'xlink:href="#', "url(#"):
        found = found.replace(prefix, f"{prefix}{name}-")
    return found


def _bars(count: int, more: float = 0.0) -> tuple[Figure, object]:
    figure = Figure(figsize=(9, 1.7 + (0.42 + more) * count), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes, chosen: Sequence[Prediction], label: str, legend: int = 5) -> None:
    several = len({(p.devices, p.hardware) for p in chosen}) > 1
    where = lambda p: f"{p.devices} {p.hardware}\n" if several else ""  # noqa: E731
    kinds = {variant(p) for p in chosen}
    names = [f"{where(p)}{p.row}{variant(p) if len(kinds) > 1 else ''}" for p in chosen]
    axes.set_yticks(range(len(chosen)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    handles, _ = axes.get_legend_handles_labels()
    axes.figure.legend(loc="outside upper left", ncols=min(legend, len(handles)), fontsize=8, frameon=False)
