"""Text of every kind."""

import inspect
import os
import random

import pytest

_WORDS = """def return The quick HTTPServer naïve don't I'LL 're x1 Straße ΑΒΓ δοκιμή привет Мир مرحبا שלום नमस्ते สวัสดี
안녕 こんにちは カタカナ 你好 世界 漢字かな e\u0301 ǅ ﬁ ª १२३ ½ ² 1234567 3.14 0x1F ()[]{} -> ** == // … — € ™ 🙂
👩‍💻 🇩🇪 <|open|> [BOS] #!/ \\n \u200b \0 \x7f""".split()
_CODE = inspect.getsource(os)
_SPACES = (" ", " ", " ", "", "  ", "    ", "\t", "\n", "\r\n", "\n\n", "\xa0", "\u2003", "\u3000", " \n", "\n  ")
_BYTES = (b"\xff", b"\xc3", b"\xe4\xbd", b"\xf0\x9f\x99", b"\x80\x80")


def make_line(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(0, 12)):
        word = rng.choice(_WORDS)
        if rng.random() < 0.1:
            word = chr(rng.choice((rng.randint(0x20, 0x2AF), rng.randint(0x370, 0x52F), rng.randint(0x4E00, 0x9FA5))))
        if rng.random() < 0.3:
            place = rng.randrange(len(_CODE))
            word = _CODE[place : place + rng.randint(1, 60)]
        parts += [word, rng.choice(_SPACES)]
        if rng.random() < 0.04:
            parts.append(rng.choice(_BYTES).decode("utf-8", "surrogateescape"))
    # Escaped bytes that happen to make a character are that character.
    return "".join(parts).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


@pytest.fixture(scope="session")
def lines():
    rng = random.Random(0)
    return [make_line(rng) for _ in range(10_000)]
