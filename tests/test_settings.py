"""Every setting of a run and every flag of every command with values that cannot be: one line, before any work.

The cases follow from the dataclasses themselves, so that a new setting or flag is covered by being one.
"""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

import k3jax.cli.bench
from k3jax import cli, runtime, settings
from k3jax.config import VisionConfig
from k3jax.run_config import DataConfig, RunConfig
from k3jax.values import ANY, PATH, _kind, hints

ROOT = Path(__file__).parents[1]
FILE = """
from k3jax.config import ModelConfig, VisionConfig
from k3jax.run_config import *
config = {config!r}
"""

# By type, texts that stand for no value of it, or for one beyond what it may be: empty, negative, huge, NaN, of another type.
WRONG = {
    int: ("", "-7", "1" + 20 * "0", "-1e400", 5000 * "9", "nan", "1.5", "x"),
    float: ("", "-7", "1e300", "-inf", "nan", "x"),
    bool: ("", "-7", "1e20", "nan", "x"),
    str: ("",),
}
# Ids: a model without such tokens.
NEGATIVE_IS_RIGHT = {"gate_lower_bound", "bos_token_id", "eos_token_id", "text_eos_token_id", "pad_token_id"}


def wrong(name: str, hint) -> list[str]:
    """Texts to be refused for a field of a declared type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ["", "-7", "nan", "x"]
    if kind := _kind(hint):
        texts = () if kind is ANY else WRONG[kind.type]
        return [text for text in texts if text != "-7" or name not in NEGATIVE_IS_RIGHT]
    if origin is tuple:
        first = wrong(name, args[0])
        return first + [f"a,{text}" if _kind(args[0]) is PATH else f"1,{text}" for text in first]
    return wrong(name, next(arg for arg in args if arg is not type(None)))  # of X | None, and of a marked tuple


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tiny):
    vision = VisionConfig(14, 8, 8, 4, 2, 1, 32, 64, 32, 32, tiny.hidden_size, media_placeholder_token_id=255)
    return RunConfig(model=dataclasses.replace(tiny, vision=vision), data=DataConfig(seq_len=64, batch_size=8))


def settings_of(cls, prefix=""):
    """(dotted key, declared type) of every setting."""
    for name, hint in hints(cls).items():
        groups = [arg for arg in (hint, *typing.get_args(hint)) if isinstance(arg, type) and dataclasses.is_dataclass(arg)]
        yield from settings_of(groups[0], f"{prefix}{name}.") if groups else [(f"{prefix}{name}", hint)]


SETTINGS = dict(settings_of(RunConfig))


@pytest.fixture
def refuses(monkeypatch, capsys, tmp_path):
    """Runs a command line in an empty folder: it must say one line that names a key, before any work, and write nothing."""
    here = tmp_path / "empty"
    here.mkdir()
    monkeypatch.chdir(here)

    def work(*args, **kwargs):
        raise AssertionError("work has begun")

    monkeypatch.setattr(runtime, "setup", work)
    monkeypatch.setattr(k3jax.cli.bench, "_compile_anew", work)

    def run(key, *argv):
        start = time.process_time()
        assert cli.main(argv) == 2, argv
        assert time.process_time() - start < 1, argv
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1000, (argv, err)
        assert key is None or key in err or key.replace("-", "_") in err, (argv, err)
        assert not any(here.iterdir()), argv
        return err

    return run


@pytest.mark.parametrize("key", SETTINGS)
def test_wrong_settings_on_the_command_line(refuses, seeing, tmp_path, key):
    path = tmp_path / "config.py"
    path.write_text(FILE.format(config=seeing))
    name = key.rpartition(".")[2]
    for text in wrong(name, SETTINGS[key]):
        refuses(name, "train", "--config", str(path), f"{key}={text}")


@pytest.mark.parametrize("key", SETTINGS)
def test_wrong_settings_in_a_file(seeing, key):
    *groups, name = key.split(".")
    hint = SETTINGS[key]
    values = [object(), math.nan, -math.inf, 10**5000, [1], b"x", "x", "", ("",), 1.5, True, -7]
    kinds = [kind for kind in map(_kind, (hint, *typing.get_args(hint))) if kind]
    right = {kind.type for kind in kinds} | ({int} if float in {kind.type for kind in kinds} else set())
    negative_fits = name in NEGATIVE_IS_RIGHT
    refused = 0
    for value in values:
        if type(value) in right and (value in ("x", 1.5, True) or ANY in kinds or value == -7 and negative_fits):
            continue
        if type(value) is tuple and typing.get_origin(hint) is not tuple:
            value = (value,)
        with pytest.raises(ValueError, match=name) as error:
            _changed(seeing, groups, name, value).validate()
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000
        refused += 1
    assert refused >= 6


def _changed(config, groups, name, value):
    if groups:
        value = _changed(getattr(config, groups[0]), groups[1:], name, value)
    return dataclasses.replace(config, **{groups[0] if groups else name: value})


def test_the_whole_is_right(seeing):
    seeing.validate()


# ---- flags -------------------------------------------------------------------------------------------------


def commands_of(kind, names=()):
    """(its words, its class) of every command."""
    for arg in typing.get_args(kind):
        cls, word = typing.get_args(arg)[:1], [x.name for x in typing.get_args(arg)[1:] if hasattr(x, "name")]
        inner = [hint for hint in hints(cls[0]).values() if any(map(typing.get_args, typing.get_args(hint)))]
        unions = [hint for hint in inner if all(hasattr(arg, "__metadata__") for arg in typing.get_args(hint))]
        if unions:
            yield from commands_of(unions[0], (*names, *word))
        else:
            yield (*names, *word), cls[0]


COMMANDS = {" ".join(words): cls for words, cls in commands_of(cli.Command)}


def flags_of(cls, prefix=""):
    """(name, declared type, whether it is positional, whether it must be given) of every flag."""
    for field in dataclasses.fields(cls):
        hint = hints(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint, f"{prefix}{field.name}.")
            continue
        plain = typing.get_type_hints(cls, include_extras=True)[field.name]
        positional = any("Positional" in str(x) for x in getattr(plain, "__metadata__", ()))
        yield f"{prefix}{field.name.replace('_', '-')}", hint, positional, field.default is dataclasses.MISSING


def test_all_commands_are_found():
    assert set(COMMANDS) == {
        "train", "generate", "chat", "evaluate", "plan", "inspect", "convert import", "convert export", "convert synthesize",
        "data tokenize", "data inspect", "data show", "bench convert", "bench data", "bench kda", "bench moe", "bench step", "bench strategies",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_flags(refuses, tmp_path, command):
    there = tmp_path / "there"
    there.mkdir()
    flags = list(flags_of(COMMANDS[command]))
    tried = 0
    for name, hint, positional, _ in flags:
        for text in wrong(name.replace("-", "_"), hint):
            if "," in text:  # a list is an option given again
                continue
            argv = command.split()
            for other, _, at_place, needed in flags:
                if other == name:
                    argv += [text] if positional else [f"--{name}={text}"]
                elif needed:
                    argv += [str(there)] if at_place else [f"--{other}={there}"]
            refuses(name.upper() if positional else f"--{name}" if "." not in name else name, *argv)
            tried += 1
    assert tried >= len(flags) - 1


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_given_twice(refuses, tmp_path, command):
    flags = [flag for flag in flags_of(COMMANDS[command]) if not flag[2]]
    for name, hint, _, _ in flags:
        if tuple in map(typing.get_origin, typing.get_args(hint)):  # a list: each names one more
            continue
        if hint is bool:
            for twice in ([f"--{name}", f"--no-{name}"], [f"--{name}=true", f"--{name}"], [f"--{name}", "on", f"--{name}"]):
                refuses(f"--{name}: given twice", *command.split(), *twice)
        else:
            refuses(f"--{name}: given twice", *command.split(), f"--{name}=1", f"--{name.replace('-', '_')}", "1")


REFUSED = (
    "train --config {file} train.steps=1e20",
    "generate {folder} --prompt x --temperature nan",
    "plan --devices 1e20",
    "bench kda --tokens 2147483584",
)
NO_JAX = """
import sys
from k3jax.cli import main
code = main()
assert "jax" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize("line", REFUSED)
def test_refusals_take_less_than_two_seconds_and_no_jax(seeing, tmp_path, line):
    (tmp_path / "config.py").write_text(FILE.format(config=seeing))
    (tmp_path / "empty").mkdir()
    argv = line.format(file=tmp_path / "config.py", folder=tmp_path).split()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    fastest = math.inf
    for _ in range(3):  # the best of three: other processes may hold the machine
        start = time.monotonic()
        command = [sys.executable, "-c", NO_JAX, *argv]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "empty", env=environment)
        fastest = min(fastest, time.monotonic() - start)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        assert not any((tmp_path / "empty").iterdir())
        if fastest < 2:
            return
    raise AssertionError(f"{fastest:.1f} s")


# ---- numbers beyond their types ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, says",
    [
        ("data.seed=4294967296", "data.seed=4294967296: must be from 0 to 4294967295"),
        ("train.seed=12345678901234567890", "train.seed=12345678901234567890: must be from 0 to 4294967295"),
        ("data.batch_size=2147483640", "data.batch_size=2147483640: must be such that a step has at most 2147483647 tokens"),
        ("data.seq_len=1e9 model.max_position_embeddings=1e9", "data.batch_size=8: must be such that a step has at most"),
        ("model.max_position_embeddings=32", "data.seq_len=64: must be at most model.max_position_embeddings=32"),
        ("model.num_hidden_layers=2147483647", "kda_layers and full_attn_layers: layers [3, 4, "),
        ("cpu_devices=4097", "cpu_devices=4097: must be 0 (the machine's own devices) to 4096"),
        ("mesh.data=2147483647", "data.batch_size=8: must be a multiple of mesh.data*"),
        ("train.learning_rate=1e39", "train.learning_rate=1e39: must be a finite number that float32 can hold"),
        ("train.learning_rate=1e-46", "train.learning_rate=1e-46: must be a finite number that float32 can hold"),
        ("train.clip_norm=inf", "train.clip_norm=inf: must be a finite number that float32 can hold"),
    ],
)
def test_numbers_beyond_their_types(seeing, overrides, says):
    with pytest.raises(ValueError) as error:
        settings.apply_overrides(seeing, overrides.split()).validate()
    assert str(error.value).startswith(says)


def test_the_largest_numbers_fit(seeing):
    most = "train.steps=2147483647 data.seed=4294967295 train.seed=4294967295 train.eval_windows=2147483647"
    settings.apply_overrides(seeing, [*most.split(), "data.seq_len=268435448", "model.max_position_embeddings=268435448",
                                        "data.batch_size=8", "train.learning_rate=3.4e38"]).validate()


@pytest.mark.parametrize(
    "line, says",
    [
        ("plan --devices 1048577", "--devices 1048577: must be from 1 to 1,048,576"),
        ("plan --sequence 2e6", "--sequence 2000000: must be at most 1048576"),
        ("plan --batch 1e6", "--batch 1000000: must be such that a step has at most 2147483647 tokens, with --sequence 4096"),
        ("plan --mesh fsdp=1e20", "--mesh fsdp=1e20: fsdp must be from -2147483647 to 2147483647"),
        ("plan --price inf", "--price inf: must be a finite number"),
        ("bench convert --gib 1e9", "--gib 1000000000.0: must be at most 1/3 of the "),
        ("bench convert --dequantized --gib 1e9", "--gib 1000000000.0: must be at most 1/6 of the "),
        ("bench kda --heads 2147483647", "--tokens 2048: must be smaller: its arrays take "),
        ("bench kda --decode-batch 2147483647", "--decode-batch 2147483647: must be smaller: its arrays take "),
        ("bench moe --experts 2147483640 --tokens 2147483640", "--experts 2147483640: must be smaller: its arrays take "),
        ("bench step --repeats 10001", "--repeats 10001: must be from 1 to 10,000"),
        ("convert synthesize {model} made --num-experts 2147483647", "--num-experts 2147483647: must be from 1 to 65,536"),
        ("convert import a b --memory-gib inf", "--memory-gib inf: must be a finite number that float32 can hold"),
    ],
)
def test_flags_beyond_their_types(refuses, line, says):
    assert refuses(None, *line.format(model=ROOT / "configs" / "kimi_linear_48b.py").split()).startswith(f"error: {says}")


# ---- spellings ---------------------------------------------------------------------------------------------


def test_truth_and_whole_numbers_as_people_write_them(seeing):
    for text, value in (("true", True), ("ON", True), ("1", True), ("Yes", True), ("false", False), ("off", False), ("0", False), ("no", False)):
        assert settings.apply_overrides(seeing, [f"train.qat={text}"]).train.qat is value
    for text, value in (("1e3", 1000), ("1_000", 1000), ("2.5e2", 250), ("1E3", 1000), ("+7", 7)):
        steps = settings.apply_overrides(seeing, [f"train.steps={text}"]).train.steps
        assert steps == value and type(steps) is int


@pytest.mark.parametrize("spelled", ["--no-qat", "--qat false", "--qat=False", "--qat 0", "--qat=off"])
def test_truth_in_flags(monkeypatch, spelled):
    found = []
    monkeypatch.setattr(cli.Plan, "run", lambda command: found.append(command))
    assert cli.main(["plan", *spelled.split(), "--search", "yes", "--devices", "1e2"]) == 0
    assert (found[0].qat, found[0].search, found[0].devices) == (False, True, 100)


# ---- paths -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_home_folders(home, seeing, tiny, monkeypatch):
    overrides = ["out=~/run", "resume=~/old", "data.paths=~/a,~/b/*.txt"]
    config = settings.apply_overrides(seeing, overrides)
    assert (config.out, config.resume) == (f"{home}/run", f"{home}/old")
    assert config.data.paths == (f"{home}/a", f"{home}/b/*.txt")
    assert RunConfig(model=tiny, out="~/run", data=DataConfig(pairs=("~/p",))).data.pairs == (f"{home}/p",)
    assert settings.apply_overrides(seeing, ["out=~nobody-of-this-name/run"]).out == "~nobody-of-this-name/run"
    (home / "config.py").write_text(FILE.format(config=seeing))
    (home / "mine.py").write_text("from k3jax.run_config import MeshConfig\nmesh = MeshConfig(data=4)\n")
    found = []
    monkeypatch.setattr(cli.Plan, "run", lambda command: found.append(command))
    monkeypatch.setattr(cli.Generate, "run", lambda command: found.append(command))
    assert settings.load_config("~/config.py") == seeing
    assert settings.load_strategy("~/mine.py").data == 4
    assert cli.main(["plan", "--config", "~/config.py", "--json=~/plan.json"]) == 0
    assert (found[0].config, found[0].json) == (f"{home}/config.py", f"{home}/plan.json")
    assert cli.main(["generate", "~/run", "--prompt", "~", "--image", "~/a.png"]) == 0
    assert (found[1].checkpoint, found[1].prompt, found[1].image) == (f"{home}/run", "~", (f"{home}/a.png",))


@pytest.fixture
def pipe(tmp_path):
    """What nobody writes to: reading it would not end, and is ended here."""
    path = tmp_path / "pipe.py"
    os.mkfifo(path)
    signal.alarm(60)
    yield path
    signal.alarm(0)


@pytest.mark.parametrize(
    "line",
    [
        "train --config {pipe}",
        "train --config {config} strategy={pipe}",
        "train --config {config} --resume {pipe}",
        "plan --config {pipe}",
        "plan --config {link}",
        "plan --mesh {pipe}",
        "bench step --config {pipe}",
        "generate {pipe} --prompt x",
        "generate {folder} --prompt x --image {pipe}",
        "chat {pipe}",
        "chat {folder} --image {pipe}",
        "chat {folder} --messages {pipe}",
        "chat {folder} --tools {pipe}",
        "convert import {pipe} b",
        "convert export {pipe} b",
        "convert synthesize {pipe} b",
        "inspect {pipe}",
        "convert synthesize {released} b",
        "inspect /dev/zero",
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(refuses, seeing, pipe, tmp_path, line):
    (tmp_path / "config.py").write_text(FILE.format(config=seeing))
    (tmp_path / "link.json").symlink_to(pipe)
    (tmp_path / "released").mkdir()
    os.mkfifo(tmp_path / "released" / "config.json")
    places = {"pipe": pipe, "config": tmp_path / "config.py", "link": tmp_path / "link.json", "folder": tmp_path}
    says = refuses(None, *line.format(**places, released=tmp_path / "released").split())
    assert "must be a regular file or a folder" in says


def test_keys_given_twice(refuses, seeing, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(FILE.format(config=seeing))
    train = "train", "--config", str(path)
    assert "train.steps: given twice, as 1 and as 2" in refuses(None, *train, "train.steps=1", "train.steps=2")
    assert "train.steps: given twice, as 1 and as 1" in refuses(None, *train, "train.steps=1", "--train.steps=1")
    assert "out: given twice, as a and as b" in refuses(None, *train, "out=a", "--out", "b")
    assert "strategy: given twice, as ep and as tp" in refuses(None, *train, "strategy=ep", "strategy=tp")
    assert "fsdp is given twice" in refuses("--mesh fsdp=2,fsdp=4", "plan", "--mesh", "fsdp=2,fsdp=4")


def test_home_folders_in_the_library(home, copy_golden):
    import k3jax.hf.inspect
    from k3jax.train import convert, inspect

    copy_golden("kimi_linear_tiny")
    cfg = k3jax.ModelConfig.from_hf("~/kimi_linear_tiny")
    assert k3jax.hf.inspect.report("~/kimi_linear_tiny").problems == {}
    k3jax.save_hf("~/saved", cfg, k3jax.load_hf("~/kimi_linear_tiny"))
    convert.import_checkpoint("~/saved", "~/imported")
    assert inspect.report("~/imported").problems == {}
    assert {path.name for path in home.iterdir()} == {"kimi_linear_tiny", "saved", "imported"}


def test_an_index_that_is_no_file(copy_golden, pipe):
    copied = copy_golden("kimi_linear_tiny").folder
    index = copied / "model.safetensors.index.json"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(ValueError, match="index.json: is a pipe, must be a regular file"):
        k3jax.load_hf(copied)
