"""``python -m tests.crash [--rounds N] [--seed N]``: exit 1 on any violation."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.crash.rounds import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--dir", type=Path, default=None, help="where to make the store (a local file system)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crash-", dir=asked.dir) as place:
        tally = play(Path(place), asked.rounds, asked.seed)
    print(f"seed {asked.seed}")
    for name, value in tally.rows():
        print(f"{name:<44}{value:>32}")
    for violation in tally.verdicts.violations[:20]:
        print(f"VIOLATION {violation}", file=sys.stderr)
    return 1 if tally.verdicts.violations or tally.rounds < asked.rounds else 0


if __name__ == "__main__":
    sys.exit(main())
