"""Imports between the parts of the package point one way."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "k3jax"

# From what knows nothing to what knows all; the modules beside these packages may stand anywhere, but in no circle.
ORDER = ("ops", "vision", "nn", "text", "hf", "chat", "data", "train", "serve", "plan", "bench", "cli")


def imports(text):
    """Dotted names of the modules that a source imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph():
    """{part: the parts that it imports}; a part is a package or module directly in the package."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        inside = file.relative_to(PACKAGE)
        part = inside.parts[0].removesuffix(".py")
        if part in ("configs", "__init__", "__main__"):
            continue
        names = (name.split(".") for name in imports(file.read_text()))
        others = {name[1] for name in names if name[0] == "k3jax" and len(name) > 1}
        found.setdefault(part, set()).update(others - {part})
    parts = found.keys()
    return {part: others & parts for part, others in found.items()}


def test_there_is_no_circle():
    order = list(TopologicalSorter(graph()).static_order())  # raises CycleError naming one
    assert order.index("ops") < order.index("nn") < order.index("cli")


def test_packages_import_those_before_them():
    found = graph()
    wrong = [
        f"{part} imports {other}"
        for part, others in found.items()
        for other in others
        if part in ORDER and other in ORDER and ORDER.index(other) > ORDER.index(part)
    ]
    assert not wrong and set(ORDER) - {"text", "chat", "data"} <= found.keys()
