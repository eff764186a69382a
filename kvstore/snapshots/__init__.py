"""The files that the parts of an engine publish for ``kvstore stats``: no port, no server, no thread of their own.

Each part (scheduler, one per rank, or a store in one piece) has a file; the reader puts those of one instance together.
"""

from kvstore.snapshots.directory import collect_garbage, read_all, read_parts, resolve_dir
from kvstore.snapshots.document import CounterRow, Part, Snapshot, TierRow, is_alive, merge, start_of
from kvstore.snapshots.writer import SnapshotWriter

__all__ = [
    "CounterRow",
    "Part",
    "Snapshot",
    "SnapshotWriter",
    "TierRow",
    "collect_garbage",
    "is_alive",
    "merge",
    "read_all",
    "read_parts",
    "resolve_dir",
    "start_of",
]
