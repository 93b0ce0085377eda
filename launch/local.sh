#!/usr/bin/env bash
# Makes .venv if needed, then trains in several processes on this machine:
#   bash launch/local.sh 2 --config configs/quickstart.py [overrides such as train.steps=50]
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
exec "$venv/bin/python" "$root/launch/local.py" "$@"
