"""The connector's counters in vLLM's `/metrics` and in its log."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "saved_blocks": "Blocks that are in the store after they were offered.",
    "saved_bytes": "Bytes of those blocks.",
    "unsaved_blocks": "Blocks that the store had no room or bandwidth for.",
    "given_up_blocks": "Blocks whose request ended before there was room to offer them.",
    "loaded_blocks": "Blocks that were loaded instead of computed.",
    "loaded_bytes": "Bytes of those blocks.",
    "missing_blocks": "Blocks that were to be loaded, did not come whole, and were computed.",
    "throttled_transfers": "Transfers that had to wait for room in the store's queue.",
    "failures": "Failures of the store; the log has their texts.",
}
STORE = {
    "blocks": "Blocks in host memory now.",
    "disk_blocks": "Blocks on the disk now.",
    "stored": "Blocks that came into host memory from the engine, since the start.",
    "evicted": "Blocks that left host memory to make room, since the start.",
    "disk_read": "Blocks that came from the disk, since the start.",
    "disk_written": "Blocks written to the disk, since the start.",
    "disk_evicted": "Blocks that left the disk to make room, since the start.",
    "damaged": "Blocks found damaged, since the start.",
}


class KvasirStats(KVConnectorStats):
    """Counters add up; of each worker's store the last values hold.

    `data` is `{"counters": {name: count}, "stores": {worker: {name: value}}}`.
    """

    @classmethod
    def of(cls, counters: dict[str, int]) -> "KvasirStats":
        """Stats with these counters."""
        return cls(data={"counters": counters, "stores": {}})

    def __post_init__(self) -> None:
        self.data.setdefault("counters", {})
        self.data.setdefault("stores", {})

    def add_store(self, worker: str, values: dict[str, int]) -> None:
        """Adds what a worker's store counts."""
        self.data["stores"][worker] = {name: values[name] for name in STORE if name in values}

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "stores": {}}

    def aggregate(self, other: KVConnectorStats) -> "KvasirStats":
        counters = self.data["counters"]
        for name, count in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + count
        self.data["stores"].update(other.data["stores"])
        return self

    def reduce(self) -> dict[str, int | float]:
        stores = self.data["stores"]
        named = {f"{name} ({worker})": value for worker, values in stores.items() for name, value in values.items()}
        return {**self.data["counters"], **named}

    def is_empty(self) -> bool:
        return not (self.data["counters"] or self.data["stores"])


class KvasirMetrics(KVConnectorPromMetrics):
    """`vllm:kvasir_<counter>_total`, and `vllm:kvasir_store_<value>` for each worker."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvasir_{name}", documentation=text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        }
        self._values = {
            name: self._gauge_cls(
                name=f"vllm:kvasir_store_{name}",
                documentation=text,
                labelnames=[*self._labelnames, "worker"],
                multiprocess_mode="mostrecent",
            )
            for name, text in STORE.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data["counters"].items():
            self._counters[name].labels(*labels).inc(count)
        for worker, values in transfer_stats_data["stores"].items():
            for name, value in values.items():
                self._values[name].labels(*labels, worker).set(value)
