"""Makes the connector known to vLLM by its name alone (entry point ``vllm.general_plugins``).

vLLM calls `register` in every process, sometimes more than once. Nothing is imported from vLLM before that.
"""

from __future__ import annotations

CONNECTOR = "KVStoreConnector"
MODULE = "connectors.vllm.connector"


def register() -> None:
    """Registers the connector; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:
        # Registered before, in this process.
        return
