"""The weights that this engine loaded: their digest, and whether the files still are what was loaded.

Invariant: a digest is given only if no weight file changed between the start of the engine and the end of hashing.
A file that was replaced meanwhile may have been loaded in either state; then nothing is kept in persistent tiers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from connectors.vllm import adapt
from kvstore.errors import TierUnavailable
from kvstore.transfer.sampling import sampled_weights_digest
from kvstore.transfer.stamps import Stamps, first_changed, stamps_of
from kvstore.transfer.weights import is_named_by_content, weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_START_SLACK_NS = 100_000_000
"""How late the start of a process may be estimated; it loads no weights in its first tenth of a second."""


class LoadedWeights:
    """Made together with the connector; see the module.

    Args:
        vllm_config: names the model.
        mode: ``full`` or ``sampled``, see `kvstore.transfer.sampling`.
    """

    def __init__(self, vllm_config: VllmConfig, mode: Literal["full", "sampled"]) -> None:
        self._vllm_config = vllm_config
        self._mode = mode
        self._before: Stamps = {}
        self._reason = ""
        try:
            self._before = stamps_of(adapt.weight_files_of(vllm_config))
        except TierUnavailable as error:
            self._reason = str(error)

    def digest(self, cache_dir: Path | None) -> str:
        """The digest. Blocks while files are read.

        Raises:
            ConfigError: a file can not be read, or keeps changing.
            TierUnavailable: there are no files to tell these weights from others, or one was replaced since the
                engine started; says which.
        """
        if self._reason:
            raise TierUnavailable(self._reason)
        files = list(self._before)
        # A process of the user's own may have written the model itself; a child that vLLM made has not.
        is_child = multiprocessing.parent_process() is not None
        late = written_after(files, _started_ns() + _START_SLACK_NS) if is_child else None
        if late is not None:
            raise TierUnavailable(_doubt(late))
        digest = sampled_weights_digest(files) if self._mode == "sampled" else weights_digest(files, cache_dir)
        self.verify()
        return digest

    def verify(self) -> None:
        """Raises TierUnavailable if a weight file changed since this object was made."""
        changed = first_changed(self._before, stamps_of(adapt.weight_files_of(self._vllm_config)))
        if changed is not None:
            raise TierUnavailable(_doubt(changed))


def _doubt(path: Path) -> str:
    return (
        f"weights: {path.name} was replaced while the engine started, so nobody knows which bytes it loaded; "
        "restart the engine to use tiers that outlive it"
    )


def written_after(files: Iterable[Path], moment_ns: int) -> Path | None:
    """The first file that changed after a moment (nanoseconds since 1970), None for none.

    A file that is named by its content has what its name says, whenever it came.
    """
    for path in files:
        if not is_named_by_content(path) and path.stat().st_ctime_ns > moment_ns:
            return path
    return None


def _started_ns() -> int:
    """When this process started, in nanoseconds since 1970, to about 20 ms (proc(5): clock ticks since boot)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    up = float(Path("/proc/uptime").read_text().split()[0])
    age = up - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)
