"""Batches of packed rows: by hand, of several sources, on any number of processes, from files that are damaged."""

import json
import random

import numpy as np
import pytest

from k3jax.data.ahead import Ahead
from k3jax.data.corpus import INDEX, Rows, ShardWriter, fill, from_record, open_corpus, to_record
from k3jax.data.encoding import Encoding, Tokens
from k3jax.data.open import open_packed
from k3jax.data.packed import PackedDataset
from k3jax.data.tokenize import tokenize

CONVERSATION = Tokens(np.array([1, 2, 3, 163839], np.int32), np.array([True, False, True, True]), 3)
TEXT = Tokens(np.array([7, 8], np.int32), np.array([True, True]), 2)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def write_lines(path, count, letter, size=30):
    draw = random.Random(letter)
    records = [{"text": letter * draw.randint(2, size) + f" {n}"} for n in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Sources of unlike sizes."""
    folder = tmp_path_factory.mktemp("three")
    paths = [write_lines(folder / f"{letter}.jsonl", count, letter) for letter, count in zip("abc", (90, 40, 15))]
    return tokenize(folder / "out", paths, None, Encoding(64), held_out=0.2)


# Rows


def test_a_row_by_hand():
    record = to_record([CONVERSATION, TEXT])
    assert [(ids.tolist(), learnt.tolist()) for ids, learnt in from_record(record)] == [
        ([1, 2, 3, 163839], [True, False, True, True]),
        ([7, 8], [True, True]),
    ]
    batch = {name: np.zeros((2, 6), np.int32) for name in ("tokens", "targets", "segment_ids")}
    batch["weights"] = np.zeros((2, 6), np.float32)
    fill(batch, 1, record)
    assert {key: value[1].tolist() for key, value in batch.items()} == {
        "tokens": [1, 2, 3, 7, 0, 0],
        "targets": [2, 3, 163839, 8, 0, 0],
        "segment_ids": [1, 1, 1, 2, 0, 0],
        "weights": [0, 1, 1, 1, 0, 0],
    }
    assert not any(value[0].any() for value in batch.values())


@pytest.mark.parametrize("words", [[], [0], [1, 1, 5], [2, 2, 2, 1, 1, 1], [1, 3, 1, 1], [1 << 31, 2]])
def test_what_is_no_record(words):
    with pytest.raises(ValueError, match="no row of documents"):
        from_record(np.array(words, "<u4").tobytes())
    with pytest.raises(ValueError, match="no row of documents"):
        from_record(b"abc")


def test_windows_hold_every_target_once(three):
    for side in ("train", "held_out"):
        data = PackedDataset(three.rows(side), batch_size=4)
        batches = list(data.windows())
        for name, count in (("weights", "learnt"), ("segment_ids", "tokens")):
            total = sum(np.count_nonzero(batch[name]) for batch in batches)
            assert total == sum(source.counts[count] for source in data.sources)
        assert len(batches) == -(-len(data) // 4)
        few = list(data.windows(5))
        assert len(few) == 2 and few[0]["tokens"].shape == (4, 64) and few[1]["weights"][1:].sum() == 0
        assert same(next(data.windows(5, slice(2, 4))), {key: value[2:4] for key, value in few[0].items()})


# Order


def test_every_row_comes_once_an_epoch(three):
    data = PackedDataset(three.rows("train"), batch_size=3, seed=1)
    rows = len(data)
    order = [(source.name, row) for source, row, _ in data.records(np.arange(3 * rows))]
    epochs = [order[i : i + rows] for i in range(0, 3 * rows, rows)]
    assert all(len(set(epoch)) == rows for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert PackedDataset(three.rows("train"), 3, seed=2).batch(0)["tokens"].tolist() != data.batch(0)["tokens"].tolist()
    assert data.epoch(rows) == 3


def test_weights_are_exact_and_each_source_is_gone_through_in_turn(three):
    data = PackedDataset(three.rows("train"), batch_size=10, weights=(5, 3, 2))
    found = list(data.records(np.arange(400)))
    names = [source.name[-7] for source, _, _ in found]
    for first in range(0, 390):
        window = names[first : first + 10]
        assert [window.count(letter) for letter in "abc"] == [5, 3, 2]
    for source in data.sources:
        rows = [row for of, row, _ in found if of is source]
        for first in range(0, len(rows) - len(source), len(source)):
            assert sorted(rows[first : first + len(source)]) == list(range(len(source)))


@pytest.mark.parametrize("weights", [(), (5, 3, 2)])
def test_resumed_on_any_number_of_processes_at_any_step(three, weights):
    """Each process opens the corpus anew, and asks for its own rows of the steps after its first."""
    whole = PackedDataset(three.rows("train"), batch_size=8, seed=3, weights=weights)
    steps = [whole.batch(step) for step in range(40)]
    for first, processes in ((0, 1), (1, 2), (13, 4), (39, 2)):
        for process in range(processes):
            rows = np.arange(8) if processes == 1 else slice(process * 8 // processes, (process + 1) * 8 // processes)
            data = PackedDataset(open_corpus(three.folder).rows("train"), 8, 3, weights)
            for step in range(first, 40):
                assert same(data.batch(step, rows), {key: value[rows] for key, value in steps[step].items()})


def test_what_is_held_does_not_grow_with_the_rows(three):
    source = three.rows("train")[0]
    shards = [type(source.shards[0])(source.shards[0].path, 10**12, 0, "")]
    data = PackedDataset([Rows("large", 64, {}, shards)], batch_size=8)
    (sources, rows) = data._chosen(np.arange(10**6, 10**6 + 1000))
    assert len(set(rows.tolist())) == 1000 and rows.max() > 9 * 10**11 and len(data) == 10**12


def test_many_files_are_not_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("k3jax.data.corpus._OPEN_FILES", 2)
    monkeypatch.setattr("k3jax.data.tokenize._PART_BYTES", (200, 200))
    paths = [write_lines(tmp_path / "x.jsonl", 60, "x")]
    rows = tokenize(tmp_path / "out", paths, None, Encoding(64), held_out=0).rows("train")
    data = PackedDataset(rows, 8)
    assert len(rows[0].shards) > 6
    with Ahead(data.batch, 0, 10) as batches:
        for step, batch in enumerate(batches):
            assert same(batch, PackedDataset(rows, 8).batch(step))
    assert len(rows[0]._readers) <= 2


# Ahead


def test_batches_are_made_ahead_and_in_order():
    made = []
    with Ahead(lambda step: made.append(step) or step, 3, 9, threads=2, depth=3) as batches:
        first = next(iter(batches))
        assert first == 3 and set(made) <= {3, 4, 5, 6} and list(batches) == [4, 5, 6, 7, 8]
        assert batches.waited >= 0
    assert list(Ahead(lambda step: step, 4, 4)) == []


def test_an_error_comes_with_its_step():
    def make(step):
        if step == 2:
            raise ValueError("step 2 is damaged")
        return step

    with Ahead(make, 0, 5) as batches:
        found = iter(batches)
        assert [next(found), next(found)] == [0, 1]
        with pytest.raises(ValueError, match="step 2 is damaged"):
            next(found)


# What is wrong


def refuses(call, *patterns):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    for pattern in patterns:
        assert pattern in str(error.value)


@pytest.fixture
def own(tmp_path):
    """A corpus to damage."""
    paths = [write_lines(tmp_path / "x.jsonl", 400, "x")]
    return tokenize(tmp_path / "out", paths, None, Encoding(64), held_out=0.2)


def test_a_record_that_is_damaged(own):
    shard = own.rows("train")[0].shards[0].path
    data = bytearray(shard.read_bytes())
    (record,) = own.rows("train")[0].read(np.array([5]))
    data[data.index(record) + len(record) // 2] ^= 1
    shard.write_bytes(data)
    rows = open_corpus(own.folder).rows("train")
    refuses(lambda: list(PackedDataset(rows, 4).windows()), f"{shard}: a record is damaged; make the corpus anew (")
    assert next(PackedDataset(rows, 4).windows())["tokens"].any()  # the others can be read
    refuses(lambda: own.check(contents=True), f"{shard}: damaged, its SHA-256 is not that of {INDEX}")


def test_files_that_are_missing_or_cut(own):
    shard = own.rows("held_out")[0].shards[0].path
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    refuses(lambda: open_corpus(own.folder), f"{shard}: found {len(content) - 1} bytes, must be {len(content)}")
    shard.unlink()
    refuses(lambda: open_corpus(own.folder), f"{shard}: {INDEX} names this shard, it cannot be read (No such file")
    index = own.folder / INDEX
    index.write_text(index.read_text()[:-30])
    refuses(lambda: open_corpus(own.folder), f"{index}: not readable as JSON")
    index.write_text('{"format": 9}')
    refuses(lambda: open_corpus(own.folder), f"{index}: found format 9, must be 1")


def test_a_shard_of_another_corpus(own):
    shard = own.rows("train")[0].shards[0]
    writer = ShardWriter(shard.path)
    writer.write([TEXT])
    writer.close()
    with open(shard.path, "ab") as stream:
        stream.truncate(shard.size)
    refuses(lambda: list(PackedDataset(own.rows("train"), 4).windows()), f"{shard.path}: ")


def test_a_corpus_of_another_tokenizer_or_other_settings(own, marked):
    paths = [str(own.folder)]
    refuses(lambda: open_packed(paths, marked, Encoding(64), 4), "made with another tokenizer (bytes, 256 tokens, ", "tiktoken, 512")
    refuses(lambda: open_packed(paths, None, Encoding(128), 4), f"data.seq_len=128: {own.folder} was made with 64")
    refuses(lambda: open_packed(paths, None, Encoding(64, long="skip"), 4), "data.long=skip: ", "was made with cut")


def test_weights_that_do_not_fit(own):
    rows = own.rows("train")
    refuses(lambda: PackedDataset(rows, 4, weights=(1, 2)), "data.weights: found 2, must be 1, one a source: ", "x.jsonl")
    refuses(lambda: PackedDataset(rows, 4, weights=(-1,)), "data.weights=-1: found -1, must be positive numbers")


# Sources of a run


def test_sources_are_made_into_corpora_once(own, tmp_path, monkeypatch):
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))
    text = write_lines(tmp_path / "y.jsonl", 50, "y")
    options = {"batch_size": 4, "weights": (1, 3), "held_out": 0.2}
    train, held = open_packed([str(own.folder), text], None, Encoding(64), **options)
    assert [source.name for source in train.sources] == [own.index["sources"][0]["name"], text] == [s.name for s in held.sources]
    (made,) = (tmp_path / "cache/corpora").iterdir()
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*.array_record")}
    assert same(open_packed([str(own.folder), text], None, Encoding(64), **options)[0].batch(5), train.batch(5))
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*.array_record")} == before
    write_lines(tmp_path / "y.jsonl", 51, "y")
    open_packed([text], None, Encoding(64), 4)
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 2


def test_held_out_sources_of_their_own(own, tmp_path, monkeypatch):
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))
    texts = [write_lines(tmp_path / f"{letter}.jsonl", 20, letter) for letter in "pq"]
    train, held = open_packed(texts[:1], None, Encoding(64), 4, held_out_paths=texts[1:])
    assert [source.name for source in held.sources] == texts[1:]
    assert sum(source.counts["documents"] for source in train.sources) == 20
    refuses(lambda: open_packed(texts, None, Encoding(64), 4, held_out_paths=["nowhere"]), "data.held_out_paths: 'nowhere' matches no")
    corpus = tokenize(tmp_path / "all", texts[:1], None, Encoding(64), held_out=0)
    refuses(lambda: open_packed([str(corpus.folder)], None, Encoding(64), 4), "made without held-out rows; name some in data.held_out_paths")
