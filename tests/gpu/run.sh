#!/usr/bin/env bash
# What one Hopper GPU measures, in at most 8 minutes: writes gpu.json into $OUT (or --out FOLDER, or the current folder).
# The Python is $PYTHON, else the repository's .venv, else python3. check.py says the rest: tests/gpu/run.sh --help
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-$here/../../.venv/bin/python}"
[ -x "$(command -v "$python")" ] || python=python3
exec "$python" "$here/check.py" "$@"
