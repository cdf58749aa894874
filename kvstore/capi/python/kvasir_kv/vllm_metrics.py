"""The connector's counters in vLLM's `/metrics` and in its log."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from . import handoff
from .library import STAGE_BOUNDS
from .settings import Settings

COUNTERS = {
    "saved_blocks": "Blocks that are in the store after they were offered.",
    "saved_bytes": "Bytes of those blocks.",
    "unsaved_blocks": "Blocks that the store had no room or bandwidth for.",
    "given_up_blocks": "Blocks whose request ended before there was room to offer them.",
    "loaded_blocks": "Blocks that were loaded instead of computed.",
    "loaded_bytes": "Bytes of those blocks.",
    "missing_blocks": "Blocks that were to be loaded, did not come whole, and were computed.",
    "awaited_blocks": "Blocks that requests waited for from another engine.",
    "received_blocks": "Blocks that came from another engine.",
    "received_bytes": "Bytes of those blocks.",
    "unreceived_blocks": "Blocks that did not come from another engine, and were computed.",
    "pushed_blocks": "Blocks that were computed for another engine.",
    "handed_over_blocks": "Blocks of those that were ready to be sent.",
    "handed_over_bytes": "Bytes of those blocks.",
    "early_bytes": "Bytes sent between the first push of a prompt and the end of its computation (of other prompts, too).",
    "unwanted_blocks": "Blocks that were not sent: nobody waited for them, or there was no memory.",
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
    "disk_write_failures": "Writes to the disk that failed and are tried again while the blocks are in host memory, since the start.",
    "damaged": "Blocks found damaged, since the start.",
    "far_read": "Blocks that came from other nodes or object storage, since the start.",
    "far_written": "Blocks sent to other nodes or object storage, since the start.",
    "events_lost": "News of tiers that the engine was too slow to take, since the start.",
    "recomputed": "Blocks that were here and that plans left to be computed, at each look: loading takes longer, since the start.",
    "late": "Blocks that did not come before the deadlines of their loads, and were computed, since the start.",
    "prefetched": "Blocks brought into host memory because their conversations were likely to go on, since the start.",
    "prefetch_used": "Prefetched blocks whose conversation went on, since the start.",
    "prefetch_wasted": "Prefetched blocks whose conversation did not go on in time, since the start.",
    "far_too_large": "Blocks that do not fit the slots of other nodes (store.slot there), since the start.",
    "far_searches": "Searches of prompts' blocks on other nodes or in object storage, since the start.",
    "far_unanswered": "Questions of these searches to a tier that were not answered in time, since the start.",
    "far_cut": "Such searches that found blocks for which there was no room here, since the start.",
    "far_not_asked": "Blocks that other nodes were known to hold and that plans did not ask for, at each look, since the start.",
    "retained": "Blocks that are retained now (kvasir_retain_seconds), on the disk or, without one, in host memory.",
    "retention_refused": "Blocks that were not retained: as many are as may be, the block before it is not, or too many requests wait; since the start.",
}

SECTIONS = ("counters", "stores", "nodes", "rails", "stages", "shared")


class KvasirStats(KVConnectorStats):
    """Counters add up; of each worker's store the last values hold.

    `data` is `{"counters": {name: count}, "stores": {worker: {name: value}}, "nodes": {worker: {node: {name: value}}},
    "rails": {worker: {rail: {name: value}}}, "stages": {worker: {stage: times}},
    "shared": {"stores": names, "tag": tag, "was_reset": True}}`, with times as `Store.stage_times` has them, and each key of "shared" only where
    it is known.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        # The base is a data class: the `__init__` that it was given calls no `__post_init__` of subclasses.
        super().__init__({} if data is None else data)
        for section in SECTIONS:
            self.data.setdefault(section, {})

    @classmethod
    def of(cls, counters: dict[str, int]) -> "KvasirStats":
        """Stats with these counters."""
        return cls({"counters": counters})

    def add_store(self, worker: str, values: dict[str, int], nodes: dict[str, dict[str, int]]) -> None:
        """Adds what a worker's store and its hand-offs count, and what the store knows of other nodes."""
        self.data["stores"][worker] = {name: values[name] for name in (*STORE, *HANDOFF) if name in values}
        self.data["nodes"][worker] = nodes

    def add_handoff_details(self, worker: str, rails: dict[str, dict[str, int]], stages: dict[str, dict[str, Any]]) -> None:
        """Adds what the transports of a worker's hand-offs count, and how long hand-offs took."""
        self.data["rails"][worker] = rails
        self.data["stages"][worker] = stages

    def set_shared(self, stores: list[str], tag: str) -> None:
        """Adds which stores the engine shares with others, and how the names of its first worker's blocks begin."""
        self.data["shared"] |= {"stores": ",".join(stores), "tag": tag}

    def unset_shared(self) -> None:
        """Since a reset the engine's events do not name the blocks that it finds in shared stores."""
        self.data["shared"] |= {"was_reset": True}

    def reset(self) -> None:
        self.data: dict[str, Any] = {section: {} for section in SECTIONS}

    def aggregate(self, other: KVConnectorStats) -> "KvasirStats":
        counters = self.data["counters"]
        for name, count in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + count
        for section in SECTIONS[1:]:
            self.data[section].update(other.data.get(section, {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        stores = self.data["stores"]
        named = {f"{name} ({worker})": value for worker, values in stores.items() for name, value in values.items()}
        return {**self.data["counters"], **named}

    def is_empty(self) -> bool:
        return not (self.data["counters"] or self.data["stores"] or self.data["shared"])


HANDOFF = {
    "blocks_received": "Blocks received and verified, since the start.",
    "bytes_sent": "Bytes of blocks written to other engines, since the start.",
    "transfers_completed": "Transfers received whole, since the start.",
    "transfers_incomplete": "Transfers that ended with blocks missing, since the start.",
    "transfers_cancelled": "Transfers that either side cancelled, since the start.",
    "leases_expired": "Outgoing transfers whose lease ended before a receiver reserved them, since the start.",
    "peers_lost": "Connections to other engines that ended, since the start.",
    "checksum_failures": "Pieces whose checksum did not match, since the start.",
    "slots_used": "Slots of the memory of hand-offs in use now.",
    "sent_directly": "Transfers whose blocks a network card read in a GPU's memory, since the start.",
    "sent_staged": "Transfers whose blocks went from a GPU's memory through the host's, since the start.",
    "received_directly": "Transfers whose blocks a network card wrote to a GPU's memory, since the start.",
    "slots": "Blocks for which hand-offs have slots.",
    "received_staged": "Transfers whose blocks came to a GPU's memory through the host's, since the start.",
}
NODE = {
    "usable": "1 while a node of remote_tier.nodes is asked; 0 until it has first answered, and while it cannot be reached, or failed and is left alone.",
    "latency_us": "Microseconds that a node takes to answer a look-up, smoothed.",
    "requests": "Requests sent to a node, since the start.",
    "timeouts": "Requests that a node did not answer in time, since the start.",
    "refused": "Requests that a node had no room for, since the start.",
    "failures": "Times that a node was left alone because it could not be reached or failed, since the start.",
    "read_blocks": "Blocks of a node that were read and verified, or are read in its memory, since the start.",
    "read_bytes": "Bytes of a node that were read and verified, since the start.",
    "damaged_blocks": "Blocks of a node that were read with a wrong checksum, since the start.",
    "stored_blocks": "Blocks that a node has taken, since the start.",
    "leases": "Leases held at a node now.",
}
RAIL = {
    "block_bytes": "Bytes of blocks that a transport was given to write or read, since the start.",
    "slices_retried": "Slices posted again because their connection had failed, since the start.",
    "links_failed": "Connections that ended while their peer went on over others, since the start.",
    "nanoseconds_per_kib": "Time that a KiB takes on a transport, queue included, where peers have several.",
    "slow": "1 while a transport takes 3 times as long for a KiB as the best one of equal preference.",
}


STAGE = {
    "sum": "Seconds that a stage of hand-offs took together, since the start.",
    "count": "How many times there was a stage of hand-offs, since the start.",
}
STAGE_BUCKET = {"bucket": "How many times a stage of hand-offs took at most `le` seconds, since the start."}


class KvasirMetrics(KVConnectorPromMetrics):
    """`vllm:kvasir_<counter>_total`; `vllm:kvasir_store_<value>` and `vllm:kvasir_handoff_<value>` for each worker,
    `vllm:kvasir_node_<value>` for each node that a worker shares blocks with, `vllm:kvasir_rail_<value>` for each transport of its hand-offs, and `vllm:kvasir_handoff_stage_seconds`, whose buckets, sum and count
    are gauges: the library has counted them already.

    `vllm:kvasir_data_plane` tells gateways by its labels where the first process of each data-parallel rank listens;
    `vllm:kvasir_shared_stores` which stores it shares with other engines, and how the names of its blocks there begin; it is 0 since
    a reset of the cache.
    """

    def __init__(self, vllm_config: Any, *arguments: Any) -> None:
        super().__init__(vllm_config, *arguments)
        self._tell_data_plane(vllm_config)
        self._told_shared: dict[int, dict[str, Any]] = {}
        self._shared = self._gauge_cls(
            name="vllm:kvasir_shared_stores",
            documentation="Stores that an engine shares with others: in the labels.",
            labelnames=[*self._labelnames, "stores", "tag"],
            multiprocess_mode="mostrecent",
        )
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvasir_{name}", documentation=text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        }
        self._values = self._gauges("store", STORE, "worker") | self._gauges("handoff", HANDOFF, "worker")
        self._nodes = self._gauges("node", NODE, "worker", "node")
        self._rails = self._gauges("rail", RAIL, "worker", "rail")
        self._stages = self._gauges("handoff_stage_seconds", STAGE, "worker", "stage")
        self._stages |= self._gauges("handoff_stage_seconds", STAGE_BUCKET, "worker", "stage", "le")

    def _gauges(self, family: str, texts: dict[str, str], *labels: str) -> dict[str, Any]:
        """A gauge for each text, by its name in the family."""
        return {
            name: self._gauge_cls(
                name=f"vllm:kvasir_{family}_{name}",
                documentation=text,
                labelnames=[*self._labelnames, *labels],
                multiprocess_mode="mostrecent",
            )
            for name, text in texts.items()
        }

    def _tell_data_plane(self, vllm_config: Any) -> None:
        settings = Settings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        if settings.transfer is None or not handoff.is_reachable(settings.transfer):
            return
        gauge = self._gauge_cls(
            name="vllm:kvasir_data_plane",
            documentation="Where an engine listens for hand-offs of blocks: in the labels.",
            labelnames=[*self._labelnames, "host", "cuda_ipc", "shm", "tcp", "rdma", "processes"],
            multiprocess_mode="mostrecent",
        )
        processes = vllm_config.parallel_config.world_size
        first = handoff.place(settings.transfer, settings.rdma, processes, direct=settings.direct)
        for engine, labels in self.per_engine_labelvalues.items():
            place = first.of_process(engine * processes)
            local = [place.host, place.cuda_ipc or "", place.shm or ""]
            gauge.labels(*labels, *local, place.tcp or "", ",".join(place.rdma), str(processes)).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data["counters"].items():
            self._counters[name].labels(*labels).inc(count)
        shared = self._told_shared.setdefault(engine_idx, {})
        shared |= transfer_stats_data.get("shared", {})
        if "tag" in shared:
            self._shared.labels(*labels, shared["stores"], shared["tag"]).set(0 if "was_reset" in shared else 1)
        for worker, values in transfer_stats_data["stores"].items():
            for name, value in values.items():
                self._values[name].labels(*labels, worker).set(value)
        for worker, nodes in transfer_stats_data.get("nodes", {}).items():
            for node, values in nodes.items():
                for name, value in values.items():
                    self._nodes[name].labels(*labels, worker, node).set(value)
        for worker, rails in transfer_stats_data.get("rails", {}).items():
            for rail, values in rails.items():
                for name, value in values.items():
                    self._rails[name].labels(*labels, worker, rail).set(value)
        for worker, stages in transfer_stats_data.get("stages", {}).items():
            for stage, times in stages.items():
                for bound, count in zip([*STAGE_BOUNDS, float("inf")], [*times["at_most"], times["count"]]):
                    le = "+Inf" if bound == float("inf") else f"{bound:g}"
                    self._stages["bucket"].labels(*labels, worker, stage, le).set(count)
                self._stages["sum"].labels(*labels, worker, stage).set(times["seconds"])
                self._stages["count"].labels(*labels, worker, stage).set(times["count"])
