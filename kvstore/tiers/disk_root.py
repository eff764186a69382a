"""The root of a disk store: whether a directory may be one, and what lies between it and the records.

Invariant: nothing is written into a directory that is not ours alone, and nothing below the root is reached through a
link. ``<root>/.kvstore`` marks a store and is there before anything else of it::

    <root>/.kvstore
    <root>/.ledger                 what is used (`disk_ledger`)
    <root>/.inflight-<random>      one of each live client that may write (`disk_members`)
    <root>/<slug>-<ns16>/namespace.json
    <root>/<slug>-<ns16>/epoch
    <root>/<slug>-<ns16>/<epoch16>/<shard>/<hh>/<address>.safetensors
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import ConfigError, TierUnavailable
from kvstore.keys import Namespace
from kvstore.tiers.disk_draft import DRAFT_NAME, Directory, make_directory, open_directory
from kvstore.tiers.disk_files import Files
from kvstore.tiers.os_calls import OsCalls

MARKER = ".kvstore"
MARKER_TEXT = b"kvstore disk format 1\n"
NAMESPACE_FILE = "namespace.json"
EPOCH_FILE = "epoch"
EPOCH_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)
MAX_NAMESPACE_BYTES = 1 << 22
_FOREIGN_OK = frozenset({MARKER, "lost+found", ".stats"})
"""Beside the marker: what a new file system has, and the engine's snapshots, which may be there first."""

REFUSED_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x564C: "NCP",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
}
"""``f_type`` of file systems whose locks, links or unlinked files do not work as a local one's (linux/magic.h)."""


def _problem(path: Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"tiers[disk].path: {path} {what}; {remedy}")


def open_root(path: Path, calls: OsCalls, files: Files, read_only: bool) -> Directory:
    """Opens ``path`` as the root of a store, which is made if it is not there. Blocks.

    Raises:
        ConfigError: it can not be one; names the path and the remedy.
    """
    root = _open_or_make(path, calls, read_only)
    try:
        status, magic = calls.stat(root.fd), calls.file_system_magic(root.fd)
    except OSError as error:
        raise _refusal(path, error) from None
    if status.st_uid != os.geteuid():
        raise _problem(
            path,
            f"belongs to user {status.st_uid}, not to user {os.geteuid()} who runs this",
            "name a directory of your own: whoever can write a store decides what the model answers",
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise _problem(path, "is writable by its group or by everyone", f"run chmod go-w {path}")
    kind = REFUSED_FILE_SYSTEMS.get(magic)
    if kind is not None:
        raise _problem(
            path, f"is on a file system of kind {kind}", "name a directory of a local disk, or use the redis tier"
        )
    _check_marker(path, root, calls, files, read_only)
    return root


def _open_or_make(path: Path, calls: OsCalls, read_only: bool) -> Directory:
    try:
        root = open_directory(calls, str(path))
        if not read_only:
            _sync_parent(path, calls)  # who made it may have died before it did this
        return root
    except FileNotFoundError:
        if read_only:
            raise _problem(path, "does not exist", "remove read_only: true, or name an existing store") from None
    except OSError as error:
        raise _refusal(path, error) from None
    try:
        new = [path, *(above for above in path.parents if not above.exists())]
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process of this engine makes it at the same moment
            calls.mkdir(str(path), 0o700)
        for made in new:
            _sync_parent(made, calls)
        return open_directory(calls, str(path))
    except OSError as error:
        raise _refusal(path, error) from None


def _sync_parent(path: Path, calls: OsCalls) -> None:
    with contextlib.suppress(OSError):  # a directory that we may not read can not be synced by us
        parent = open_directory(calls, f"{path.parent}/.")  # which may itself be a link
        calls.sync(parent.fd)


def _refusal(path: Path, error: OSError) -> ConfigError:
    if path.is_symlink():  # open(2) says ENOTDIR or ELOOP
        return _problem(path, "is a symbolic link", "name the directory that it leads to")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return _problem(path, "is not a directory, or something above it is not", "name a directory")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _problem(
            path,
            f"can not be opened or made: {error.strerror}",
            "name a directory that this user may write, or set read_only: true for one that it may read",
        )
    return _problem(path, f"can not be opened: {error.strerror}", "name a directory of a local disk")


def _check_marker(path: Path, root: Directory, calls: OsCalls, files: Files, read_only: bool) -> None:
    try:
        # Names first, marker second: a marker is made before any other name, so that a second process which starts
        # at the same moment either sees an empty directory or the marker.
        listing = open_directory(calls, ".", root)
        names = [e.name for e in calls.scandir(listing.fd) if not DRAFT_NAME.fullmatch(e.name)]
        text = files.small(root, MARKER, len(MARKER_TEXT))
        if text is None and (strangers := sorted(set(names) - _FOREIGN_OK)):
            raise _problem(
                path,
                f"is not empty and not a store (it has {', '.join(strangers[:3])})",
                "name an empty directory or one that does not exist",
            )
        if text is not None and text != MARKER_TEXT:
            raise _problem(path, "is a store of another format", "name another directory, or remove this one")
        if not read_only:
            files.draft(root, direct=False).close()
            if text is None:
                files.publish(root, MARKER, MARKER_TEXT)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # a full disk is no mistake in the settings: what it has can still be served
        raise _problem(
            path,
            f"can not be written: {error.strerror}",
            "give this user write permission, or set read_only: true to serve what it has",
        ) from None


def namespace_directory(namespace: Namespace) -> str:
    """Name of a namespace's directory: a decoration, and the digest that decides."""
    return f"{namespace.slug}-{namespace.ns16}"


def open_namespace(root: Directory, namespace: Namespace, calls: OsCalls, files: Files, read_only: bool) -> Directory:
    """Opens (and makes, unless ``read_only``) the directory of a namespace. Blocks.

    Raises:
        TierUnavailable: an operating system error, nothing there on a read-only tier, or a directory of this name
            whose ``namespace.json`` differs; the message has the differing fields.
    """
    name = namespace_directory(namespace)
    try:
        if read_only:
            directory = open_directory(calls, name, root)
        else:
            if files.small(root, MARKER, len(MARKER_TEXT)) is None:
                files.publish(root, MARKER, MARKER_TEXT)  # the disk was full when the root was opened
            directory = make_directory(calls, name, root, sync=True)
        found = files.small(directory, NAMESPACE_FILE, MAX_NAMESPACE_BYTES)
        if found is None and not read_only:
            files.publish(directory, NAMESPACE_FILE, namespace.canonical)
            found = files.small(directory, NAMESPACE_FILE, MAX_NAMESPACE_BYTES)
    except FileNotFoundError:
        raise TierUnavailable(f"{name}: nothing is stored for this namespace, and the tier is read-only") from None
    except OSError as error:
        raise TierUnavailable(f"{name}: {error.strerror}") from error
    if found != namespace.canonical:
        raise TierUnavailable(f"{name}/{NAMESPACE_FILE} {_difference(namespace, found)}; remove that directory")
    return directory


def _difference(namespace: Namespace, found: bytes | None) -> str:
    try:
        other = json.loads(found or b"")
    except (ValueError, RecursionError):
        other = None
    if not isinstance(other, dict):
        return "is damaged"
    return f"differs in {', '.join(namespace.differing_fields(other)) or 'its spelling'}"


def publish_epoch(
    directory: Directory, calls: OsCalls, files: Files, read_only: bool, new_epoch: Callable[[], str]
) -> str:
    """The epoch in a namespace's directory; published first if there is none or what is there is none. Blocks.

    Raises:
        TierUnavailable: an operating system error, or none there on a read-only tier.
    """
    try:
        for _ in range(3):
            found = files.small(directory, EPOCH_FILE, 16)
            text = None if found is None else found.decode("ascii", "replace")
            if text is not None and EPOCH_NAME.fullmatch(text):
                # Whoever needs it on stable storage syncs the directory that it is in with the epoch's own (`Tree`).
                return text
            if read_only:
                break
            if text is not None:
                calls.unlink(EPOCH_FILE, directory.fd)
            # The name of a file that is there already is never taken: the loser reads the winner's.
            files.publish(directory, EPOCH_FILE, new_epoch().encode())
    except OSError as error:
        raise TierUnavailable(f"{EPOCH_FILE}: {error.strerror}") from error
    raise TierUnavailable(f"{EPOCH_FILE}: no epoch is published")
