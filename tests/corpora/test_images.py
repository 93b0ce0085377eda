"""Images of conversations: their tokens in rows, their pixels in batches, and files that are missing, damaged or changed."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from k3jax import chat
from k3jax.config import VisionConfig
from k3jax.data import inspect
from k3jax.data.corpus import from_record, open_corpus
from k3jax.data.encoding import Encoder, Encoding, open_tokenizer
from k3jax.data.open import open_packed
from k3jax.data.packed import PackedDataset
from k3jax.data.sources import Document
from k3jax.data.tokenize import tokenize
from k3jax.train.images import reader
from k3jax.vision import preprocess

PATCHES = {"patch": 4, "merge": (2, 2)}
PIXELS = {"a": (16, 8), "b": (5, 8), "c": (16, 16), "d": (24, 16)}  # 2, 1, 4 and 6 tokens


@pytest.fixture(scope="module")
def pad(marked):
    return open_tokenizer(marked).marker("<|media_pad|>")


@pytest.fixture(scope="module")
def vision(pad):
    return VisionConfig(4, 6, 5, 4, 3, 2, 32, 64, 48, 32, 32, media_placeholder_token_id=pad)


def picture(name):
    return {"type": "image", "image": f"pictures/{name}.png"}


def ask(*parts, says="seen"):
    content = [{"type": "text", "text": part} if isinstance(part, str) and len(part) > 1 else picture(part) for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": says}]


CHATS = [
    ask("look at", "a", "and at", "c"),
    ask("b", "d", "which?", says="the second"),
    [*ask("first", "d"), *ask("then", "a", "b")],
    [{"role": "user", "content": "no picture"}, {"role": "assistant", "content": "none"}],
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    draw = np.random.default_rng(0)
    for name, (width, height) in PIXELS.items():
        Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).save(tmp_path / f"pictures/{name}.png")
    write(tmp_path, CHATS)
    return tmp_path


def write(folder, chats):
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(folder / "chats.jsonl")


def encoded(folder, marked, messages, seq_len=1000, **settings):
    encode = Encoder(open_tokenizer(marked), Encoding(seq_len, thinking=False, **PATCHES | settings))
    return list(encode(Document(str(folder / "chats.jsonl"), 0, messages=messages)))


def test_an_image_has_its_tokens_in_its_place(folder, marked, pad):
    for messages in CHATS:
        for learn in ("assistant", "all"):
            ((ids, learnt, _, images),) = encoded(folder, marked, messages, learn=learn)
            names = [name[9] for name in chat.images(messages)]
            assert [image.path for image in images] == [str(folder / f"pictures/{name}.png") for name in names]
            pieces = chat.encode(messages, thinking=False, learn=learn, images=[PIXELS[name] for name in names])
            plain, mask = chat.ids(pieces, open_tokenizer(marked))
            repeats = np.ones(len(plain), int)
            repeats[plain == pad] = [{"a": 2, "b": 1, "c": 4, "d": 6}[name] for name in names]
            assert np.array_equal(ids, np.repeat(plain, repeats)) and np.array_equal(learnt, np.repeat(mask, repeats))
            assert not learnt[ids == pad].any()


def test_messages_that_are_dropped_take_their_images_along(folder, marked, pad):
    ((whole, *_),) = encoded(folder, marked, CHATS[2])
    ((ids, _, _, images),) = encoded(folder, marked, CHATS[2], len(whole) - 10)
    assert [image.path[-5] for image in images] == ["a", "b"] and np.count_nonzero(ids == pad) == 3
    assert np.array_equal(ids, whole[-len(ids) :])


def test_batches_hold_the_images_of_their_rows(folder, marked, vision, pad):
    corpus = tokenize(folder / "corpus", [write(folder, CHATS * 5)], marked, Encoding(400, thinking=False, **PATCHES), held_out=0)
    (rows,) = corpus.rows("train")
    assert rows.counts["images"] == 35 and rows.counts["patches"] % 4 == 0
    assert "20 conversations, 35 images" in inspect.report(folder / "corpus")
    data = PackedDataset([rows], 2, images=reader(vision, open_tokenizer(marked)))
    shapes, seen = set(), set()
    for step in range(len(rows)):
        batch = data.batch(step)
        images = batch["images"]
        shapes.add(images.patches.shape)
        assert np.array_equal((batch["tokens"] == pad).sum(1), images.slots.max(1) + 1)
        one = data.batch(step, slice(1, 2))
        assert np.array_equal(one["images"].patches, images.patches[1:]) and np.array_equal(one["tokens"], batch["tokens"][1:])
        for b, (_, _, record) in enumerate(data.records(np.arange(step * 2, step * 2 + 2))):
            # What the row says that it holds, image by image: sizes in pixels stand before the tokens.
            text = "".join(open_tokenizer(marked).decode(ids) for ids, _ in from_record(record))
            sizes = [tuple(map(int, size)) for size in re.findall(r"image (\d+)x(\d+)", text)]
            names = [next(name for name in PIXELS if PIXELS[name] == size) for size in sizes]
            at = 0
            for number, name in enumerate(names, 1):
                values, (_, _, columns) = preprocess(folder / f"pictures/{name}.png", vision)
                here = slice(at, at + len(values))
                place = images.places[b, here]
                assert (images.ids[b, here] == number).all()
                assert np.array_equal(images.patches[b, here], values[place[:, 1] * columns + place[:, 2]])
                at = here.stop
            seen |= set(names)
            assert (images.ids[b, at:] == 0).all()
    assert len(shapes) == 1 and seen == set(PIXELS)
    assert "images" not in next(data.windows(images=False)) and "images" in next(data.windows())


def test_text_beside_images(folder, marked, vision):
    """Every batch has images of one shape, also of a source that has none."""
    (folder / "t.jsonl").write_text('{"text": "plain"}\n' * 30)
    out = tokenize(folder / "corpus", [write(folder, CHATS), str(folder / "t.jsonl")], marked, Encoding(400, thinking=False, **PATCHES), 0)
    data = PackedDataset(out.rows("train"), 2, weights=(1, 3), images=reader(vision, open_tokenizer(marked)))
    shapes = {part.batch(0)["images"].patches.shape for part in [data, *data.parts().values()]}
    assert len(shapes) == 1 and len(data.parts()) == 2


@pytest.mark.parametrize(
    "named, complaint",
    [
        ("none.png", "{folder}/none.png: no such file"),
        ("pictures", "{folder}/pictures: is a folder, must be an image"),
        ("chats.jsonl", "{folder}/chats.jsonl: not an image of a known format"),
        ("pictures/cut.png", "{folder}/pictures/cut.png: "),
        ("https://example.org/a.png", "found image 'https://example.org/a.png', must be the name of a file"),
        ("data:image/png;base64,AAAA", "found image 'data:image/png;base64,AAAA', must be the name of a file"),
        ("", "found image '', must be the name of a file"),
        (3, "found image 3, must be the name of a file"),
    ],
)
def test_images_that_cannot_be_read_are_named_with_file_and_line(folder, marked, named, complaint):
    data = (folder / "pictures/c.png").read_bytes()
    (folder / "pictures/cut.png").write_bytes(data[: len(data) // 2])
    wrong = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": named}}]}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError) as error:
        tokenize(folder / "corpus", [write(folder, [*CHATS, wrong])], marked, Encoding(400, **PATCHES))
    assert str(error.value).startswith(f"{folder}/chats.jsonl:5: {complaint.format(folder=folder)}") and "\n" not in str(error.value)


def test_a_corpus_with_images_and_what_does_not_fit_it(folder, marked, vision, pad):
    encoding = Encoding(400, thinking=False, **PATCHES)
    corpus = tokenize(folder / "corpus", [str(folder / "chats.jsonl")], marked, encoding, held_out=0.3)
    (rows,) = corpus.rows("train")
    with pytest.raises(ValueError, match="chats.jsonl: found images, must be text: the model has no vision"):
        PackedDataset([rows], 2)
    other = Encoding(400, thinking=False, patch=8)
    with pytest.raises(ValueError, match="^model.vision.patch=8: .*corpus was made with 4; set that, or make it anew"):
        open_packed([str(corpus.folder)], marked, other, 2)
    with pytest.raises(ValueError, match=rf"media_placeholder_token_id=7: must be {pad}, the tokenizer's <\|media_pad\|>"):
        reader(VisionConfig(4, 6, 5, 4, 3, 2, 32, 64, 48, 32, 32, media_placeholder_token_id=7), open_tokenizer(marked))
    assert open_corpus(corpus.folder).encoding == encoding
    for name in PIXELS:
        Image.new("RGB", (40, 40)).save(folder / f"pictures/{name}.png")
    with pytest.raises(ValueError, match=r"\.png: found 10x10 patches, must be .* as when its row was made"):
        PackedDataset([rows], 2, images=reader(vision, open_tokenizer(marked))).batch(0)
