"""The run log: what the terminal, the file and the plot show."""

import io
import json
import math
import os

import matplotlib.image
import numpy as np
import pytest

from k3jax.train.log import RunLog


class Terminal(io.StringIO):
    def isatty(self):
        return True


def write(log, step, loss=2.5, load=1.5):
    log.write(step, loss=loss, tokens_per_second=12345.6, gradient_norm=0.5, expert_load=load)


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = RunLog(tmp_path / "new" / "run", total_steps=20, stream=io.StringIO())
    log.write(10, loss=2.5, tokens_per_second=12345.6, gradient_norm=0.5, expert_load=1.5, learning_rate=1e-3)
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    log.close()
    assert text.endswith("\n") and json.loads(text) == {
        "step": 10,
        "loss": 2.5,
        "tokens_per_second": 12345.6,
        "gradient_norm": 0.5,
        "expert_load": 1.5,
        "learning_rate": 1e-3,
    }


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    def refuse(name):
        raise ValueError(name)

    with RunLog(tmp_path, total_steps=20, stream=io.StringIO()) as log:
        write(log, 10, loss=math.nan, load=math.inf)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["expert_load"] is None and line["gradient_norm"] == 0.5


def test_resuming_drops_the_lines_after_the_checkpoint(tmp_path):
    with RunLog(tmp_path, total_steps=60, stream=io.StringIO()) as log:
        for step in (10, 20, 30, 40):
            write(log, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "loss": 2.')  # a run killed in the middle of a line
    with RunLog(tmp_path, total_steps=60, resume_step=25, stream=io.StringIO()) as log:
        assert steps(tmp_path) == [10, 20]
        for step in (30, 40, 50, 60):
            write(log, step, loss=1.0)
    assert steps(tmp_path) == [10, 20, 30, 40, 50, 60]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_dropping_lines_is_all_or_nothing(tmp_path, monkeypatch):
    with RunLog(tmp_path, total_steps=20, stream=io.StringIO()) as log:
        write(log, 10)
        write(log, 20)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        RunLog(tmp_path, total_steps=20, resume_step=10, stream=io.StringIO())
    assert steps(tmp_path) == [10, 20]


# ---- the terminal ------------------------------------------------------------------------------------------


def test_a_terminal_gets_one_line_that_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with RunLog(tmp_path, total_steps=40, resume_step=10, stream=stream) as log:
        write(log, 20)
        write(log, 30)
    shown = [line.strip() for line in stream.getvalue().split("\r")]
    assert {line[:10] for line in shown if line} == {"step 10/40", "step 20/40", "step 30/40"}
    assert any(line.startswith("step 10/40, ? left |") for line in shown)
    (last,) = {line for line in shown if line.startswith("step 30/40")}
    assert last.startswith("step 30/40, loss 2.500, 12,346 tok/s, grad 0.5, load 1.50, 00:0")
    assert " left |" in last and max(map(len, shown)) <= 100
    assert stream.getvalue().count("\n") == 1


def test_elsewhere_plain_lines_every_so_often(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("k3jax.train.log.time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    with RunLog(tmp_path, total_steps=100, resume_step=50, stream=stream) as log:
        for step in (60, 70, 80, 90, 100):
            clock[0] += 4
            write(log, step)
    assert stream.getvalue().splitlines() == [
        "step 60/100, loss 2.500, 12,346 tok/s, grad 0.5, load 1.50, 00:16 left",
        "step 90/100, loss 2.500, 12,346 tok/s, grad 0.5, load 1.50, 00:04 left",
        "step 100/100, loss 2.500, 12,346 tok/s, grad 0.5, load 1.50, 00:00 left",
    ]
    assert steps(tmp_path) == [60, 70, 80, 90, 100]


def test_the_share_of_time_waited_for_data(tmp_path):
    stream = io.StringIO()
    with RunLog(tmp_path, total_steps=1, stream=stream) as log:
        log.write(1, loss=2.5, tokens_per_second=1.0, gradient_norm=0.5, expert_load=1.5, waited=0.03)
    assert "load 1.50, wait 3%, " in stream.getvalue()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["waited"] == 0.03


@pytest.mark.parametrize("terminal", [False, True])
def test_time_left_does_not_count_what_came_before_the_first_step(tmp_path, monkeypatch, terminal):
    """A minute of compiling, then a second a step."""
    monkeypatch.setenv("COLUMNS", "100")
    clock = [100.0]
    for name in ("k3jax.train.log.time.monotonic", "tqdm.std.time"):
        monkeypatch.setattr(name, lambda: clock[0])
    stream = Terminal() if terminal else io.StringIO()
    with RunLog(tmp_path, total_steps=100, resume_step=50, stream=stream) as log:
        log.say("compiling")
        clock[0] += 60
        log.begin()
        clock[0] += 1
        write(log, 51)
    shown = [line.strip() for line in stream.getvalue().replace("\n", "\r").split("\r")]
    assert "compiling" in shown
    (line,) = {line for line in shown if line.startswith("step 51/100")}
    assert "00:49 left" in line


# ---- the plot ----------------------------------------------------------------------------------------------


def pixels(path, color, tolerance=0.02):
    """Where the image has a colour: (rows, columns) as fractions of its size."""
    image = matplotlib.image.imread(path)[..., :3]
    rows, columns = np.nonzero((abs(image - np.array(color)) < tolerance).all(axis=-1))
    return rows / image.shape[0], columns / image.shape[1]


def test_plot(tmp_path):
    with RunLog(tmp_path, total_steps=400, stream=io.StringIO()) as log:
        for step in range(10, 410, 10):
            write(log, step, loss=5 * 0.99**step + 1, load=2 - step / 400)
        log.plot(tmp_path / "with.png", title="A run", bigram_loss=2.47)
        log.plot(tmp_path / "without.png")
    blue, gray = (0x1F / 255, 0x77 / 255, 0xB4 / 255), (0.502, 0.502, 0.502)
    rows, columns = pixels(tmp_path / "with.png", blue)
    for panel in (rows < 0.5, rows > 0.5):
        # Both curves run across their panel, and fall.
        left, right = panel & (columns < 0.25), panel & (columns > 0.9)
        assert rows[left].max() + 0.05 < rows[right].max()
    with_line, without = (pixels(tmp_path / name, gray)[0] < 0.5 for name in ("with.png", "without.png"))
    assert with_line.sum() > 300 > without.sum()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "with.png", "without.png"]


def test_plot_leaves_gaps_where_a_number_is_missing(tmp_path):
    with RunLog(tmp_path, total_steps=3, stream=io.StringIO()) as log:
        write(log, 1)
        write(log, 2, loss=math.nan)
        write(log, 3)
        log.plot(tmp_path / "gap.png")
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")
