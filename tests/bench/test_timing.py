import json

import pytest

from k3jax.bench import timing


def test_calls_take_turns_and_the_first_of_each_turn_is_not_timed(monkeypatch):
    clock, made = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    durations = {"a": iter([90, 1, 2, 3, 90, 4, 5, 6]), "b": iter([9, 7, 7, 7] * 2)}

    def call(name):
        made.append(name)
        clock[0] += next(durations[name])

    times = timing.interleaved({name: lambda name=name: call(name) for name in "ab"}, 2, "test")
    assert made == (["a"] * 4 + ["b"] * 4) * 2
    assert times == {"a": (3.5, 2.5), "b": (7, 0)}
    assert times["a"].seconds == 3.5 and times["a"].spread_seconds == 2.5


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
