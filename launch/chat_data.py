"""Makes what configs/chat.py learns from, out of the running Python's standard library: python launch/chat_data.py runs/chat/data

text.jsonl        signatures and docstrings of modules, to learn the language from
chats.jsonl       conversations about their functions, some with a tool's call and its result
held_out.jsonl    conversations about functions of other modules, which neither of the two holds
tokenizer         trained on all but the held-out modules
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from k3jax import chat
from k3jax.data.sources import LIBRARY, files_of
from k3jax.text import train_tokenizer

VOCABULARY = 1024
HELD_OUT = 30  # one module in so many
LONGEST = 100  # characters of an answer
SIGNATURE = {
    "type": "function",
    "function": {
        "name": "signature",
        "description": "Arguments of a function.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


def main(folder: Path) -> None:
    texts, chats, held = [], [], []
    for file in files_of(LIBRARY):
        try:
            functions = list(documented(ast.parse(file.read_text(encoding="utf-8"))))
        except (SyntaxError, ValueError):
            continue
        module = module_of(file)
        is_held = digest(module)[0] % HELD_OUT == 0
        if functions and not is_held:
            stubs = [f'def {name}{signature}:\n    """{text}"""\n' for name, signature, text in functions]
            texts.append({"text": "\n\n".join(stubs)})
        for name, signature, text in functions:
            if answer := first_sentence(text):
                (held if is_held else chats).append(conversation(f"{module}.{name}", signature, answer))
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("text", texts), ("chats", chats), ("held_out", held)):
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    said = (piece.text for record in chats for piece in chat.encode(**record) if not piece.marker)
    train_tokenizer([*(record["text"] for record in texts), *said], VOCABULARY, folder / "tokenizer")
    print(f"{len(texts)} texts, {len(chats)} conversations and {len(held)} held out, and a tokenizer in {folder}")


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def module_of(file: Path) -> str:
    """Such as `json.decoder`."""
    library = Path(ast.__file__).resolve().parent
    parts = file.relative_to(library).with_suffix("").parts if file.is_relative_to(library) else (file.stem,)
    return ".".join(part for part in parts if part != "__init__")


def documented(module: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(name, signature, docstring) of public functions and of the public methods of classes."""
    for node in module.body:
        inner = [(f"{node.name}.", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for prefix, function in inner:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                if text := ast.get_docstring(function):
                    yield prefix + function.name, f"({ast.unparse(function.args)})", text


def first_sentence(text: str) -> str:
    """The first sentence of a docstring; nothing where it is none, or long."""
    sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0]
    return f"{sentence.rstrip('.')}." if 10 < len(sentence) < LONGEST and sentence.isascii() else ""


def conversation(name: str, signature: str, answer: str) -> dict:
    """A question about what a function does, about its arguments, which a tool knows, or first one and then the other."""
    kind = digest(name)[1] % 3 if len(signature) < LONGEST else 0
    messages = []
    if kind != 1:
        messages += [
            {"role": "user", "content": f"What does {name} do?"},
            {"role": "assistant", "reasoning_content": "I know this function.", "content": answer},
        ]
    if kind == 0:
        return {"messages": messages}
    call = {"id": "1", "function": {"name": "signature", "arguments": {"name": name}}}
    question = f"Which arguments does {name} take?" if kind == 1 else "And which arguments does it take?"
    messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "reasoning_content": "I look them up.", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": signature},
        {"role": "assistant", "reasoning_content": "Here they are.", "content": f"It takes {signature}."},
    ]
    return {"messages": messages, "tools": [SIGNATURE]}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python launch/chat_data.py FOLDER")
    main(Path(sys.argv[1]))
