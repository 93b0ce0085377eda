"""Draws small pictures with captions, to train a model that sees: python launch/shapes.py runs/shapes/data"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40)}
SHAPES = ("disc", "square", "triangle")


def draw(rng: random.Random) -> tuple[Image.Image, str]:
    """A picture of 56 to 84 pixels a side and its caption, such as "a red disc at the top left"."""
    width, height = rng.choice((56, 70, 84)), rng.choice((56, 70, 84))
    image = Image.new("RGB", (width, height), rng.choice(((255, 255, 255), (30, 30, 30))))
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    row, column = rng.choice(("top", "bottom")), rng.choice(("left", "right"))
    size = rng.randint(18, 24)
    x = rng.randint(2, width // 2 - size) if column == "left" else rng.randint(width // 2, width - size - 2)
    y = rng.randint(2, height // 2 - size) if row == "top" else rng.randint(height // 2, height - size - 2)
    pen, box = ImageDraw.Draw(image), (x, y, x + size, y + size)
    if shape == "disc":
        pen.ellipse(box, COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, COLOURS[colour])
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], COLOURS[colour])
    return image, f"a {colour} {shape} at the {row} {column}"


def main(folder: Path, count: int = 4000) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "pairs.jsonl", "w", encoding="utf-8") as lines:
        for i in range(count):
            image, text = draw(rng)
            image.save(folder / f"{i:04d}.png")
            lines.write(json.dumps({"image": f"{i:04d}.png", "text": text}) + "\n")
    print(f"{count} pictures in {folder}, their captions in {folder / 'pairs.jsonl'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python launch/shapes.py FOLDER")
    main(Path(sys.argv[1]))
