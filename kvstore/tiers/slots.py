"""Slot memory of a volatile tier: one anonymous mapping, cut into slots that each hold one whole record.

Invariant: nothing here ever writes into a slot. Faulting the pages in ahead of time happens on a thread of its own,
by calls that cannot change what a page holds, so slots may be used from the first moment on.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvstore.errors import ConfigError, ContractError
from kvstore.units import KIB, MIB, PAGE, format_bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Populate = Callable[[int, int], bool]
"""``populate(address, length)``: faults the pages in without changing them; False where the system refuses."""

MADV_POPULATE_WRITE = 23
"""Linux 5.14; not in Python's ``mmap``, whose ``madvise`` also keeps the GIL for the whole call."""

PREFAULT_PIECE = 8 * MIB
"""Bytes faulted in per call: page faults of other threads wait for at most this much (about 2 ms)."""

LOCK_PIECE = 64 * KIB
"""Bytes per ``mlock`` where POPULATE is missing: the smallest usual RLIMIT_MEMLOCK."""

_DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

_libc = ctypes.CDLL(None, use_errno=True)
for _call, _arguments in (("madvise", 3), ("mlock", 2), ("munlock", 2)):
    _function = getattr(_libc, _call)
    _function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int][:_arguments]
    _function.restype = ctypes.c_int


def populate_by_advice(address: int, length: int) -> bool:
    """Faults pages in by MADV_POPULATE_WRITE. Releases the GIL; False before Linux 5.14."""
    return bool(_libc.madvise(address, length, MADV_POPULATE_WRITE) == 0)


def populate_by_locking(address: int, length: int) -> bool:
    """Faults pages in by locking and unlocking them piece by piece. Releases the GIL; False past RLIMIT_MEMLOCK.

    Writing a byte per page was rejected: it would race with whoever fills the slot.
    """
    for start in range(address, address + length, LOCK_PIECE):
        piece = min(LOCK_PIECE, address + length - start)
        if _libc.mlock(start, piece) != 0:
            return False
        _libc.munlock(start, piece)
    return True


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that the system can give without swapping (``MemAvailable``).

    Raises:
        ConfigError: the file has no such line (not Linux).
    """
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise ConfigError(f"{meminfo} does not tell the available memory; Linux is required")


def _pin_note(pin: str) -> str:
    """Why slots are not pinned; raises where they must be."""
    if pin == "off":
        return "off"
    note = "no device" if not any(Path(node).exists() for node in _DEVICE_NODES) else "device copies are not served"
    if pin == "required":
        raise ConfigError(f"pin: required, but slots cannot be pinned ({note}); set pin: auto")
    return note


class SlotArena:
    """``count`` slots of ``slot_bytes`` each, 4096-aligned, in one anonymous mapping.

    Any thread may take views; who may touch which slot is the planner's business. Until the background prefault is
    through, the first touch of a page costs a page fault.

    Args:
        slot_bytes: bytes of a slot, a multiple of 4096.
        count: number of slots, at least 1.
        pin: ``auto``, ``required`` or ``off``: whether the memory is to be registered with a device.
        prefault: fault all pages in on a daemon thread.
        available_bytes: memory that may be used; None asks the system.
        populate: ways of faulting pages in, tried in order until one is accepted.

    Raises:
        ConfigError: more asked for than is available (before anything is allocated), or ``pin: required`` without a
            device.
        ContractError: a size that is not a multiple of 4096, or no slot.
    """

    def __init__(
        self,
        slot_bytes: int,
        count: int,
        *,
        pin: Literal["auto", "required", "off"] = "auto",
        prefault: bool = True,
        available_bytes: int | None = None,
        populate: tuple[Populate, ...] = (populate_by_advice, populate_by_locking),
    ) -> None:
        if slot_bytes < PAGE or slot_bytes % PAGE or count < 1:
            raise ContractError(f"an arena of {count} slots of {slot_bytes} bytes")
        self.slot_bytes = slot_bytes
        self.count = count
        self.pin_note = _pin_note(pin)
        total = slot_bytes * count
        available = available_memory() if available_bytes is None else available_bytes
        if total > available:
            raise ConfigError(
                f"capacity: {format_bytes(total)} of slots asked for, {format_bytes(available)} of memory available; "
                f"set a smaller capacity"
            )
        # Private, not the module's default of shared: shared anonymous memory is a tmpfs file, which gets no huge
        # pages by default and counts against the container's /dev/shm.
        mapping = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        self._memory: Bytes | None = memory
        _libc.madvise(memory.ctypes.data, total, mmap.MADV_HUGEPAGE)  # advice only: refused without THP
        self._stop = threading.Event()
        self._faulted = threading.Event()
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(
                target=_prefault,
                args=(memory, populate, self._stop, self._faulted),
                name="slot-prefault",
                daemon=True,
            )
            self._thread.start()

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with a device; ``pin_note`` says why not."""
        return False

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.count

    def array(self, slot: int) -> Bytes:
        """The slot as a writable uint8 array ``[slot_bytes]``. Cost: 1 us.

        Raises:
            ContractError: no such slot, or the arena is closed.
        """
        if self._memory is None or not 0 <= slot < self.count:
            raise ContractError(f"slot {slot} of {self.count if self._memory is not None else 'a closed arena'}")
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def buffer(self, slot: int) -> memoryview:
        """The slot as a writable memoryview of ``slot_bytes`` bytes. Raises as `array` does."""
        return self.array(slot).data

    def wait_prefault(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds; True once every page is there, False if not (yet) or never to be."""
        return self._faulted.wait(timeout)

    def close(self) -> None:
        """Stops the prefault and lets go of the memory, which lives until its last view is gone. Idempotent.

        Blocks for at most one prefault piece.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._memory = None


def _prefault(memory: Bytes, populate: tuple[Populate, ...], stop: threading.Event, faulted: threading.Event) -> None:
    """Faults in ``memory`` from its start, a piece at a time, by the first way that the system accepts."""
    ways = list(populate)
    address, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    while address < end and ways:
        if stop.is_set():
            return
        piece = min(PREFAULT_PIECE, end - address)
        if ways[0](address, piece):
            address += piece
        else:
            ways.pop(0)
    if address >= end:
        faulted.set()
