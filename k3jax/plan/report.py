"""The planner's answers as one web page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from k3jax.plan import pictures
from k3jax.plan.analytic import Prediction
from k3jax.plan.answer import ASSUMPTIONS, Answer, amount, duration, percent, variant
from k3jax.plan.hardware import HARDWARE

_STYLE = """
:root { --ink: #1b1f24; --quiet: #5d6670; --line: #d8dde3; --accent: #1f4e79; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 2.5rem 1.5rem 4rem; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .4rem; color: var(--accent); }
h3 { font-size: 1rem; margin: 1.8rem 0 .3rem; } p { margin: .3rem 0 .8rem; } .quiet { color: var(--quiet); }
.answer { border-left: 4px solid var(--accent); background: #f3f7fb; padding: .7rem 1rem; margin: .6rem 0 1.2rem; }
.wide { overflow-x: auto; margin-bottom: 1rem; } table { border-collapse: collapse; width: 100%; font-size: .84rem; }
th, td { text-align: right; padding: .32rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--quiet); font-weight: 600; } td:first-child, th:first-child { text-align: left; white-space: normal; }
.first tbody tr:first-child { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
nav a { color: var(--accent); } li { margin: .2rem 0; } .no { color: #a61b1b; }
@media print { h2 { break-before: page; } }
"""


def write(path: str | Path, answers: Sequence[Answer]) -> None:
    """Writes the page.

    Example:
        >>> write("plan.html", [best(cfg, Train(), HARDWARE["v5p"], 1024)])
    """
    Path(path).write_text(page(answers), encoding="utf-8")


def page(answers: Sequence[Answer]) -> str:
    """The whole page: every question with its answer, tables and pictures, then assumptions and sources."""
    used = dict.fromkeys(p.hardware for answer in answers for p in answer.chosen)
    contents = ""
    if len(answers) > 1:
        links = "".join(f'<li><a href="#q{i}">{escape(x.question)}</a></li>' for i, x in enumerate(answers))
        contents = f"<nav><ol>{links}</ol></nav>"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>k3jax plan</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body><h1>k3jax plan</h1>",
            '<p class="quiet">What a sharding strategy needs and how long a step takes, from shapes alone.</p>',
            contents,
            *(_section(answer, i) for i, answer in enumerate(answers)),
            "<h2>Assumptions</h2><ul>",
            *(f"<li>{escape(text)}</li>" for text in ASSUMPTIONS),
            "</ul><h2>Hardware</h2><p>Per device, as JAX counts them; links per direction.</p>",
            _table(_HARDWARE, [_hardware_row(name) for name in used]),
            "<h3>Sources</h3><ul>",
            *(f"<li>{escape(name)}: {escape(HARDWARE[name].source)}</li>" for name in used),
            "</ul></body></html>",
        ]
    )


def _section(answer: Answer, number: int) -> str:
    parts = [
        f'<section id="q{number}"><h2>{escape(answer.question)}</h2><p class="answer">{escape(answer.text)}</p>',
    ]
    if answer.chosen:
        priced = answer.chosen[0].cost_per_million_tokens is not None
        parts += [
            "<h3>Strategies</h3>",
            _table(_STRATEGIES[: None if priced else -1], map(_strategy_row, answer.chosen), "wide first"),
            "<h3>Memory</h3>",
            pictures.svg(pictures.memory(answer.chosen), f"memory{number}"),
            "<h3>Rooflines</h3>",
            pictures.svg(pictures.rooflines(answer.chosen), f"roofline{number}"),
        ]
        if any(p.communication for p in answer.chosen[: pictures.MOST]):
            parts += ["<h3>Communication</h3>", pictures.svg(pictures.sent(answer.chosen), f"sent{number}")]
        parts += ["<h3>Work of the first strategy, a device and step</h3>", _work(answer.chosen[0])]
    if answer.compared:
        heading = tuple(answer.compared[0])
        rows = [[str(value) for value in row.values()] for row in answer.compared]
        parts += ["<h3>Beside the compiler</h3>", _table(heading, rows)]
    if answer.found and len(answer.found.ranked) > 2:  # else there is little to see
        parts += [
            "<h3>Step time against memory</h3>",
            f"<p>{len(answer.found.ranked):,} of {answer.found.tried:,} strategies fit; "
            f"{answer.found.refused:,} more do not divide the model or the batch.</p>",
            pictures.svg(pictures.front(answer), f"front{number}"),
        ]
    return "".join([*parts, "</section>"])


_STRATEGIES = ("strategy", "GB", "of", "compute", "memory", "sent", "step", "tokens/s", "MFU", "cost / M tokens")


def _strategy_row(p: Prediction) -> list[str]:
    times = map(duration, (p.compute_seconds, p.memory_seconds, p.communication_seconds, p.step_seconds))
    cost = [] if p.cost_per_million_tokens is None else [f"{p.cost_per_million_tokens:,.2f}"]
    used = f"{p.memory / 1e9:.1f}" if p.fits else f'<span class="no">{p.memory / 1e9:.1f}</span>'
    name = escape(f"{p.devices:,} {p.hardware}: {p.row}{variant(p)}")
    rates = f"{p.tokens_per_second:,.0f}", f"{percent(p.mfu)}"
    return [name, used, f"{p.capacity / 1e9:.1f}", *times, *rates, *cost]


def _work(p: Prediction) -> str:
    kinds = dict.fromkeys([*p.flops, *p.bytes])
    rows = [(kind, amount(p.flops.get(kind, 0), "FLOP"), amount(p.bytes.get(kind, 0), "B")) for kind in kinds]
    purposes = [(what, amount(n, "B")) for what, n in sorted(p.by_purpose.items(), key=lambda item: -item[1])]
    sent = _table(("sent for", ""), purposes) if purposes else ""
    return _table(("kind", "products", "moved in memory"), rows) + sent


_HARDWARE = ("", "memory GB", "GB/s", "bf16 TFLOP/s", "fp8", "fp4", "links GB/s", "devices linked", "network GB/s")


def _hardware_row(name: str) -> list[str]:
    h = HARDWARE[name]
    rates = (f"{rate / 1e12:,.0f}" for rate in (h.bf16, h.fp8, h.fp4))
    rest = f"{h.links / 1e9:,.0f}", f"{h.domain:,}", f"{h.network / 1e9:,.4g}"
    return [name, f"{h.memory / 1e9:,.0f}", f"{h.bandwidth / 1e9:,.0f}", *rates, *rest]


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "wide") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
