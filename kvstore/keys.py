"""Identity: what determines the bytes of a chunk, and the address made of it.

Invariant: equal addresses mean equal bytes. Everything that can change the stored bytes is in the namespace (per
model and deployment) or in the prefix hash and request identity (per request); every encoding here is injective
(fixed-width or length-prefixed fields), and nothing depends on the process or its environment.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from blake3 import blake3

FORMAT_VERSION = 1
"""Version of record and address format. A change makes every older record a miss."""

KEY_SCHEME = "kv-address-blake3-1"

ADDRESS_BYTES = 32
MAX_TOKEN = 2**32 - 1

_ADDRESS_DOMAIN = b"kvstore address 1\0"
_CHAIN_DOMAIN = b"kvstore chain 1\0"


@dataclass(frozen=True)
class Namespace:
    """Everything, other than the request, that determines the bytes of a chunk.

    ``fields`` is a JSON-able mapping of settings and digests only: no path, URL or salt may enter it, since it is
    stored in the clear beside the data so that a person can compare two of them.
    """

    fields: Mapping[str, Any] = field(repr=False)

    @cached_property
    def canonical(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII, no NaN."""
        return json.dumps(
            {"format_version": FORMAT_VERSION, "key_scheme": KEY_SCHEME, **self.fields},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=False,
        ).encode()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON, 32 bytes."""
        return hashlib.sha256(self.canonical).digest()

    @property
    def ns16(self) -> str:
        """The first 16 hex digits of the digest: its name in directories and keys."""
        return self.digest.hex()[:16]

    @property
    def slug(self) -> str:
        """A decoration for people made from the model's name; ``ns16`` decides."""
        return slug(str(self.fields.get("model", "model")))

    def differing_fields(self, other: Mapping[str, Any]) -> list[str]:
        """Names of the fields in which ``other`` (a parsed namespace JSON) differs from this one."""
        mine = json.loads(self.canonical)
        return sorted(k for k in mine.keys() | other.keys() if mine.get(k) != other.get(k))


def slug(name: str) -> str:
    """``name`` as ``[a-z0-9._-]{1,40}`` without a leading dot. Not injective and not meant to be."""
    text = re.sub(r"[^a-z0-9._-]+", "-", name.lower())[-40:].lstrip(".-")
    return text or "model"


def request_identity(*, salt: str = "", adapter: bytes = b"") -> bytes:
    """The part of an address that a request brings: salt and adapter content digest. Empty values mean none.

    Returns:
        ``b""`` for a request without either, else the BLAKE3 of the length-prefixed fields, 32 bytes.
    """
    if not salt and not adapter:
        return b""
    raw = salt.encode()
    return blake3(struct.pack("<II", len(raw), len(adapter)) + raw + adapter).digest()


class Addresser:
    """Makes the addresses of one namespace, group and request identity.

    Cost: one BLAKE3 of about 100 bytes (1 us) an address.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, namespace_digest: bytes, group: int = 0, identity: bytes = b"") -> None:
        if len(namespace_digest) != 32:
            raise ValueError("a namespace digest has 32 bytes")
        self._head = _ADDRESS_DOMAIN + namespace_digest
        self._tail = struct.pack("<II", group, len(identity)) + identity

    def address(self, prefix_hash: bytes) -> bytes:
        """The 32-byte address of the chunk that ends the prefix ``prefix_hash`` stands for."""
        return blake3(self._head + struct.pack("<I", len(prefix_hash)) + prefix_hash + self._tail).digest()

    def addresses(self, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """``address`` of each prefix hash, in order."""
        head, tail, pack = self._head, self._tail, struct.pack
        return [blake3(head + pack("<I", len(h)) + h + tail).digest() for h in prefix_hashes]


def token_array(tokens: object) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """``tokens`` (list, tuple, numpy or torch integers, any strides) as a contiguous little-endian uint32 array.

    Raises:
        ValueError: a float, a bool, a negative id or an id >= 2**32; never another key in silence.
    """
    if isinstance(tokens, (list, tuple)):
        for token in tokens:
            if isinstance(token, (bool, np.bool_)):
                raise ValueError(f"token id {token!r} is not an integer")
        try:
            array = np.array([operator.index(t) for t in tokens], dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from None
    else:
        array = np.asarray(tokens)
        if array.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"token ids must have one axis, not {array.ndim}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > MAX_TOKEN):
        raise ValueError("token ids must be in [0, 2**32)")
    return np.ascontiguousarray(array.astype("<u4"))


def chunk_hashes(
    namespace_digest: bytes, tokens: object, chunk_tokens: int, extras: Sequence[bytes] | None = None
) -> list[bytes]:
    """Prefix hashes of the full chunks of ``tokens``: ``h_i = H(h_{i-1} || tokens_i || extras_i)``, BLAKE3.

    Args:
        namespace_digest: 32 bytes; ``h_0 = H(namespace)``.
        tokens: token ids, see `token_array`.
        chunk_tokens: tokens per chunk; a shorter last piece has no hash.
        extras: one byte string a chunk (image digests with their positions and the like), ``b""`` for none.

    Raises:
        ValueError: bad token ids, ``chunk_tokens`` < 1, or fewer extras than chunks.
    """
    if chunk_tokens < 1:
        raise ValueError("chunk_tokens must be at least 1")
    array = token_array(tokens)
    count = array.size // chunk_tokens
    if extras is not None and len(extras) < count:
        raise ValueError(f"{count} chunks but {len(extras)} extras")
    raw = memoryview(array.tobytes())
    width = 4 * chunk_tokens
    previous = blake3(_CHAIN_DOMAIN + namespace_digest).digest()
    hashes = []
    for index in range(count):
        extra = extras[index] if extras is not None else b""
        previous = blake3(
            previous + raw[index * width : (index + 1) * width] + struct.pack("<I", len(extra)) + extra
        ).digest()
        hashes.append(previous)
    return hashes
