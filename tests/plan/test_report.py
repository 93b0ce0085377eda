"""The report: whole in itself, and drawn by a real browser where there is one."""

import html.parser
import re
import shutil
import subprocess

import matplotlib.image
import pytest

from k3jax.plan import answer, pictures, report
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.setting import Serve, Train
from k3jax.run_config import MeshConfig
from k3jax.settings import STRATEGIES, load_model

MODEL = load_model(STRATEGIES.parent / "kimi_linear_48b.py")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "path", "use", "br", "circle", "line"}


@pytest.fixture(scope="module")
def answers():
    searched = answer.best(MODEL, Train(16, qat=False), HARDWARE["h200"], 8, price=3.0)
    one = answer.one(MODEL, Serve(batch=8, experts="dequantized"), HARDWARE["v6e"], 16, MeshConfig(expert=8, tensor=2))
    return [searched, one]


class Balanced(html.parser.HTMLParser):
    """Fails on a tag that is not closed in order; collects ids and what refers to them."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.outside = [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        for name in ("src", "href", "xlink:href"):
            target = found.get(name, "#")
            self.outside += [] if target.startswith("#") else [target]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole(answers):
    page = report.page(answers)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and parser.outside == [] and len(set(parser.ids)) == len(parser.ids)
    assert "<script" not in page and "@import" not in page and not re.search(r"url\((?!#)", page)
    for found in answers:
        assert found.question in page and found.chosen[0].row in page
    assert page.count("<svg") == 3 + 1 + 3  # memory, rooflines, communication of both, and the front of the search
    assert "NVIDIA H200 SXM datasheet" in page and "Google Cloud TPU documentation" in page


def test_text_of_users_is_escaped(answers):
    odd = answer.Answer("<b>&?", "a < b", [])
    assert "&lt;b&gt;&amp;?" in report.page([odd]) and "a &lt; b" in report.page([odd])


def test_a_compilers_figures_stand_beside(answers):
    shown = answer.Answer(
        "?", "!", answers[1].chosen, compared=[{"": "arguments", "predicted": "1.0", "compiler": "1.1"}]
    )
    page = report.page([shown])
    assert "Beside the compiler" in page and "<td>1.1</td>" in page


def test_the_front_is_a_picture(answers, tmp_path):
    path = tmp_path / "front.png"
    pictures.write_front(path, answers)
    image = matplotlib.image.imread(path)
    assert image.shape[1] > 800 and 0.005 < (image[..., :3].min(axis=2) < 0.9).mean() < 0.5
    with pytest.raises(ValueError, match="only a search gives a picture; add --search"):
        pictures.write_front(path, answers[1:])


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_browser_draws_it(answers, tmp_path):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    report.write(page, answers)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1100,2400",
        f"--user-data-dir={tmp_path}/profile",
    ]
    subprocess.run(
        [BROWSER, *options, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=60
    )
    image = matplotlib.image.imread(picture)[..., :3]
    assert image.shape[:2] == (2400, 1100)
    dark = (image.min(axis=2) < 0.9).mean(axis=1) > 0.005
    assert dark.mean() > 0.4  # lines of text and pictures all the way down
    colours = {tuple((255 * colour).round().astype(int)) for colour in image.reshape(-1, 3)[::97]}
    shown = {tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in ("#1f4e79", "#9dc3e6", "#c55a11")}
    assert shown <= colours  # weights, optimizer state, gradients
