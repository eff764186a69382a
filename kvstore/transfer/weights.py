"""Digests of model weights and adapters: the content of every file, whatever its path.

Invariant: a digest is reused only for a file whose device, inode, size, mtime and ctime are those it was computed
for. The ctime cannot be set by a program, so bytes changed in place under a restored mtime are noticed. A file that
changed within the clock's last tick is left to settle first, or a second change in that tick would go unseen.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from blake3 import blake3

from kvstore.errors import ConfigError
from kvstore.units import MIB

log = logging.getLogger(__name__)

FileHash = Callable[[int, int], str]
"""``hash_file(fd, threads)``: reads an open file to its end; ``blake3:<64 hex>``."""

CACHE_ENTRIES = 10_000
CACHE_BYTES = 4 * MIB
"""A cache file larger than this is not ours and is not read."""

READ_BYTES = 8 * MIB
SETTLE_SECONDS = 0.1
"""Longer than the granularity of a local file system's timestamps (a scheduler tick, at most 10 ms)."""

ATTEMPTS = 5

_DOMAIN = b"kvstore weights 1\0"
_PREFERRED = ("*.safetensors",)
_OTHERS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_LFS_BLOB = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"blake3:[0-9a-f]{64}")


def weight_files(model_dir: Path) -> list[Path]:
    """The files of ``model_dir`` (or the one file it is) that hold weights, sorted by name; empty if there are none.

    ``*.safetensors`` if there are any, as vLLM prefers them; else ``*.bin``, ``*.pt``, ``*.pth`` and ``*.gguf``.
    """
    if model_dir.is_file():
        return [model_dir]
    for patterns in (_PREFERRED, _OTHERS):
        found = {path for pattern in patterns for path in model_dir.glob(pattern) if path.is_file()}
        if found:
            return sorted(found)
    return []


def adapter_digest(folder: Path, cache_dir: Path | None = None, threads: int = 2) -> str:
    """Digest of a LoRA folder's weights and configuration; see `weights_digest`.

    Raises:
        ConfigError: the folder has no ``adapter_model.*``.
    """
    return weights_digest(adapter_files(folder), cache_dir, threads)


def adapter_files(folder: Path) -> list[Path]:
    """The files of a LoRA folder that determine what it does: its weights, then its configuration.

    Raises:
        ConfigError: the folder has no ``adapter_model.*``.
    """
    weights = sorted(path for path in folder.glob("adapter_model.*") if path.is_file())
    if not weights:
        raise ConfigError(f"{folder} is not an adapter: it has no adapter_model file")
    return [*weights, *(path for path in (folder / "adapter_config.json",) if path.is_file())]


def is_named_by_content(path: Path) -> bool:
    """Whether the file is a link to a blob whose name is the SHA-256 of its content."""
    return _lfs_digest(path) is not None


def weights_digest(
    files: Sequence[Path], cache_dir: Path | None, threads: int = 2, *, hash_file: FileHash | None = None
) -> str:
    """Digest of the names and contents of ``files``, in any order: ``blake3:<64 hex>``.

    Blocks while it reads every byte that no cache knows (about 3 GB/s a thread from the page cache), on its own
    threads and without the GIL, and while another process hashes into the same cache. Call it off the engine's thread.

    A link into ``blobs/<64 hex>``, as the Hugging Face cache has it, is taken at that name, which is the file's
    SHA-256, and not read. The same bytes as a plain file therefore have another digest: a miss, never a wrong hit.

    Args:
        files: at least one; only their names enter the digest, no directory.
        cache_dir: where digests are kept (made with mode 0700); None, or one that is unusable, keeps none.
        threads: threads that hash.
        hash_file: reads and hashes one file; for tests that count reads.

    Raises:
        ConfigError: no file, one that cannot be read, or one that keeps changing.
    """
    if not files:
        raise ConfigError("the model has no weight files, so its weights have no digest")
    digest_one = partial(_digest_of, hash_file=hash_file or hash_open_file, threads=max(1, threads // len(files)))
    contents: dict[Path, str] = {}
    unnamed = []
    for path in dict.fromkeys(files):
        named = _lfs_digest(path)
        if named is None:
            unnamed.append(path)
        else:
            contents[path] = named
    with _cache(cache_dir if unnamed else None) as (known, added):
        with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
            results = list(pool.map(lambda path: digest_one(path, known), unnamed))
        for path, (key, digest) in zip(unnamed, results, strict=True):
            contents[path] = added[key] = digest
    return _combined([(path.name, _size(path), digest) for path, digest in contents.items()])


def hash_open_file(fd: int, threads: int) -> str:
    """BLAKE3 of an open file from its start, ``blake3:<64 hex>``. Releases the GIL; READ_BYTES of memory.

    Reads rather than maps: a mapped file that is truncated meanwhile would kill the process.
    """
    hasher = blake3(max_threads=threads)
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    at = 0
    while count := os.preadv(fd, [buffer], at):
        hasher.update(view[:count])
        at += count
    return f"blake3:{hasher.hexdigest()}"


def _combined(parts: Sequence[tuple[str, int, str]]) -> str:
    """One digest of (name, size, content digest) of all files, injective: every field has its length before it."""
    hasher = blake3(_DOMAIN + struct.pack("<I", len(parts)))
    for name, size, digest in sorted(parts):
        raw, content = os.fsencode(name), digest.encode()
        hasher.update(struct.pack("<IQI", len(raw), size, len(content)) + raw + content)
    return f"blake3:{hasher.hexdigest()}"


def _lfs_digest(path: Path) -> str | None:
    """``sha256:<hex>`` of a link into ``blobs/<64 hex>``, else None."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    if target.parent.name != "blobs" or not _LFS_BLOB.fullmatch(target.name) or not target.is_file():
        return None
    return f"sha256:{target.name}"


def _size(path: Path) -> int:
    return _stat(path).st_size


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"weights: {error.strerror}: {path}") from error


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _digest_of(path: Path, known: Mapping[str, str], hash_file: FileHash, threads: int) -> tuple[str, str]:
    """(cache key, digest) of a file that stood still while it was read."""
    for _ in range(ATTEMPTS):
        before = _stat(path)
        key = _key(before)
        if key in known:
            return key, known[key]
        age = time.time() - before.st_ctime_ns / 1e9
        if 0 <= age < SETTLE_SECONDS:
            time.sleep(SETTLE_SECONDS - age)
        try:
            with path.open("rb", buffering=0) as file:
                opened = _key(os.fstat(file.fileno()))
                digest = hash_file(file.fileno(), threads)
        except OSError as error:
            raise ConfigError(f"weights: {error.strerror}: {path}") from error
        if opened == key == _key(_stat(path)):
            return key, digest
    raise ConfigError(f"weights: {path} keeps changing while it is read; start when the download is complete")


@contextmanager
def _cache(cache_dir: Path | None) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """(known digests, a dict for those to keep), under a lock that other processes wait for.

    Whoever waited finds what the first one kept. The kernel frees the lock of a process that died. A directory that
    cannot be used costs the cache, not the digest.
    """
    added: dict[str, str] = {}
    lock = _locked(cache_dir) if cache_dir is not None else None
    if cache_dir is None or lock is None:
        yield {}, added
        return
    try:
        file = cache_dir / "weights.json"
        known = _read_cache(file)
        yield known, added
        # Used entries go to the end, so that what is dropped is what was not used for longest.
        kept = {**{key: digest for key, digest in known.items() if key not in added}, **added}
        if list(kept) != list(known):
            _write_cache(file, dict(list(kept.items())[-CACHE_ENTRIES:]))
    finally:
        # Not by closing alone: a child that was forked meanwhile has the descriptor too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _locked(cache_dir: Path) -> int | None:
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(cache_dir / "weights.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("weights cache unusable dir=%s error=%s", cache_dir, error.strerror)
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        os.close(fd)
        log.warning("weights cache unusable dir=%s error=%s", cache_dir, error.strerror)
        return None
    return fd


def _read_cache(file: Path) -> dict[str, str]:
    """The kept digests; empty if the file is absent, damaged, or may be written by others."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    with os.fdopen(fd, "rb") as stream:
        stat = os.fstat(fd)
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o022 or stat.st_size > CACHE_BYTES:
            log.warning("weights cache ignored file=%s", file)
            return {}
        try:
            entries = json.loads(stream.read())["digests"]
            return {str(key): digest for key, digest in entries.items() if _DIGEST.fullmatch(digest)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            log.warning("weights cache damaged file=%s", file)
            return {}


def _write_cache(file: Path, entries: Mapping[str, str]) -> None:
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as stream:
                json.dump({"version": 1, "digests": entries}, stream)
            fresh.replace(file)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            raise
    except OSError as error:
        log.warning("weights cache not written file=%s error=%s", file, error.strerror)
