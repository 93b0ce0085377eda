"""A tokenizer of bytes and the released markers, and files of conversations."""

import json
import random

import pytest

from k3jax.data.encoding import open_tokenizer
from k3jax.text import train_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="session")
def marked(tmp_path_factory):
    """Folder of a tokenizer whose ids are bytes and markers."""
    folder = tmp_path_factory.mktemp("marked")
    train_tokenizer(["a"], 512, folder)
    assert open_tokenizer(folder).encode("aé").tolist() != [] and open_tokenizer(folder).vocab_size == 512
    return folder


@pytest.fixture(scope="session")
def conversation():
    return _conversation


def _conversation(draw: random.Random, turns: int = 4, most: int = 60) -> dict:
    """A record of random messages: tools, reasoning, system prompts."""
    words = lambda: "".join(draw.choice('ab c\n<&"é>|') for _ in range(draw.randint(1, most)))  # noqa: E731
    messages, with_tools = [], draw.random() < 0.5
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(draw.randint(1, turns)):
        messages.append({"role": "user", "content": words()})
        if with_tools and draw.random() < 0.7:
            calls = [
                {"id": f"c{i}", "function": {"name": "look", "arguments": json.dumps({"at": words(), "n": i})}}
                for i in range(draw.randint(1, 2))
            ]
            messages.append({"role": "assistant", "content": words(), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": words()} for call in calls]
        messages.append({"role": "assistant", "content": words(), "reasoning_content": words()})
    return {"messages": messages} | ({"tools": TOOLS} if with_tools else {})
