#!/usr/bin/env bash
# Makes .venv if needed, then runs the tests: bash launch/test.sh [--all] [pytest arguments such as tests/ops -k kda]
# --all takes the slow ones too.
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
cd -- "$root"
if [[ ${1:-} == --all ]]; then set -- -m "slow or not slow" "${@:2}"; fi
exec "$venv/bin/python" -m pytest "$@"
