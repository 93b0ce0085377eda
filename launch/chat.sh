#!/usr/bin/env bash
# Makes .venv if needed, then a chat model from nothing: bash launch/chat.sh [settings of the fine-tune such as train.steps=50]
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
exec "$venv/bin/python" "$root/launch/chat.py" "$@"
