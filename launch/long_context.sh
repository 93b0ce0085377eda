#!/usr/bin/env bash
# Makes .venv if needed, then prefills a million tokens: bash launch/long_context.sh [options such as --tokens 65536]
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
exec "$venv/bin/python" "$root/launch/long_context.py" "$@"
