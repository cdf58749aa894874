"""vLLM calls `register` in each of its processes when the package is installed: `KvasirConnector` is then known by its name."""


def register() -> None:
    """Makes the connector known to vLLM, unless it is already."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvasirConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvasirConnector", "kvasir_kv.vllm", "KvasirConnector")
