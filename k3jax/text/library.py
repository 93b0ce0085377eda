"""tokenizer.json of the `tokenizers` library: byte-level tokens, split and merged by the library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tokenizers

from k3jax.text.base import TableTokenizer
from k3jax.text.files import LIBRARY, read_json

# Text that has to come back as it was: case, white space at either end, several scripts, what NFC leaves alone.
_PROBE = "Ab c\n\n  d\té你好 🙂 1234 'x' "


def byte_characters() -> dict[str, int]:
    """The 256 characters that stand for bytes in the tokens of byte-level vocabularies."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


class LibraryTokenizer(TableTokenizer):
    """Ids of `folder`/tokenizer.json. Its special tokens are the markers; other added tokens are text.

    What it would add by itself (begin of text, padding, truncation) is off.

    Raises:
        ValueError: naming the file: the library cannot read it, or text does not come back from its ids as it was.
    """

    kind = "json"

    def __init__(self, folder: str | Path):
        path = Path(folder) / LIBRARY
        read_json(path)
        content = path.read_bytes()
        try:
            self._core = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{path}: is no tokenizer ({str(error).splitlines()[0]:.200})") from None
        self._core.no_truncation()
        self._core.no_padding()
        self._core.encode_special_tokens = True  # to text: the name of a marker in a text is text
        added = self._core.get_added_tokens_decoder()
        markers = {token.content: id for id, token in added.items() if token.special}
        characters = byte_characters()
        vocabulary = self._core.get_vocab(with_added_tokens=True)
        tokens: list[bytes | None] = [None] * (1 + max(vocabulary.values(), default=-1))
        try:
            for token, id in vocabulary.items():
                if id in added:
                    tokens[id] = None if added[id].special else token.encode()
                else:
                    tokens[id] = bytes([characters[character] for character in token])
            super().__init__(tokens, markers)
        except (KeyError, ValueError) as error:
            what = f"{token!r:.40} is not written in bytes" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}: {what}; tokens must be bytes of text (byte-level)") from None
        for probe in (_PROBE, " " + _PROBE):
            back = self.decode(self.encode(probe), markers=True)
            if back != probe:
                raise ValueError(f"{path}: text does not come back from its ids: {probe!r} became {back!r}")
        self.identity = hashlib.sha256(b"\n".join((self.kind.encode(), content))).hexdigest()

    def _encode_whole(self, text: str) -> list[int]:
        ids = self._core.encode(text, add_special_tokens=False).ids
        if not self._names.keys().isdisjoint(ids):
            name = next(self._names[id] for id in ids if id in self._names)
            raise ValueError(f"{LIBRARY}: the text {text!r:.40} became the marker {name}, must become text")
        return ids
