# shellcheck shell=bash
# Sourced by the launch scripts. Afterwards $root is the repository and $venv a whole environment for it, in which
# k3jax is installed as it lies in $root: scripts and notebooks anywhere import it, and see what is changed there.
#
# $venv/whole is written last and names what the environment was made from: the interpreter, $root, and a checksum of
# requirements.txt and pyproject.toml. While all match nothing is installed; without the file .venv is half-made and
# made anew.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
install_log=$venv/install.log

fail() {
    printf '%s: %s\n' "$(basename -- "$0")" "$1" >&2
    exit 1
}

# Prints version, prefix and executable of a Python, tabs between; fails for what is no Python. The latter two
# are of the installation under any virtual environment: an active .venv counts as the Python that made it.
probe() {
    local answer
    answer=$("$1" -c 'import sys
sys.stdout.write("\t".join(("%d.%d.%d" % sys.version_info[:3], getattr(sys, "base_prefix", sys.prefix),
                            getattr(sys, "_base_executable", sys.executable))))' 2>/dev/null) || return 1
    printf '%s' "${answer%%$'\n'*}"
    [[ $answer == [0-9]*$'\t'*$'\t'* ]]
}

new_enough() {
    local major minor
    IFS=. read -r major minor _ <<<"$1"
    ((major == 3 && minor >= 11))
}

# Sets version, prefix, python (the executable): of $PYTHON, else a whole .venv, else the first fit on PATH.
find_python() {
    local found name names old='' needed='a Python 3.11 or newer is needed'
    if [[ -n ${PYTHON:-} ]]; then
        type -P "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is no program; $needed"
        found=$(probe "$PYTHON") ||
            fail "PYTHON=$PYTHON does not run as a Python${found:+ (it says: $found)}; $needed"
        IFS=$'\t' read -r version prefix python <<<"$found"
        new_enough "$version" || fail "PYTHON=$PYTHON is Python $version; $needed"
        return
    fi
    names=(python3 python3.{19..11} python)
    if [[ -e $venv/whole ]]; then names=("$venv/bin/python" "${names[@]}"); fi
    for name in "${names[@]}"; do
        found=$(probe "$name") || continue
        IFS=$'\t' read -r version prefix python <<<"$found"
        if new_enough "$version"; then return; fi
        old+="${old:+, }$name $version"
    done
    fail "$needed, and PATH has ${old:-no Python at all}; install one or set PYTHON=/path/to/python"
}

# logged WHAT COMMAND...: runs the command into a new log; a failure is one line with the last error in it.
logged() {
    local what=$1 reason
    shift
    if ! "$@" >"$install_log" 2>&1; then
        reason=$(grep -iE '^[a-z.]*error: ' "$install_log" | tail -n 1) || true
        fail "$what with Python $version ($python) failed${reason:+: $reason}; the log is $install_log"
    fi
}

# -P throughout: files of the user's working directory must not pass for modules.
make_venv() {
    echo "creating $venv with Python $version"
    if ! { rm -rf -- "$venv" && mkdir -- "$venv"; } 2>/dev/null; then
        fail "cannot make $venv anew: no right to write there, or no space"
    fi
    if "$python" -P -c 'import ensurepip, venv' 2>/dev/null; then
        logged "creating .venv" "$python" -P -m venv "$venv"
    elif "$python" -P -c 'import pip, venv' 2>/dev/null; then
        # Some systems ship ensurepip apart; their own pip can put one into the environment.
        logged "creating .venv" "$python" -P -m venv --without-pip "$venv"
        logged "creating .venv" "$python" -P -m pip --python "$venv/bin/python" install --quiet pip
    else
        fail "Python $version ($python) lacks venv or pip; add them (on Debian: python3-venv) or set PYTHON"
    fi
}

prepare() {
    local version prefix python interpreter wanted made_from=''
    find_python
    interpreter="Python $version in $prefix"
    wanted="$interpreter, $root, requirements $(cat "$root/requirements.txt" "$root/pyproject.toml" | cksum)"

    # One at a time: a second start waits here and finds the work done. The lock ends with descriptor 9.
    exec 9<"$root"
    if type -P flock >/dev/null; then flock 9 2>/dev/null || true; fi
    if [[ -x $venv/bin/python && -e $venv/whole ]]; then made_from=$(cat "$venv/whole"); fi
    if [[ $made_from != "$wanted" ]]; then
        if [[ $made_from == "$interpreter, "* ]]; then
            rm -- "$venv/whole" # only the requirements are new: what the user added stays
        else
            make_venv
        fi
        echo "installing requirements.txt (a minute or two)"
        logged "installing requirements.txt" "$venv/bin/python" -P -m pip install --quiet --no-input \
            --disable-pip-version-check -r "$root/requirements.txt"
        logged "installing k3jax" "$venv/bin/python" -P -m pip install --quiet --no-input \
            --disable-pip-version-check --no-deps --no-build-isolation --editable "$root"
        printf '%s\n' "$wanted" >"$venv/whole"
    fi
    exec 9<&-
}

prepare
