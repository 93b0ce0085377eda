import json

import pytest

from k3jax.bench import timing


def test_calls_take_turns_and_the_second_of_each_pair_is_timed(monkeypatch):
    clock, made = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    durations = {"a": iter([90, 1, 90, 5, 90, 2, 90, 3, 90, 4]), "b": iter([9, 7] * 5)}

    def call(name):
        made.append(name)
        clock[0] += next(durations[name])

    times = timing.interleaved({name: lambda name=name: call(name) for name in "ab"}, 5, "test")
    assert made == ["a", "a", "b", "b"] * 5
    assert times == {"a": (3, 2), "b": (7, 0)}
    assert times["a"].seconds == 3 and times["a"].spread_seconds == 2


def test_table():
    rows = [("name", "ms", "ratio"), ("a", "10.5", "1"), ("longest", "wrong: all of it"), ("b", "2", "20.25")]
    assert timing.table(rows).split("\n") == [
        "name       ms  ratio",
        "a        10.5      1",
        "longest  wrong: all of it",
        "b           2  20.25",
    ]


def test_json_is_written_whole_or_not_at_all(tmp_path):
    timing.write_json(tmp_path / "a.json", {"x": [1, None, "y"]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, None, "y"]}
    with pytest.raises(ValueError):
        timing.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, None, "y"]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
