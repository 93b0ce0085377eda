#!/usr/bin/env bash
# Makes .venv if needed, then runs the main job: bash launch/quickstart.sh [overrides such as train.steps=50]
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
exec "$venv/bin/python" "$root/launch/quickstart.py" "$@"
