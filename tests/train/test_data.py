"""Finding and splitting text, windows of a stream worked out by hand, order and resumption, the bigram."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.text import ByteTokenizer
from k3jax.tokens import check_tokens
from k3jax.train.data import ByteDataset, bigram_nats, find_text, split_files

# One byte a letter: the stream is a b c d e f g h, with documents starting at 0, 3 and 5.
THREE = [b"abc", b"de", b"fgh"]

documents = st.lists(st.binary(max_size=20), max_size=6).filter(lambda docs: sum(map(len, docs)) > 8)


def write(root, names):
    for name, data in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def stack(batches):
    batches = list(batches)
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


def test_token_outside_vocabulary():
    check_tokens(np.array([0, 255]), 256)
    with pytest.raises(ValueError, match=r"^token id 256 at position \[1, 0\] is outside .* 0 to 255$"):
        check_tokens(np.array([[0, 1], [256, -1]]), 256)


# Finding text


def test_find_text_files_folders_and_globs(tmp_path):
    write(tmp_path, {"b/two.txt": b"2", "b/deep/one.md": b"1", "a.txt": b"0", "b/.hidden/x.txt": b"x",
                     "b/__pycache__/m.txt": b"m", "c[1].txt": b"literal"})
    a, one, two = tmp_path / "a.txt", tmp_path / "b/deep/one.md", tmp_path / "b/two.txt"
    assert find_text([str(tmp_path / "b")]) == [one, two]
    assert find_text([str(two), str(a), str(tmp_path / "b"), str(two)]) == [a, one, two]
    assert find_text([str(tmp_path / "**/*.md")]) == [one]
    assert find_text([str(tmp_path / "c[1].txt")]) == [tmp_path / "c[1].txt"]


def test_find_text_counts_one_file_under_two_names_once(tmp_path):
    write(tmp_path, {"b.txt": b"text"})
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    assert find_text([str(tmp_path)]) == [tmp_path / "a.txt"]


def test_find_text_skips_what_is_no_text_and_says_how_much(tmp_path, caplog):
    write(tmp_path, {"text": b"t", "empty": b"", "latin": b"caf\xe9 ", "nul": b"a\0b"})
    assert find_text([str(tmp_path)]) == [tmp_path / "text"]
    assert "3 of 4 files" in caplog.text


def test_find_text_errors_name_the_entry(tmp_path):
    with pytest.raises(ValueError, match="data.paths: '.*nowhere' matches no file or folder"):
        find_text([str(tmp_path), str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match=f"no text in {tmp_path}: of 0 files"):
        find_text([str(tmp_path)])
    write(tmp_path, {"empty": b""})
    with pytest.raises(ValueError, match=f"no text in {tmp_path}: of 1 files"):
        find_text([str(tmp_path)])


def test_standard_library_is_the_default():
    files = find_text()
    assert os.path.realpath(os.__file__) in map(os.path.realpath, files)
    assert {file.suffix for file in files} == {".py"}
    folders = {part for file in files for part in file.parts[-3:-1]}
    assert "json" in folders and not folders & {"site-packages", "test", "tests", "__pycache__"}
    assert sum(file.stat().st_size for file in files) > 5e6


# Splitting by file


def test_split_is_disjoint_whole_and_the_same_wherever_the_tree_lies(tmp_path):
    names = {f"{folder}/{i}.txt": b"x" for folder in ("p", "q") for i in range(20)}
    splits = []
    for root in (tmp_path / "here", tmp_path / "else/where"):
        write(root, names)
        files = find_text([str(root)])
        train, held = split_files(files, 0.1)
        assert len(held) == 4 and not set(train) & set(held) and sorted(train + held) == files
        splits.append([file.relative_to(root) for file in held])
    assert splits[0] == splits[1]
    ends = [[file.relative_to(root) for file in part] for part in (files[:4], files[-4:])]
    assert splits[0] not in ends


def test_split_leaves_neither_side_empty(tmp_path):
    write(tmp_path, {"a": b"a", "b": b"b"})
    files = find_text([str(tmp_path)])
    assert [len(part) for part in split_files(files, 0.001)] == [1, 1]
    assert [len(part) for part in split_files(files, 0.999)] == [1, 1]
    with pytest.raises(ValueError, match="at least 2 files, not 1"):
        split_files(files[:1])
    with pytest.raises(ValueError, match="between 0 and 1, not 1.5"):
        split_files(files, 1.5)


# Windows


def test_windows_of_three_documents_by_hand():
    data = ByteDataset(THREE, seq_len=4, batch_size=1)
    assert (len(data), data.tokens, data.targets) == (2, 8, 5)
    first, second = data.windows()
    assert {key: value.dtype.name for key, value in first.items()} == {
        "tokens": "int32", "targets": "int32", "segment_ids": "int32", "weights": "float32"}
    assert ByteTokenizer.decode(first["tokens"][0]) == "abcd"
    assert ByteTokenizer.decode(first["targets"][0]) == "bcde"
    assert first["segment_ids"].tolist() == [[1, 1, 1, 2]]
    assert first["weights"].tolist() == [[1, 1, 0, 1]]  # c does not predict d
    # The second window starts inside a document, which is its first; h is the last byte and predicts nothing.
    assert ByteTokenizer.decode(second["tokens"][0]) == "efgh"
    assert second["targets"].tolist() == [[*b"fgh", 0]]
    assert second["segment_ids"].tolist() == [[1, 2, 2, 2]]
    assert second["weights"].tolist() == [[0, 1, 1, 0]]


def test_partial_window_and_padding_rows_by_hand():
    data = ByteDataset(THREE, seq_len=5, batch_size=3)
    (batch,) = data.windows()
    assert batch["tokens"].tolist() == [[*b"abcde"], [*b"fgh", 0, 0], [0] * 5]
    assert batch["targets"].tolist() == [[*b"bcdef"], [*b"gh", 0, 0, 0], [0] * 5]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 0, 0], [0] * 5]
    assert batch["weights"].tolist() == [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0] * 5]


def test_empty_documents_take_no_segment():
    data = ByteDataset([b"", b"ab", b"", b"", b"cd"], seq_len=3, batch_size=1)
    assert next(data.windows())["segment_ids"].tolist() == [[1, 1, 2]]
    assert data.targets == 2


@given(documents, st.integers(1, 8), st.integers(1, 4))
def test_every_byte_with_a_predecessor_is_a_target_once(docs, seq_len, batch_size):
    batch = stack(ByteDataset(docs, seq_len, batch_size).windows())
    counted = batch["weights"] > 0
    pairs = list(zip(batch["tokens"][counted].tolist(), batch["targets"][counted].tolist()))
    assert pairs == [pair for doc in docs for pair in zip(doc, doc[1:])]
    assert (batch["segment_ids"] > 0).sum() in (sum(map(len, docs)), sum(map(len, docs)) - 1)


def test_limit_spreads_windows_evenly():
    data = ByteDataset([bytes(range(1, 101))], seq_len=9, batch_size=4)
    assert len(data) == 11
    batches = list(data.windows(limit=3))
    assert [batch["tokens"].shape for batch in batches] == [(4, 9)]
    assert batches[0]["tokens"][:, 0].tolist() == [1, 1 + 3 * 9, 1 + 7 * 9, 0]
    assert len(list(data.windows(limit=99))) == 3


# Order


def test_batch_depends_on_seed_and_step_alone():
    docs = [bytes(range(256))] * 4
    data = ByteDataset(docs, seq_len=8, batch_size=6, seed=3)
    straight = [data.batch(step) for step in range(60)]
    fresh = ByteDataset(docs, seq_len=8, batch_size=6, seed=3)
    for step in (59, 0, 21, 22, 43, 1):  # any order, across the ends of epochs
        for key, value in fresh.batch(step).items():
            np.testing.assert_array_equal(value, straight[step][key])
    other = ByteDataset(docs, seq_len=8, batch_size=6, seed=4)
    assert not np.array_equal(other.batch(0)["tokens"], straight[0]["tokens"])


def test_order_of_the_first_epoch_is_fixed_for_good():
    data = ByteDataset([bytes(range(9))], seq_len=1, batch_size=8)
    assert data.batch(0)["tokens"][:, 0].tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


@given(st.integers(1, 9), st.integers(0, 3))
def test_each_epoch_visits_each_window_once_in_its_own_order(batch_size, seed):
    # 23 windows, so that batches straddle epochs; the first byte names the window.
    data = ByteDataset([bytes(range(24))], seq_len=1, batch_size=batch_size, seed=seed)
    assert data.epoch(23) == batch_size
    rows = stack(data.batch(step) for step in range(3 * 23))["tokens"]
    visited = rows[: 3 * 23, 0].reshape(3, 23)
    np.testing.assert_array_equal(np.sort(visited), np.tile(np.arange(23), (3, 1)))
    assert len({tuple(epoch) for epoch in visited.tolist()} | {tuple(range(23))}) == 4


def test_rows_are_slices_of_the_whole_batch():
    data = ByteDataset([bytes(range(200))], seq_len=16, batch_size=8)
    for whole, part in (
        (data.batch(1), lambda rows: data.batch(1, rows)),  # 13 windows: this batch straddles two epochs
        (list(data.windows())[1], lambda rows: list(data.windows(rows=rows))[1]),
    ):
        parts = stack(part(rows) for rows in (slice(0, 2), np.arange(2, 5), slice(5, 8)))
        for key in whole:
            np.testing.assert_array_equal(parts[key], whole[key])


@pytest.mark.parametrize("sizes, message", [
    (dict(seq_len=8, batch_size=1), "3 documents hold 8 bytes and seq_len=8 needs 9"),
    (dict(seq_len=4, batch_size=0), "batch_size must be at least 1, not 0"),
    (dict(seq_len=0, batch_size=1), "seq_len must be at least 1, not 0"),
    (dict(seq_len=4, batch_size=1, seed=-1), "seed must be at least 0, not -1"),
])
def test_sizes_that_make_no_batch(sizes, message):
    with pytest.raises(ValueError, match=message):
        ByteDataset(THREE, **sizes)


def test_documents_come_from_files(tmp_path):
    write(tmp_path, {str(i): doc for i, doc in enumerate(THREE)})
    data = ByteDataset.from_files(find_text([str(tmp_path)]), seq_len=4, batch_size=1)
    assert [ByteTokenizer.decode(batch["tokens"][0]) for batch in data.windows()] == ["abcd", "efgh"]
    assert data.targets == 5


# Bigram


def test_bigram_by_hand():
    # Pairs ab, ab, ba, ba, ac: a first in 3 and b in 2; b second in 2, a in 2 and c in 1 of 5.
    train = ByteDataset([b"ababa", b"ac"], seq_len=4, batch_size=1)
    held = ByteDataset([b"ab", b"cc"], seq_len=3, batch_size=1)
    a, b, c = 3 / 261, 3 / 261, 2 / 261

    def left_out(alpha):  # each pair scored by the four others
        ab, ba, ac = (1 + alpha * b) / (2 + alpha), (1 + alpha * a) / (1 + alpha), alpha * c / (2 + alpha)
        return 2 * np.log(ab) + 2 * np.log(ba) + np.log(ac)

    alpha = max(2.0 ** np.arange(-4, 17), key=left_out)
    assert 1 / 16 < alpha < 2**16
    expected = -np.mean([np.log((2 + alpha * b) / (3 + alpha)), np.log(c)])
    assert bigram_nats(train, held) == pytest.approx(expected, rel=1e-12)


def test_bigram_of_independent_bytes_is_their_entropy():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 16, 250_000, np.uint8).tobytes()
    train, held = ByteDataset([text[:200_000]], 64, 32), ByteDataset([text[200_000:]], 64, 32)
    assert bigram_nats(train, held) == pytest.approx(np.log(16), abs=2e-3)
    assert bigram_nats(train, held, limit=10) != bigram_nats(train, held)


def test_bigram_needs_a_target():
    with pytest.raises(ValueError, match="no held-out byte has a predecessor"):
        bigram_nats(ByteDataset(THREE, 4, 1), ByteDataset([b"a"] * 9, 4, 1))


def test_what_is_no_regular_file_is_refused_or_left_out(tmp_path, monkeypatch, caplog):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.txt")
    assert find_text([str(tmp_path)]) == [tmp_path / "a.txt"]  # a walk leaves it out, and says so
    assert "2 of 3 files" in caplog.text
    for named in ("pipe.txt", "*.txt"):
        with pytest.raises(ValueError, match="pipe.txt: is a pipe, must be a regular file or a folder"):
            find_text([str(tmp_path / named)])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_text(["~/a.txt"]) == [tmp_path / "a.txt"]
    for empty in ("", " "):
        with pytest.raises(ValueError, match="data.paths: .* must be the name of a file or folder"):
            find_text([empty])
