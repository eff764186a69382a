"""The control's store: every payload zeros, every checksum valid.

A verified read accepts these records, so what the engine computes from them shows whether loaded bytes matter.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.layout import HEADER_BYTES
from kvstore.tiers.record import parse_header, payload_checksum


def zero_payloads(root: Path) -> int:
    """Rewrites every record below ``root`` in place; returns how many. No engine may use the store meanwhile.

    Raises:
        RecordDamaged: a record was not whole before.
    """
    count = 0
    for path in sorted(root.rglob("*.safetensors")):
        with path.open("r+b") as record:
            page = record.read(HEADER_BYTES)
            header = parse_header(page)
            zeros = bytes(header.payload_bytes)
            checksum = payload_checksum(memoryview(zeros))
            changed = page.replace(header.checksum.hex().encode(), checksum.hex().encode())
            parse_header(changed)
            record.seek(0)
            record.write(changed + zeros)
        count += 1
    return count
