"""The pages: their length, their links, and every command and import that they show."""

import ast
import dataclasses
import importlib
import os
import re
import shlex
from pathlib import Path

import pytest

from k3jax import cli, run_config, settings
from k3jax.settings import apply_overrides, load_config

ROOT = Path(__file__).parents[1]
PARTS = ("ops", "nn", "train", "hf", "serve", "plan", "bench", "vision", "text", "chat", "data")
PAGES = [Path("README.md"), *(Path("k3jax", part, "README.md") for part in PARTS)]
PAGES += [Path(folder, "README.md") for folder in ("configs", "launch")]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def blocks(page, language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", page.read_text())


def commands(page):
    """Every command of a page, blocks and the text between: words, without comments."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    text += "\n".join(re.findall(r"`((?:python -m k3jax|bash launch/)[^`]*[^`.])`", page.read_text()))
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def all_commands(*first):
    found = [words for page in PAGES for words in commands(page) if tuple(words[: len(first)]) == first]
    return sorted({tuple(words) for words in found if "..." not in words})


def test_the_front_page_is_short():
    assert len(Path("README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert targets and all((page.parent / target).exists() for target in targets if "://" not in target)


def test_every_page_is_reached_from_the_front():
    seen, open_ = set(), [Path("README.md")]
    while open_:
        page = open_.pop()
        if page in seen:
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#]*README\.md)\)", page.read_text())
        open_ += [Path(os.path.relpath(page.parent / target)) for target in targets]
    assert seen >= set(PAGES)


@pytest.mark.parametrize("words", all_commands("python", "-m", "k3jax"), ids=" ".join)
def test_commands_are_understood(words):
    """Up to where work would begin: flags, settings and files of the project; nothing else can be there."""
    if words[3:] == ("train", "--help") or words[3:] == ("bench", "--help"):
        return
    command, rest = cli._parse(list(words[3:]))
    subject = getattr(command, "subject", getattr(command, "direction", command))
    config = str(getattr(subject, "config", None))
    assert Path(config).exists() or not config.startswith("configs/")
    if config.startswith("configs/") and rest:
        apply_overrides(load_config(config), rest[0]).validate()


@pytest.mark.parametrize("words", all_commands("bash"), ids=" ".join)
def test_scripts_exist(words):
    assert Path(words[1]).is_file()


@pytest.mark.parametrize("words", all_commands("bash", "launch/local.sh"), ids=" ".join)
def test_runs_of_several_processes_fit(words):
    (_, config, *overrides) = words[3:]
    for index in range(count := int(words[2])):
        processes = [f"processes.count={count}", f"processes.index={index}", "processes.coordinator=localhost:1234"]
        apply_overrides(load_config(config), [*overrides, *processes]).validate()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_snippets_import_what_there_is(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "k3jax":
                assert hasattr(importlib.import_module("k3jax"), node.attr), node.attr


def test_strategies_are_those_there_are():
    page = Path("configs/README.md").read_text()
    measured = re.findall(r"(?m)^\| `(\w+)` \|", page)
    assert set(measured) <= set(settings.strategy_names()) and len(measured) > 5
    assert [field.name for field in dataclasses.fields(run_config.MeshConfig)] == re.findall(
        r"(?m)^\| `(\w+)` \| (?:the|each|heads)", Path("k3jax/train/README.md").read_text()
    )
