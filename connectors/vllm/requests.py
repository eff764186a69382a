"""Addresses of live requests, kept in step with the engine's block hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from connectors.vllm.adapters import Adapter
from kvstore.keys import Addresser, request_identity

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LiveRequest:
    """One request that the engine has.

    Attributes:
        request: the engine's live object.
        identity: what an address has of it besides its block hashes.
        local_tokens: what the engine had at the last lookup.
        has_asked: whether the prober was asked for it.
        is_refused: whether ordering a load for it failed: nothing is promised to it any more.
    """

    __slots__ = (
        "_adapter",
        "_addresses",
        "_barred",
        "_hashes",
        "has_asked",
        "identity",
        "is_refused",
        "local_tokens",
        "request",
    )

    def __init__(self, request: Request, barred: str, adapter: Adapter | None = None) -> None:
        self.request = request
        self._adapter = adapter
        # What is not known when the request comes is not waited for: its first chunks would be missing.
        self._barred = barred or ("adapter" if adapter is not None and not adapter.digest else "")
        self.identity = request_identity(adapter=adapter.digest if adapter is not None else b"")
        self.local_tokens = 0
        self.has_asked = False
        self.is_refused = False
        self._hashes: list[bytes] = []
        self._addresses: list[bytes] = []

    @property
    def barred(self) -> str:
        """Why it is neither saved nor loaded (any more), "" for no reason."""
        is_lost = self._adapter is not None and self._adapter.is_lost
        return self._barred or ("adapter" if is_lost else "")

    def addresses(self, addresser: Addresser, hashes_per_chunk: int) -> Sequence[bytes]:
        """Addresses of the full chunks so far. Cost: one BLAKE3 a new chunk.

        The engine's hashes are chained, so an unchanged last one means that nothing before it changed; they may
        shrink or change (streaming sessions), and then all are made anew.
        """
        block_hashes = self.request.block_hashes
        count = len(block_hashes) // hashes_per_chunk
        known = len(self._hashes)
        if known and (known > count or block_hashes[known * hashes_per_chunk - 1] != self._hashes[-1]):
            self._hashes, self._addresses, known = [], [], 0
        if known < count:
            new = [bytes(block_hashes[(index + 1) * hashes_per_chunk - 1]) for index in range(known, count)]
            self._hashes += new
            self._addresses += addresser.addresses(new)
        return self._addresses
