#!/usr/bin/env bash
# Makes .venv if needed, then runs the tests: bash launch/test.sh [pytest arguments such as tests/ops -k kda]
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
cd -- "$root"
exec "$venv/bin/python" -m pytest "$@"
