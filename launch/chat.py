"""A chat model from nothing: data, training on plain text, on conversations, and how well it answers held-out questions.

`bash launch/chat.sh [key=value ...]` runs it, in runs/chat; the settings are those of the fine-tune, configs/chat.py.
`base.steps=N` sets the steps on plain text.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

from k3jax import runtime, settings

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "chat.py"
BASE_STEPS = 200
OURS = ("out", "start", "resume", "data.paths", "data.held_out_paths", "data.tokenizer")  # settings that are decided here
MAX_TOKENS = 200


def main(overrides: list[str]) -> None:
    started = time.monotonic()
    runtime.show_what_can_be_shown()
    given = dict(settings.pairs(overrides))
    config = settings.load_config(CONFIG)
    root = Path(given.get("out", HERE.parent / "runs" / "chat")).absolute()
    data, base, run = root / "data", root / "base", root / "run"
    kept = [f"{key}={value}" for key, value in given.items() if key not in (*OURS, "base.steps")]
    settings.apply_overrides(config, kept).validate()
    sources = [f"data.tokenizer={data / 'tokenizer'}", f"data.held_out_paths={data / 'held_out.jsonl'}"]

    say("1. Make conversations and a tokenizer of the standard library")
    python(HERE / "chat_data.py", data)
    say("2. Train on plain text")
    steps = given.get("base.steps", BASE_STEPS)
    plain = [f"data.paths={data / 'text.jsonl'}", "start=None", f"train.steps={steps}", "train.eval_every=0"]
    others = [each for each in kept if not each.startswith(("train.steps=", "train.eval_every="))]
    train(*others, *plain, *sources, f"out={base}")
    say("3. Train on conversations")
    train(*kept, f"data.paths={data / 'chats.jsonl'}", *sources, f"start={base}", f"out={run}")

    say("4. Answer the held-out questions")
    runtime.setup()
    before, after = (json.loads((folder / "result.json").read_text()) for folder in (base, run))
    questions = list(turns(data / "held_out.jsonl"))
    faulty, shown = replies(run, questions)
    bigram = learnt_bigram(config, data)
    for question, reply in shown:
        print(f"  {question}\n    {json.dumps(reply, ensure_ascii=False)}")
    waits = [json.loads(line)["waited"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [
        ("model", f"{config.model.num_parameters:,} parameters"),
        ("training", f"{before['seconds']:.0f} s on plain text, {after['seconds']:.0f} s on conversations"),
        ("held-out", f"{after['held_out_byte_loss']:.3f} nats per byte of what the assistant writes"),
        ("before", f"{before['held_out_byte_loss']:.3f} nats per byte, on the same bytes, trained on plain text alone"),
        ("byte bigram", f"{bigram:.3f} nats per byte, counted on the conversations for training"),
        ("replies", f"{len(questions) - len(faulty)} of {len(questions)} held-out replies are in the right form"),
        ("waiting", f"{max(waits):.2%} of the time for data, at most"),
        ("in all", f"{time.monotonic() - started:.0f} s"),
        ("try it", f"python -m k3jax chat {run}"),
    ]
    say("Done")
    for name, value in rows:
        print(f"  {name:<12} {value}")
    for faults in faulty[:3]:
        print(f"  not in the right form: {'; '.join(faults)}")
    summary = {"before": before, "after": after, "bigram_byte_loss": bigram, "replies": len(questions)}
    summary |= {"faulty": len(faulty), "waited": max(waits), "total_seconds": time.monotonic() - started}
    (root / "summary.json").write_text(json.dumps(summary, indent=1))


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def python(*arguments) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


def train(*overrides: str) -> None:
    python("-m", "k3jax", "train", "--config", CONFIG, *overrides)


def turns(file: Path):
    """(messages up to a reply, tools) of every reply of the conversations in a file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for place, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                yield record["messages"][:place], record.get("tools", [])


def replies(run: Path, questions) -> tuple[list[list[str]], list[tuple[str, dict]]]:
    """(faults of each reply that has some, some questions with their replies)."""
    from k3jax.serve.chat import Chat

    chat, faulty, shown = Chat(run), [], []
    for number, (messages, tools) in enumerate(questions):
        found = chat.reply(messages, tools, max_tokens=MAX_TOKENS, temperature=0.5, seed=number)
        while True:
            try:
                next(found)
            except StopIteration as stop:
                reply = stop.value
                break
        if reply.faults:
            faulty.append(reply.faults)
        if number % math.ceil(len(questions) / 4) == 0:
            shown.append((messages[-1]["content"], reply.message))
    return faulty, shown


def learnt_bigram(config, data: Path) -> float:
    """Nats per byte of a byte bigram on what the assistant writes, as text without markers."""
    import numpy as np

    from k3jax.data.corpus import from_record
    from k3jax.data.open import open_all
    from k3jax.text import load_tokenizer
    from k3jax.train.data import ByteDataset, bigram_nats
    from k3jax.train.loop import encoding

    tokenizer = load_tokenizer(data / "tokenizer")

    def written(name: str) -> ByteDataset:
        rows = open_all([str(data / name)], data / "tokenizer", encoding(config.data), 1).sources[0]
        texts = []
        for record in rows.read(np.arange(len(rows))):
            for ids, learnt in from_record(record):
                runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learnt)) + 1)
                texts += [tokenizer.decode(ids[run]).encode() for run in runs if learnt[run[0]]]
        return ByteDataset(texts, 64, 8)

    return bigram_nats(written("chats.jsonl"), written("held_out.jsonl"))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # it has said why
