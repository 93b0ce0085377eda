"""Pairs of images and text: how they are read, packed, learnt from, and refused."""

import dataclasses
import json
import os

import numpy as np
import pytest
from PIL import Image

from k3jax.config import VisionConfig
from k3jax.train.pairs import PairDataset, encode_pair, find_pairs, split_pairs
from k3jax.vision import preprocess

VISION = VisionConfig(4, 6, 5, 4, 3, 2, 32, 64, 48, 32, 32, media_placeholder_token_id=255)
RNG = np.random.default_rng(0)


def draw(path, width, height):
    Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return path.name


@pytest.fixture
def folder(tmp_path):
    """Images of 2, 1 and 4 tokens and four pairs: one image, two in the middle, a clip, none."""
    a, b, c = draw(tmp_path / "a.png", 16, 8), draw(tmp_path / "b.png", 5, 8), draw(tmp_path / "c.png", 16, 16)
    records = [
        {"image": a, "text": "one"},
        {"image": [b, c], "text": "x<image>y<image>z"},
        {"image": [[a, a, a]], "text": "clip"},
        {"image": [], "text": "none"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n\n".join(map(json.dumps, records)) + "\n")
    return tmp_path


def test_encode():
    assert encode_pair("ab", 0, VISION).tolist() == [97, 98]
    assert encode_pair("ab", 2, VISION).tolist() == [255, 255, 97, 98]
    assert encode_pair("a<image>b<image>", 2, VISION).tolist() == [97, 255, 98, 255]
    assert encode_pair("\u00e9<image>", 1, VISION).tolist() == [0xC3, 0xA9, 255]
    for text, images in (("<image>", 2), ("<image>", 0), ("<image><image>", 1)):
        says = f"found {text.count('<')} <image> in the text, must be {images} like its images"
        with pytest.raises(ValueError, match=says):
            encode_pair(text, images, VISION)
    with pytest.raises(ValueError, match="media_placeholder_token_id: found 97, must be 245 to 255 in a byte model"):
        encode_pair("a", 1, dataclasses.replace(VISION, media_placeholder_token_id=97))


def test_rows(folder):
    pairs = find_pairs([str(folder / "pairs.jsonl")])
    assert [pair.where.rsplit(":", 1)[1] for pair in pairs] == ["1", "3", "5", "7"]
    data = PairDataset(pairs, VISION, seq_len=12, batch_size=2)
    # 4 and 7 places fit one row of 12 places, 5 and 3 the next.
    assert len(data) == 2
    (batch,) = data.windows()
    P = 255
    one, two = [P, P, *b"one"], [*b"x", P, *b"y", *[P] * 4, *b"z"]
    clip, none = [P, P, *b"clip"], [*b"none"]
    np.testing.assert_array_equal(batch["tokens"][0], [*one[:-1], *two[:-1], 0])
    np.testing.assert_array_equal(batch["targets"][0], [*one[1:], *two[1:], 0])
    np.testing.assert_array_equal(batch["segment_ids"][0], [1] * 4 + [2] * 7 + [0])
    np.testing.assert_array_equal(batch["weights"][0], [0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(batch["tokens"][1], [*clip[:-1], *none[:-1], 0, 0, 0, 0])
    images = batch["images"]
    assert images.ids.shape == (2, 64)
    np.testing.assert_array_equal(images.ids[0], [1] * 8 + [2] * 4 + [3] * 16 + [0] * 36)
    np.testing.assert_array_equal(images.ids[1], [1] * 24 + [0] * 40)
    assert images.slots.max(axis=1).tolist() == [6, 1]
    at = images.places[0, 8:12]
    expected = preprocess(folder / "b.png", VISION).values[2 * at[:, 1] + at[:, 2]]
    np.testing.assert_array_equal(images.patches[0, 8:12], expected)
    assert len(PairDataset(pairs, VISION, seq_len=11, batch_size=2)) == 2  # the first row is full
    text = next(data.windows(images=False))
    assert "images" not in text
    np.testing.assert_array_equal(text["tokens"], batch["tokens"])


def test_the_fullest_row_decides_the_bucket(folder):
    draw(folder / "d.png", 40, 40)
    records = [{"image": image, "text": "abc"} for image in ("a.png", "d.png", "a.png")]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = PairDataset(find_pairs([str(folder / "pairs.jsonl")]), VISION, seq_len=28, batch_size=3)
    assert len(data) == 3 and data.batch(0)["images"].ids.shape == (3, 128)


def test_placeholders_are_as_many_as_image_tokens_in_every_batch(folder):
    data = PairDataset(find_pairs([str(folder / "pairs.jsonl")]), VISION, seq_len=16, batch_size=3)
    for step in range(4):
        batch = data.batch(step)
        np.testing.assert_array_equal((batch["tokens"] == 255).sum(axis=1), batch["images"].slots.max(axis=1) + 1)
    both, second = data.batch(1), data.batch(1, slice(1, 2))
    for name in ("tokens", "weights"):
        np.testing.assert_array_equal(second[name], both[name][1:2])
    np.testing.assert_array_equal(second["images"].patches, both["images"].patches[1:2])


def test_split_is_by_content(folder):
    pairs = find_pairs([str(folder / "pairs.jsonl")])
    train, held = split_pairs(pairs, 0.3)
    assert (len(train), len(held)) == (3, 1) and sorted([*train, *held], key=str) == sorted(pairs, key=str)
    assert set(split_pairs(pairs[::-1], 0.3)[1]) == set(held)
    with pytest.raises(ValueError, match="data.pairs: found 1 pair, a split into train and held-out needs 2"):
        split_pairs(pairs[:1], 0.3)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"pairs.jsonl:1: not JSON"),
        ("[]", r"pairs.jsonl:1: found \[\], must be"),
        ('{"image": "a.png"}', "pairs.jsonl:1: found .*, must be"),
        ('{"image": "a.png", "text": 3}', "pairs.jsonl:1: found .*, must be"),
        ('{"image": "a.png", "text": "a", "label": 3}', "pairs.jsonl:1: found .*, must be"),
        ('{"image": "", "text": "a"}', "pairs.jsonl:1: found image '', must be a path"),
        ('{"image": "a.png", "text": "a", "text": "b"}', r"pairs.jsonl:1: not JSON \(text is listed twice\)"),
        ('{"image": [3], "text": "a"}', "pairs.jsonl:1: found image 3, must be a path"),
        ('{"image": [[]], "text": "a"}', r"pairs.jsonl:1: found image \[\], must be a path"),
        ("", "data.pairs: no pair in"),
    ],
)
def test_files_that_are_refused(tmp_path, line, message):
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        find_pairs([str(tmp_path / "pairs.jsonl")])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="data.pairs: .*none.jsonl: cannot be read"):
        find_pairs([str(tmp_path / "none.jsonl")])


@pytest.mark.parametrize(
    "record, message",
    [
        ({"image": "none.png", "text": "a"}, "pairs.jsonl:1: .*none.png: no such file"),
        ({"image": "a.png", "text": "<image><image>"}, "pairs.jsonl:1: found 2 <image> in the text, must be 1"),
        ({"image": "c.png", "text": "a" * 10}, r"pairs.jsonl:1: found 14 tokens, .*must be 2 to data.seq_len\+1=13"),
        ({"image": [], "text": "a"}, "pairs.jsonl:1: found 1 tokens"),
        ({"image": "c.png", "text": "a <image>"}, "pairs.jsonl:1: found an image at the end, must be before text"),
        ({"image": "c.png", "text": ""}, "pairs.jsonl:1: found an image at the end, must be before text"),
    ],
)
def test_pairs_that_do_not_fit(folder, record, message):
    (folder / "pairs.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        PairDataset(find_pairs([str(folder / "pairs.jsonl")]), VISION, seq_len=12, batch_size=1)


def test_an_image_that_goes_bad_later_is_named(folder):
    data = PairDataset(find_pairs([str(folder / "pairs.jsonl")]), VISION, seq_len=12, batch_size=2)
    (folder / "c.png").write_bytes((folder / "c.png").read_bytes()[:200])
    with pytest.raises(ValueError, match="pairs.jsonl:3: .*c.png: .*truncated"):
        data.batch(0)


def test_files_of_a_home_folder_and_files_that_are_none(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    os.mkfifo(folder / "pipe")
    (folder / "home.jsonl").write_text('{"image": "~/a.png", "text": "one\u2028line"}\n')
    (pair,) = find_pairs(["~/home.jsonl"])
    assert pair.images == (folder / "a.png",) and pair.text == "one\u2028line"
    assert preprocess("~/a.png", VISION).grid == preprocess(folder / "a.png", VISION).grid
    with pytest.raises(ValueError, match="data.pairs: .*pipe: .* is a pipe, must be a regular file"):
        find_pairs([str(folder / "pipe")])
    with pytest.raises(ValueError, match="pipe: is a pipe, must be a regular file"):
        preprocess(folder / "pipe", VISION)
