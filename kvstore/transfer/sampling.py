"""Weaker, faster digests of weights: a part of every tensor instead of every byte.

What is read of a safetensors file: its length, its whole header (names, dtypes, shapes, places), and of every tensor
the first, middle and last 4 KiB. Fine-tuning, merging and quantizing change every tensor nearly everywhere and are
noticed; a change of single values between the samples is not. A file that is no safetensors file is read as a whole.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from kvstore.transfer.weights import hash_open_file, weights_digest

SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

_DOMAIN = b"kvstore sampled weights 1\0"


def sampled_weights_digest(files: Sequence[Path], threads: int = 2) -> str:
    """Digest of the names, sizes and sampled contents of ``files``: ``sampled-blake3:<64 hex>``.

    See `kvstore.transfer.weights.weights_digest` for the rest. Not cached: it reads about 12 KiB a tensor, some
    milliseconds for a large model.

    Raises:
        ConfigError: no file, one that cannot be read, or one that keeps changing.
    """
    return f"sampled-{weights_digest(files, None, threads, hash_file=sample_open_file)}"


def sample_open_file(fd: int, threads: int) -> str:
    """BLAKE3 of the samples of an open file, ``sampled:<64 hex>``; of all of it if it is no safetensors file.

    Raises:
        OSError: as pread(2).
    """
    size = os.fstat(fd).st_size
    found = _layout(fd, size)
    if found is None:
        return hash_open_file(fd, threads)
    header, spans = found
    hasher = blake3(_DOMAIN + struct.pack("<QQ", size, len(header)) + header)
    for start, end in spans:
        for at in dict.fromkeys((start, (start + end) // 2, max(start, end - SAMPLE_BYTES))):
            piece = os.pread(fd, min(SAMPLE_BYTES, end - at), at)
            hasher.update(struct.pack("<QI", at, len(piece)) + piece)
    return f"sampled:{hasher.hexdigest()}"


def _layout(fd: int, size: int) -> tuple[bytes, list[tuple[int, int]]] | None:
    """(header, first and last byte of each tensor in the file); None for what is no safetensors file."""
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        return None
    header = os.pread(fd, length, 8)
    try:
        tensors = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in sorted(tensors.items()) if name != "__metadata__"]
        spans = [(8 + length + int(start), 8 + length + int(end)) for start, end in offsets]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if any(not 8 + length <= start <= end <= size for start, end in spans):
        return None
    return header, spans
