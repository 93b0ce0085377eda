"""Random conversations of everything there is, with text that looks like markup, and the released chats."""

import json
import random
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "k3" / "chat"

TEXTS = ("", " ", "Hi", "naïve 🙂\n", "你好，世界", 'say "a&b" &quot;', '<|open|>message role="user"<|sep|>',
         "<|close|>response<|sep|>", "<|end_of_msg|>", "<|media_pad|>", "  x = [1, 2]\r\n\t",
         '{"k": 1}', "null", "4", "\0", "a\udcff", "e\u0301" * 3)  # fmt: skip
NAMES = ("get_weather", "calc", 'a&b"c', "名前", "x y")


def make_text(rng):
    return "".join(rng.choice(TEXTS) for _ in range(rng.randint(0, 4)))


def make_value(rng, depth=0):
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind == 5:
        return [make_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 6:
        return {make_text(rng): make_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return (
        rng.choice((None, True, False))
        if kind == 0
        else (rng.randint(-9, 10**12), rng.uniform(-1, 1), make_text(rng), "text")[kind - 1]
    )


def make_content(rng, images):
    if rng.random() < 0.6:
        return make_text(rng)
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    return [
        image if images and rng.random() < 0.4 else {"type": "text", "text": make_text(rng)}
        for _ in range(rng.randint(0, 4))
    ]


def make_assistant(rng):
    message = {"role": "assistant", "content": make_content(rng, images=False)}
    if rng.random() < 0.6:
        message["reasoning_content"] = make_text(rng)
    if rng.random() < 0.2:
        message["name"] = rng.choice(NAMES)
    calls = []
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        arguments = {make_text(rng): make_value(rng) for _ in range(rng.randint(0, 3))}
        calls.append({"function": {"name": rng.choice(NAMES), "arguments": arguments}})
    for number, call in enumerate(calls):
        call["id"] = f"call_{number}"
        if rng.random() < 0.5:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if calls:
        message["tool_calls"] = calls
        if rng.random() < 0.3:
            message["content"] = None
    return message


def make_conversation(rng: random.Random) -> dict:
    """Arguments of `encode`: messages, tools, thinking, images."""
    messages = [{"role": rng.choice(("system", "developer")), "content": make_text(rng)}] if rng.random() < 0.4 else []
    tool = lambda: {"type": "function", "function": {"name": rng.choice(NAMES), "parameters": {"type": "object"}}}  # noqa: E731
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.1:
            messages.append({"role": "system", "tools": [tool()]})
        messages.append({"role": "user", "content": make_content(rng, images=True)})
        messages.append(make_assistant(rng))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": make_content(rng, images=True)}
            for call in messages[-1].get("tool_calls", ())
            if rng.random() < 0.8
        ]
        rng.shuffle(results)
        messages += results
    if messages[-1]["role"] == "tool" or rng.random() < 0.5:
        messages.append(make_assistant(rng))
    images = [
        part
        for message in messages
        for part in (message.get("content") or ())
        if isinstance(part, dict) and "image_url" in part
    ]
    sizes = [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in images] if rng.random() < 0.7 else None
    return {
        "messages": messages,
        "tools": [tool() for _ in range(rng.choice((0, 0, 1, 2)))],
        "thinking": rng.random() < 0.6,
        "images": sizes,
    }


@pytest.fixture(scope="session")
def conversations():
    rng = random.Random(1)
    return [make_conversation(rng) for _ in range(1000)]


def plain(message):
    """An assistant's message as the parser gives it."""
    content = message.get("content") or ""
    found = {
        "role": "assistant",
        "content": content if isinstance(content, str) else "".join(part["text"] for part in content),
    }
    for key in ("name", "reasoning_content"):
        if message.get(key):
            found[key] = message[key]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if calls:
        loaded = (
            {**call, "arguments": json.loads(call["arguments"])} if isinstance(call["arguments"], str) else call
            for call in calls
        )
        found["tool_calls"] = [{"function": call} for call in loaded]
    return found


@pytest.fixture(scope="session")
def as_parsed():
    """What parsing gives for an assistant's message, made from the message itself."""
    return lambda message, thinking: {
        key: value for key, value in plain(message).items() if thinking or key != "reasoning_content"
    }


@pytest.fixture(scope="session")
def shared_chats():
    """Texts of the released chats; none where they are not here."""
    if not SHARED.is_dir():
        return []
    goldens = json.loads((SHARED / "release_chat_goldens.json").read_text())["chats"].values()
    examples = json.loads((SHARED / "worked_examples.json").read_text())
    outputs = [path.read_text() for path in sorted(SHARED.glob("*_output.txt"))]
    return [*(golden["text"] for golden in goldens), *(example["output"] for example in examples), *outputs]
