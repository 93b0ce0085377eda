"""Documents of files, whole and in spans, and what is said of records that are none."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from k3jax.data import sources
from k3jax.data.sources import Span, documents, files_of, parts_of

CHAT = {"messages": [{"role": "user", "content": "é\nx"}, {"role": "assistant", "content": "b"}]}


def read(file, size=1 << 40):
    return [document for part in parts_of([file], size) for span in part for document in documents(span)]


def test_files_folders_and_globs(tmp_path):
    for name in ("b/two.txt", "b/deep/one.jsonl", "b/.hidden/x", "b/__pycache__/m", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "b/link.txt").symlink_to(tmp_path / "b/two.txt")
    names = lambda entry: [str(file.relative_to(tmp_path)) for file in files_of(str(tmp_path / entry))]  # noqa: E731
    assert names("b") == ["b/deep/one.jsonl", "b/link.txt"] and names("a.txt") == ["a.txt"]
    assert names("**/*.jsonl") == ["b/deep/one.jsonl"]
    with pytest.raises(ValueError, match="^data.paths: '.*nowhere' matches no file or folder"):
        files_of(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("size", [1, 7, 50, 1 << 40])
def test_lines_are_the_same_in_spans_of_any_size(tmp_path, size):
    records = [{"text": "a" * n + "é\n"} for n in range(20)] + [CHAT, CHAT | {"tools": json.dumps([{"name": "look"}])}]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) + "\r\n" * (i % 2) for i, record in enumerate(records)))
    found = read(file, size)
    assert [document.text for document in found[:20]] == [record["text"] for record in records[:20]]
    assert [(document.messages, document.tools) for document in found[20:]] == [
        (CHAT["messages"], ()),
        (CHAT["messages"], [{"name": "look"}]),
    ]
    assert len({document.identity for document in found}) == 22
    assert found[2].where() == f"{file}:4"  # behind the empty line of the second record
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert [document.identity for document in read(packed, size)] == [document.identity for document in found]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "not JSON"),
        ("[1]", "found [1], must be"),
        ('{"text": 3}', 'found {"text": 3}, must be'),
        ('{"messages": null}', "found"),
        ('{"messages": [], "tools": "["}', "tools: not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, complaint):
    for name, write in (("x.jsonl", lambda data: data), ("x.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(write(f'{{"text": "a"}}\n\n{line}\n'.encode()))
        with pytest.raises(ValueError) as error:
            read(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}:3: {complaint}")


def test_a_file_that_is_cut_short(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9])
    with pytest.raises(ValueError, match="x.jsonl.gz: cut short or damaged"):
        read(tmp_path / "x.jsonl.gz")


def test_parquet(tmp_path):
    columns = {"messages": [CHAT["messages"], [{"role": "assistant", "content": "c", "name": "n"}]], "id": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "c.parquet", row_group_size=1)
    for size in (1, 1 << 40):
        found = read(tmp_path / "c.parquet", size)
        assert [document.messages for document in found] == columns["messages"]  # no key is None
        assert found[1].where() == f"{tmp_path / 'c.parquet'}, row 2"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="t.parquet, row 2: found None as text, must be a string"):
        read(tmp_path / "t.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "n.parquet")
    with pytest.raises(ValueError, match=r"n.parquet: found the columns body, id, must be messages \(and tools\), or text"):
        read(tmp_path / "n.parquet")
    (tmp_path / "x.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match="x.parquet: not readable as Parquet"):
        read(tmp_path / "x.parquet")


def test_long_texts_are_cut_after_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "TEXT_BYTES", 100)
    monkeypatch.setattr(sources, "_LINE_BYTES", 40)
    text = "".join(f"line {n} é\n" for n in range(60)) + "é" * 300 + "\nend"
    (tmp_path / "x.txt").write_text(text)
    found = [document.text for document in read(tmp_path / "x.txt")]
    assert "".join(found) == text and all(60 <= len(part.encode()) <= 160 for part in found[:-1])
    assert all(part.endswith("\n") for part in found[:3]) and not found[6].endswith("\n")
    (tmp_path / "y.txt").write_text("short\n")
    assert [document.text for document in read(tmp_path / "y.txt")] == ["short\n"]


def test_what_is_no_text(tmp_path):
    for name, data in (("latin", b"caf\xe9"), ("nul", b"a\0b"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
    assert [read(tmp_path / name) for name in ("latin", "nul", "empty")] == [[None], [None], []]


def test_parts_hold_about_as_much_as_is_asked(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x" * 30)
    (tmp_path / "big.jsonl").write_text('{"text": "a"}\n' * 20)
    parts = parts_of(files_of(str(tmp_path)), 100)
    assert [span.file for part in parts for span in part][:2] == [str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]
    assert all(sum(span.size for span in part) <= 100 for part in parts) and len(parts) == 7
    assert parts[-1][-1] == Span(str(tmp_path / "big.jsonl"), 200, 280, 80)
