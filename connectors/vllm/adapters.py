"""LoRA adapters by content: vLLM's block hashes name an adapter by name and path only, which other bytes may have.

Invariant: a request gets the digest of the files that its engine loaded, or none. An adapter whose files change while
the engine lives, that is loaded anew in place, or whose number two adapters share has none from then on, for as long
as the engine lives.

A request never waits: the first one of an adapter starts the hashing on the prober's thread and bypasses the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.vllm import adapt
from connectors.vllm.settings import log
from kvstore.errors import ConfigError
from kvstore.transfer.stamps import Stamps, first_changed, stamps_of
from kvstore.transfer.weights import adapter_digest, adapter_files

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ADAPTERS = 4096
"""Adapters that are remembered. Those beyond have no digest: a forgotten one could not be watched."""


class Adapter:
    """One loaded adapter. ``digest`` is ``b""`` until it is known; ``is_lost`` never turns back."""

    __slots__ = ("_cache_dir", "_folder", "_stamps", "digest", "is_lost", "lora")

    def __init__(self, lora: adapt.Lora, cache_dir: Path | None) -> None:
        self.lora = lora
        self.digest = b""
        self.is_lost = False
        self._cache_dir = cache_dir
        self._folder: Path | None = None
        self._stamps: Stamps = {}

    def lose(self, reason: str) -> None:
        """From now on nobody knows which bytes the engine has loaded."""
        if not self.is_lost:
            self.is_lost = True
            log.warning("kvstore.adapter_unknown name=%s reason=%s", self.lora.name, reason)

    def look(self) -> None:
        """Hashes the files, or makes sure that they are those that were hashed. Blocks; on the prober's thread."""
        if self.is_lost:
            return
        try:
            self._look()
        except ConfigError as error:
            self.lose(str(error))

    def _look(self) -> None:
        if self._folder is None:
            self._folder = adapt.adapter_folder(self.lora.path)
        now = stamps_of(adapter_files(self._folder))
        if not self.digest:
            digest = adapter_digest(self._folder, self._cache_dir)
            self._stamps = now
            now = stamps_of(adapter_files(self._folder))
        if first_changed(self._stamps, now) is not None:
            raise ConfigError("its files changed while the engine ran")
        if not self.digest:
            self.digest = digest.encode() + (b" 3d" if self.lora.is_three_dimensional else b"")


class Adapters:
    """The adapters that requests named. Used from the scheduler's thread, where it does no I/O.

    Args:
        run: calls something on the prober's thread.
        cache_dir: where digests are kept.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None], cache_dir: Path | None) -> None:
        self._run = run
        self._cache_dir = cache_dir
        self._known: dict[int, Adapter] = {}
        """By vLLM's number of an adapter: what the workers tell adapters apart by."""

    def of(self, request: Request) -> Adapter | None:
        """The adapter of a request, whose files are looked at again in the background; None for none."""
        lora = adapt.lora_of(request)
        if lora is None:
            return None
        adapter = self._known.get(lora.number)
        if adapter is None:
            adapter = Adapter(lora, self._cache_dir)
            if len(self._known) >= MAX_ADAPTERS:
                adapter.lose(f"more than {MAX_ADAPTERS} adapters")
                return adapter
            self._known[lora.number] = adapter
        if lora.is_in_place:
            adapter.lose("it is loaded in place")
        elif lora != adapter.lora:
            adapter.lose(f"another adapter has its number {lora.number}")
        if not adapter.is_lost:
            self._run(adapter.look)
        return adapter
