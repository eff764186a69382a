# Everything runs in .venv, which `make setup` makes; nothing outside the project is changed.

PY := .venv/bin/python
BENCHMARKS := copies disk connector
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench crash fuzz lint clean

help:  ## print this list
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

setup:  ## make .venv with all that the other targets need; does nothing if it is up to date
	@bash scripts/setup.sh

demo: setup  ## the main job on a real vLLM: prefix hits from memory, and from disk after SIGKILL
	@$(PY) -m demo

test: setup  ## lint and all tests; ARGS="-k name" goes to pytest
	@lint=ok; tests=ok; \
	$(MAKE) --no-print-directory lint || lint=FAILED; \
	$(PY) -m pytest $(ARGS) || tests=FAILED; \
	echo "make test: lint $$lint, tests $$tests"; \
	[ $$lint = ok ] && [ $$tests = ok ]

bench: setup  ## all benchmarks; fails at the end if any bar was missed; ARGS="--json" for JSON
	@failed=; \
	for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name $(ARGS) || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "make bench: FAILED:$$failed" >&2; exit 1; }

crash: setup  ## 200 rounds of SIGKILL under two processes on one directory; ARGS="--rounds 20 --seed 3"
	@$(PY) -m tests.crash $(ARGS)

fuzz: setup  ## feed made-up bytes to all that parses what lies in a store, for 2 minutes
	@.venv/bin/python -c "import atheris" 2>/dev/null || $(PY) -m pip --disable-pip-version-check -q install "atheris>=3.0"
	@PYTHONPATH=. $(PY) fuzz/record_fuzz.py -max_total_time=120 $(ARGS)

lint: setup  ## ruff (check and format) and mypy (strict)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

clean:  ## remove what was built and cached, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
