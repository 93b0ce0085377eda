"""Questions that people ask of these models, each with its answer."""

from __future__ import annotations

from collections.abc import Callable

from k3jax.plan.answer import Answer, best, duration, question, sentence
from k3jax.plan.arrays import released_bytes
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.search import search
from k3jax.plan.setting import Serve, Train
from k3jax.settings import CONFIGS, load_model

MILLION = 1048576
# Slices of TPU 7x by devices, two a chip, and whole nodes of eight GPUs.
COUNTS = {"tpu7x": (8, 16, 32, 64, 128, 256, 512, 1024), "h200": (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)}


def _model(name: str):
    return load_model(CONFIGS / f"{name}.py")


def long_context(price: float | None) -> list[Answer]:
    """The smallest TPU 7x slice and H200s that hold the released weights and a million tokens for 1 and 64."""
    model, answers = _model("kimi_k3"), []
    for users in (1, 64):
        for name, counts in COUNTS.items():
            workload = Serve("decode", users, MILLION)
            held = f"Kimi K3 as released and {users} x 1,048,576 tokens"
            asked = f"What is the smallest number of {name} devices that holds {held}?"
            for devices in counts:
                found = search(model, workload, HARDWARE[name], devices, price)
                if found.ranked:
                    text, chosen = f"{devices} devices. {sentence(found.best)}.", found.ranked[:4]
                    twice = search(model, workload, HARDWARE[name], 2 * devices, price)
                    if twice.ranked:
                        text += f" Twice as many: {sentence(twice.best)}."
                        chosen += twice.ranked[:2]
                    answers.append(Answer(asked, text, chosen, found))
                    break
            else:
                answers.append(Answer(asked, f"None of {', '.join(map(str, counts))} does.", found.tight[:1], found))
    return answers


def fine_tune(price: float | None) -> list[Answer]:
    """A quantisation-aware fine-tune of the 2.8T model on 1,024 v5p, 1024 x 4096 tokens a step."""
    return [best(_model("kimi_k3"), Train(), HARDWARE["v5p"], 1024, price)]


def kimi_linear(price: float | None) -> list[Answer]:
    """Kimi-Linear-48B on one node of eight GPUs and on v6e-16: decoding, and fine-tuning."""
    model, answers = _model("kimi_linear_48b"), []
    train = Train(batch=16, sequence=4096, qat=False)
    for workload in (Serve("decode", 16, 131072, experts="dequantized"), train):
        for name, devices in (("h100", 8), ("h200", 8), ("b200", 8), ("v6e", 16)):
            answers.append(_either(model, workload, name, devices, price))
    return answers


def _either(model, workload, name: str, devices: int, price: float | None) -> Answer:
    """What fits best, or why nothing does."""
    try:
        return best(model, workload, HARDWARE[name], devices, price)
    except ValueError as error:
        found = search(model, workload, HARDWARE[name], devices, price)
        return Answer(question(model, workload, HARDWARE[name], devices), str(error), found.tight[:1], found)


def four_bits(price: float | None) -> list[Answer]:
    """What 4-bit experts save against bfloat16: bytes, and time to decode, on 128 TPU 7x devices."""
    model = _model("kimi_k3")
    packed, wide = (
        best(model, Serve("decode", 64, 131072, experts=experts), HARDWARE["tpu7x"], 128, price)
        for experts in ("packed", "dequantized")
    )
    stored = released_bytes(model)["routed experts"]
    as_values = 2 * model.num_experts * model.expert_parameters * sum(kind.ffn == "moe" for kind in model.layers)
    fast, slow = packed.chosen[0], wide.chosen[0]
    text = (
        f"Experts take {stored / 1e9:,.0f} GB packed and {as_values / 1e9:,.0f} GB as bfloat16, "
        f"{as_values / stored:.2f} times as much. "
        f"On 128 devices with 64 rows of 131,072 tokens a step takes {duration(fast.step_seconds)} packed and "
        f"{duration(slow.step_seconds)} as bfloat16, {slow.step_seconds / fast.step_seconds:.2f} times as long."
    )
    return [Answer("What do 4-bit experts save against bfloat16?", text, [fast, slow]), packed, wide]


PRESETS: dict[str, Callable[[float | None], list[Answer]]] = {
    "long-context": long_context,
    "fine-tune": fine_tune,
    "kimi-linear": kimi_linear,
    "four-bits": four_bits,
}
