"""The launch scripts in a copy of the tree, mostly with a stand-in for Python, once with the real one."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASH = shutil.which("bash")
TOOLS = "basename bash cat cksum cp dirname echo flock grep mkdir rm sleep tail"

# Answers the scripts' questions as a Python of the given version would, notes in `calls` what it was asked to
# make, and prints its arguments for any other command.
STAND_IN = """#!{bash}
folder={folder}
case "$*" in
    *sys.stdout.write*) printf '{version}\\t%s\\t%s' "$folder" "$folder/{name}" ;;
    *"import ensurepip"*) exit {lacks_ensurepip} ;;
    *"import pip"*) exit {lacks_pip} ;;
    *"-m venv"*)
        echo "venv {name}" >>"$folder/calls"
        mkdir -p "${{@: -1}}/bin"
        cp "$0" "${{@: -1}}/bin/python" ;;
    *"-m pip"*"--editable {root}"*)
        echo "editable" >>"$folder/calls" ;;
    *"-m pip"*)
        echo "pip" >>"$folder/calls"
        sleep {pip_seconds}
        echo "ERROR: no such package"
        exit {pip_status} ;;
    *)
        if (: <&9) 2>/dev/null; then echo "the job keeps the lock" >&2; fi
        printf 'job %s' "$PWD"
        printf '|%s' "$@" ;;
esac
"""


INSTALLED = ["pip", "editable"]  # the requirements, then the project


class Tree:
    """A copy of the scripts in a folder with a space in its name, and a PATH of its own to find Python on."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.elsewhere = folder / "a tree", folder / "bin", folder / "elsewhere"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        self.requirements = self.root / "requirements.txt"
        self.requirements.write_text("# nothing\n")
        self.project = self.root / "pyproject.toml"
        self.project.write_text("# nothing\n")
        self.venv, self.whole = self.root / ".venv", self.root / ".venv/whole"
        self.bin.mkdir()
        self.elsewhere.mkdir()
        for tool in TOOLS.split():
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    def python(self, name, version, lacks_ensurepip=0, lacks_pip=0, pip_status=0, pip_seconds=0) -> Path:
        path = self.bin / name
        path.write_text(STAND_IN.format(bash=BASH, folder=self.bin, root=self.root, name=name, version=version,
                                        lacks_ensurepip=lacks_ensurepip, lacks_pip=lacks_pip,
                                        pip_status=pip_status, pip_seconds=pip_seconds))
        path.chmod(0o755)
        return path

    def calls(self) -> list[str]:
        """What was made since the last time of asking."""
        noted = self.bin / "calls"
        made = noted.read_text().splitlines() if noted.exists() else []
        noted.unlink(missing_ok=True)
        return made

    def start(self, *args, script="launch/quickstart.sh", **env) -> subprocess.Popen:
        env = {"PATH": str(self.bin), "HOME": str(self.elsewhere)} | env
        return subprocess.Popen([BASH, self.root / script, *args], cwd=self.elsewhere, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *args, **kwargs) -> str:
        """Last line of the output of a run that must succeed without a word on stderr."""
        process = self.start(*args, **kwargs)
        out, err = process.communicate()
        assert (process.returncode, err) == (0, ""), err
        return out.splitlines()[-1]

    def error(self, **kwargs) -> str:
        """The one line on stderr of a run that must fail."""
        process = self.start(**kwargs)
        _, err = process.communicate()
        assert process.returncode != 0 and err.count("\n") == 1 and err.endswith("\n"), err
        assert not self.whole.exists()
        return err


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_arguments_and_working_directory_reach_the_job(tree):
    tree.python("python3", "3.11.4")
    assert tree.run("a=1", "b c") == f"job {tree.elsewhere}|{tree.root}/launch/quickstart.py|a=1|b c"
    assert tree.run("-k", "x y", script="launch/test.sh") == f"job {tree.root}|-m|pytest|-k|x y"
    assert tree.run(script=".ci/run") == f"job {tree.root}|-m|pytest|-m|slow or not slow"
    assert tree.calls() == ["venv python3", *INSTALLED]


def test_first_fit_python_on_the_path(tree):
    tree.python("python3", "3.10.13")
    tree.python("python3.11", "3.11.9")
    tree.python("python3.13", "3.13.1")
    tree.python("python", "3.12.0")
    tree.run()
    assert tree.calls() == ["venv python3.13", *INSTALLED]


def test_whole_environment_is_kept_until_python_or_requirements_change(tree):
    tree.python("python3", "3.11.4")
    newer = tree.python("python3.12", "3.12.1")
    tree.run(PYTHON=str(newer))
    tree.run(PYTHON=str(newer))
    tree.run()  # a whole environment is used as it is, whatever python3 is
    tree.run(PYTHON=str(tree.venv / "bin/python"))
    assert tree.calls() == ["venv python3.12", *INSTALLED]
    (tree.venv / "added").touch()
    tree.requirements.write_text("# something else\n")
    tree.run()
    tree.run()
    assert tree.calls() == INSTALLED and (tree.venv / "added").exists()
    tree.project.write_text("# something else\n")
    tree.run()
    assert tree.calls() == INSTALLED and (tree.venv / "added").exists()
    tree.run(PYTHON="python3")
    assert tree.calls() == ["venv python3", *INSTALLED] and not (tree.venv / "added").exists()
    tree.python("python3", "3.11.5")  # the system's Python was updated
    tree.run(PYTHON="python3")
    assert tree.calls() == ["venv python3", *INSTALLED]
    (tree.venv / "bin/python").unlink()  # the Python it was made with is gone
    tree.run()
    assert tree.calls() == ["venv python3", *INSTALLED]


def test_half_made_environment_is_made_anew(tree):
    tree.python("python3", "3.11.4")
    (tree.venv / "bin").mkdir(parents=True)
    (tree.venv / "half").touch()
    shutil.copy(tree.bin / "python3", tree.venv / "bin/python")
    tree.run()
    assert tree.calls() == ["venv python3", *INSTALLED] and not (tree.venv / "half").exists()


@pytest.mark.parametrize("signal", ["kill", "terminate"])
def test_interrupted_install_is_retried(tree, signal):
    tree.python("python3", "3.11.4", pip_seconds=0.5)
    process = tree.start()
    assert process.stdout.readline().startswith("creating ")
    assert process.stdout.readline().startswith("installing ")
    getattr(process, signal)()
    process.communicate()
    assert process.returncode != 0 and not tree.whole.exists()
    assert tree.run().startswith("job ")
    assert tree.calls()[-3:] == ["venv python3", *INSTALLED]


@pytest.mark.skipif(not shutil.which("flock"), reason="only flock keeps two first starts apart")
def test_two_starts_at_once_make_one_environment(tree):
    tree.python("python3", "3.11.4", pip_seconds=0.5)
    both = [tree.start(), tree.start()]
    assert all(process.communicate()[0].splitlines()[-1].startswith("job ") for process in both)
    assert tree.calls() == ["venv python3", *INSTALLED]


@pytest.mark.parametrize("line, message", [
    ("PYTHON={bin}/nowhere", "PYTHON={bin}/nowhere is no program; a Python 3.11 or newer is needed"),
    ("PYTHON={bin}", "PYTHON={bin} is no program; a Python 3.11 or newer is needed"),
    ("PYTHON={bin}/cat", "PYTHON={bin}/cat does not run as a Python; a Python 3.11 or newer is needed"),
    ("PYTHON={bin}/echo", "PYTHON={bin}/echo does not run as a Python (it says: -c import sys); "
                          "a Python 3.11 or newer is needed"),
    ("PYTHON={bin}/old", "PYTHON={bin}/old is Python 3.9.18; a Python 3.11 or newer is needed"),
    ("", "a Python 3.11 or newer is needed, and PATH has no Python at all; "
         "install one or set PYTHON=/path/to/python"),
])
def test_no_fit_python_is_one_line(tree, line, message):
    tree.python("old", "3.9.18")
    env = dict([line.format(bin=tree.bin).split("=")]) if line else {}
    assert tree.error(**env) == f"quickstart.sh: {message.format(bin=tree.bin)}\n"
    assert not tree.venv.exists()


def test_old_pythons_on_the_path_are_named(tree):
    tree.python("python3", "3.9.18")
    tree.python("python", "2.7.18")
    assert "PATH has python3 3.9.18, python 2.7.18;" in tree.error()


def test_python_without_ensurepip_uses_its_own_pip(tree):
    tree.python("python3", "3.11.4", lacks_ensurepip=1)
    assert tree.run().startswith("job ")
    assert tree.calls() == ["venv python3", "pip", *INSTALLED]


def test_python_without_ensurepip_and_pip_is_one_line(tree):
    python = tree.python("python3", "3.11.4", lacks_ensurepip=1, lacks_pip=1)
    assert tree.error() == (f"quickstart.sh: Python 3.11.4 ({python}) lacks venv or pip; "
                            "add them (on Debian: python3-venv) or set PYTHON\n")


def test_failing_install_is_one_line_and_is_retried(tree):
    python = tree.python("python3", "3.11.4", pip_status=1)
    assert tree.error() == (
        f"quickstart.sh: installing requirements.txt with Python 3.11.4 ({python}) failed: "
        f"ERROR: no such package; the log is {tree.venv}/install.log\n")
    tree.python("python3", "3.11.4")
    assert tree.run().startswith("job ")
    assert tree.calls() == ["venv python3", "pip", "venv python3", *INSTALLED]
    # A whole environment that fails to take new requirements is whole no more.
    shutil.copy(tree.python("python3", "3.11.4", pip_status=1), tree.venv / "bin/python")
    tree.requirements.write_text("# something else\n")
    assert "ERROR: no such package" in tree.error()
    assert tree.calls() == ["pip"]


def test_folder_that_cannot_be_written_is_one_line(tree):
    tree.python("python3", "3.11.4")
    (tree.bin / "mkdir").unlink()
    (tree.bin / "mkdir").symlink_to(shutil.which("false"))  # as any mkdir would, for want of rights or space
    assert f"quickstart.sh: cannot make {tree.venv} anew" in tree.error()


def test_environment_that_was_moved_is_made_for_its_new_place(tree):
    tree.python("python3", "3.11.4")
    tree.run()
    tree.calls()
    moved = tree.root.rename(tree.root.with_name("another tree"))
    subprocess.run([BASH, moved / "launch/quickstart.sh"], env={"PATH": str(tree.bin)}, check=True, stdout=subprocess.PIPE)
    assert tree.calls() == ["pip", "pip"]  # the second with --editable and the new place


# Makes a wheel that puts the project's folder on the path of an environment, without setuptools.
BUILD = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/k3jax-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("k3jax.pth", {root!r})
        wheel.writestr("k3jax-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: k3jax\\nVersion: 1\\n")
        wheel.writestr("k3jax-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("k3jax-1.dist-info/RECORD", "")
    return "k3jax-1-py3-none-any.whl"
"""


def test_real_python_and_pip(tree):
    pytest.importorskip("ensurepip", reason="this Python cannot make an environment without a download")
    (tree.root / "launch/quickstart.py").write_text("import sys, k3jax; print(sys.prefix, sys.argv[1:], k3jax.__file__)")
    (tree.root / "k3jax.py").touch()
    (tree.root / "build.py").write_text(BUILD.format(root=str(tree.root)))
    tree.project.write_text('[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n')
    here = {"PYTHON": sys.executable}
    expected = f"{tree.venv} ['x'] {tree.root}/k3jax.py"
    assert tree.run("x", **here) == expected
    script = ["-c", "import k3jax; print(k3jax.__file__)"]  # as a notebook would, anywhere
    done = subprocess.run([tree.venv / "bin/python", *script], cwd=tree.elsewhere, env={}, capture_output=True, text=True)
    assert done.stdout == f"{tree.root}/k3jax.py\n"
    made = tree.whole.stat().st_mtime_ns
    assert tree.run("x", **here) == tree.run("x") == expected
    assert tree.whole.stat().st_mtime_ns == made
    tree.requirements.write_text("-r missing.txt\n")
    assert re.search(r"failed: ERROR: Could not open requirements file: .*missing.txt", tree.error(**here))


# ---- launch/local.py ---------------------------------------------------------------------------------------

# In place of k3jax: notes that it is there, and ends at a signal as a training does, or not at all.
TRAINING = """
import os, pathlib, signal, sys, time

def stop(number, _):
    (here / f"{os.getpid()}.{number}").touch()
    time.sleep(0.3)
    os._exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
here = pathlib.Path(sys.argv[2])
(here / str(os.getpid())).touch()
time.sleep(100)
"""


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_launcher(tmp_path, number):
    """It passes on what it can be told, once each; where it is killed the kernel ends them."""
    package, here = tmp_path / "k3jax", tmp_path / "here"
    package.mkdir()
    here.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(TRAINING)
    # A shell that starts pytest in the background has it ignore SIGINT, and all that it starts.
    listening = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", listening, sys.executable, str(ROOT / "launch/local.py"), "2", str(here)]
    pipes = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    launcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, **pipes)
    ends = time.monotonic() + 30
    while len(found := [int(path.name) for path in here.iterdir()]) < 2:
        assert time.monotonic() < ends
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(launcher.pid, number)  # as a terminal does
    else:
        launcher.send_signal(number)
    said = launcher.communicate(timeout=20)[1]
    assert (launcher.returncode, said) == (-9 if number == signal.SIGKILL else 128 + number, "")
    while any(map(alive, found)):
        assert time.monotonic() < ends
        time.sleep(0.02)
    told = {path.name for path in here.iterdir() if path.suffix}
    assert told == (set() if number == signal.SIGKILL else {f"{pid}.{number}" for pid in found})


def test_package_and_launch_scripts_ask_for_the_same_versions():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    assert [line for line in lines if not line.startswith("#")] == wanted
