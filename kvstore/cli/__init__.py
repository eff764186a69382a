"""The ``kvstore`` command.

Invariant: it starts at once. Nothing here or in a command's module is imported before it is needed that brings an
engine, a tensor library or a validator with it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvstore import __version__
from kvstore.cli import clear, inspect, ls, stats, verify
from kvstore.errors import KVStoreError

OK = 0
FAILED = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 1 damage found, 2 wrong usage or nothing
    found, 130 interrupted.

    Args:
        arguments: without the program's name; those of this process for None.
    """
    parser = argparse.ArgumentParser(
        prog="kvstore", description="Look at a KV-cache store: what its engines hold, hit, miss and move."
    )
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (stats, ls, verify, inspect, clear):
        command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (``head``) has what it wanted; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
