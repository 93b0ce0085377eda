"""The main job: train, resume in a fresh process, evaluate, export, run the export packed, and generate.

`bash launch/quickstart.sh [key=value ...]` runs it; the settings are those of configs/quickstart.py. With
`processes.count=2` two processes train, of four devices each; the rest is done by one.
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

from k3jax import run_config, runtime, settings

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "quickstart.py"
PROMPT = "def "
OURS = ("out", "resume", "processes.")  # settings of each training that are decided here


def main(overrides: list[str]) -> None:
    started = time.monotonic()
    runtime.show_what_can_be_shown()
    config = dataclasses.replace(settings.load_config(CONFIG), out=str(HERE.parent / "runs" / "quickstart"))
    config = settings.apply_overrides(config, overrides)
    count = config.processes.count
    config = dataclasses.replace(config, out=unused(config.out), processes=run_config.ProcessesConfig())
    config.validate()
    if config.cpu_devices:
        config = config.on(config.cpu_devices)
    before_last = (config.train.steps - 1) // config.train.checkpoint_every * config.train.checkpoint_every
    if not before_last:
        raise ValueError(
            f"train.checkpoint_every={config.train.checkpoint_every}: must be below train.steps={config.train.steps}, "
            "for the run to be resumed from before its end"
        )
    out = Path(config.out)

    where = f"{config.mesh.size} devices" + (f" of {count} processes" if count > 1 else "")
    say(f"1. Train for {config.train.steps} steps on {where}")
    kept = [f"{key}={value}" for key, value in settings.pairs(overrides) if not key.startswith(OURS)]
    command = [sys.executable, HERE / "local.py", str(count), "--config", CONFIG, *kept]
    subprocess.run([*command, f"--out={out}"], check=True)
    result = json.loads((out / "result.json").read_text())

    say(f"2. Resume from step {before_last} in a fresh process")
    resumed = out / "resumed"
    subprocess.run([*command, f"--out={resumed}", f"--resume={out / 'checkpoints' / str(before_last)}"], check=True)
    runtime.setup(config.cpu_devices)
    compared, differing = compare_states(config, result["checkpoint"], resumed)

    say("3. Export in the released layout, and run it with packed experts")
    from k3jax.train.convert import export_checkpoint

    export_checkpoint(result["checkpoint"], out / "export")
    logits, unequal = compare_logits(config, result["checkpoint"], out / "export")

    say("4. Generate with the packed model and the cached decoder")
    text, rate = generate(out / "export")
    print(text)

    waited = max(json.loads(line)["waited"] for line in (out / "metrics.jsonl").read_text().splitlines())
    rows = [
        ("model", f"{config.model.num_parameters:,} parameters, {config.model.num_active_parameters:,} active a token"),
        ("mesh", ", ".join(f"{axis}={n}" for axis, n in vars(config.mesh).items() if n > 1)),
        (
            "training",
            f"{result['step']} steps in {result['seconds']:.0f} s, loss {result['train_loss']:.3f} nats per byte",
        ),
        ("waiting", f"{waited:.2%} of the time for data, at most"),
        ("held-out", f"{result['held_out_loss']:.3f} nats per byte, over {result['eval_bytes']:,} bytes"),
        ("byte bigram", f"{result['bigram_loss']:.3f} nats per byte, on the same bytes"),
        ("resumed", f"from step {before_last}: {differing} of {compared:,} values of the final state differ"),
        ("packed export", f"{unequal} of {logits:,} logits differ from the QAT forward"),
        ("generation", f"{rate:.0f} tokens/s"),
        ("in all", f"{time.monotonic() - started:.0f} s"),
        ("checkpoint", result["checkpoint"]),
        ("numbers, plot", f"{out / 'metrics.jsonl'}, {result['plot']}"),
        ("export", out / "export"),
    ]
    say("Done")
    for name, value in rows:
        print(f"  {name:<14} {value}")
    summary = result | {
        "state_values_differing": differing,
        "logits_differing": unequal,
        "waited": waited,
        "generated": text,
        "total_seconds": time.monotonic() - started,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    if differing or unequal:
        raise ValueError("the resumed state or the packed logits differ, see above; both must be equal")
    if result["held_out_loss"] >= result["bigram_loss"]:
        print("  The model does not beat the bigram: give it more steps (train.steps).")


def unused(out: str) -> str:
    """`out`, or with a number behind it if it is taken: an earlier run is never overwritten."""
    path, number = Path(out).absolute(), 2
    while path.exists():
        path, number = Path(f"{Path(out).absolute()}-{number}"), number + 1
    return str(path)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def compare_states(config, first, second) -> tuple[int, int]:
    """(values, values whose bits differ) of two checkpoints of a run's state."""
    import jax
    import numpy as np

    from k3jax.sharding import make_mesh
    from k3jax.train.checkpoint import Checkpoints, resolve
    from k3jax.train.step import abstract_state

    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    with jax.set_mesh(mesh):
        abstract, _ = abstract_state(config, mesh)
        states = []
        for path in (first, second):
            folder, step = resolve(path)
            states.append(jax.device_get(Checkpoints(folder).restore(step, abstract)[0]))
    total = different = 0
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        bits = f"u{a.dtype.itemsize}"
        total += a.size
        different += int(np.sum(np.atleast_1d(a).view(bits) != np.atleast_1d(b).view(bits)))
    return total, different


def compare_logits(config, checkpoint, export) -> tuple[int, int]:
    """(logits, logits whose bits differ) of the QAT forward and the packed export, on one batch of held-out text."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from k3jax.serve.generate import load_model
    from k3jax.train.loop import open_data

    batch = next(open_data(config)[1].windows(config.data.batch_size))
    found = []
    for path, experts in ((checkpoint, "qat"), (export, "packed")):
        model, variables = load_model(path)
        assert model.experts == experts and model.mxfp8_inputs
        run = jax.jit(lambda v, tokens, ids, model=model: model.apply(v, tokens, segment_ids=ids).logits)
        found.append(np.asarray(run(variables, jnp.asarray(batch["tokens"]), jnp.asarray(batch["segment_ids"]))))
    return found[0].size, int(np.sum(found[0].view(np.uint32) != found[1].view(np.uint32)))


def generate(export, max_tokens: int = 200) -> tuple[str, float]:
    """(prompt and continuation, tokens a second after the first)."""
    from k3jax.serve.generate import generate_tokens, load_model
    from k3jax.text import ByteTokenizer

    model, variables = load_model(export)
    tokens, start = [], None
    for token in generate_tokens(model, variables, ByteTokenizer.encode(PROMPT), max_tokens, temperature=0.7):
        tokens.append(token)
        start = start or time.monotonic()
    return PROMPT + ByteTokenizer.decode(tokens), (len(tokens) - 1) / (time.monotonic() - start)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # it has said why
