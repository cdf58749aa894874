"""Kvasir's connector for vLLM, written for 0.32: it keeps the KV blocks of an engine in Kvasir's tiers, shares them with other
engines, and hands those of a prompt from the engine that computes it to the one that generates from it.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{"kv_connector": "KvasirConnector",
        "kv_connector_module_path": "kvasir_kv.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": {"host_tier": {"capacity": "64 GiB"}}}}'

With a section `transfer` in `store` the engine takes part in hand-offs (see `handoff`): a prompt's blocks leave layer by
layer while the next layer is computed, and the other engine loads them between its steps.

vLLM makes one connector for its scheduler and one for each worker. With one GPU both live in one process and talk
directly; on a CPU, and with several GPUs, workers are processes of their own and all that the sides tell each other
goes with the steps.

Layers may be in several groups (hybrid models): full attention, sliding windows and chunks of attention are kept each under names of
their own. What this cannot keep right is refused at the start: recurrent states (Mamba), context parallel engines, pipeline stages with
several groups, windows or hand-offs, hashes that are not collision resistant, sleep mode, and scales of a quantised cache that are
computed as requests come.

Tested on a CPU. The path for CUDA differs only in what `vllm_engine.memory_of` gives, an event for each step and for each
layer that is handed over among it, and in the library's copies; it has not been run with vLLM on a GPU.
"""

import functools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from . import handoff, identity
from .library import Library, Memory, Store, Tier
from .messages import Report, Step, TierChange
from .planes import Layout, layout
from .scheduler import Look, Scheduler
from .settings import Settings
from .vllm_engine import (
    adapter_salt,
    group_facts,
    handoff_facts,
    has_stable_hashes,
    memory_of,
    refuse,
    refuse_group_handoff,
    refuse_handoff,
    windows,
    worker_facts,
    worker_name,
)
from .vllm_metrics import KvasirMetrics, KvasirStats
from .worker import HandOff, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvasir_kv")

_STATISTICS_SECONDS = 1.0
_WORKERS: dict[str, Worker] = {}
"""The workers of this process, by their engine."""


def _event(change: TierChange, block_tokens: int) -> "KVCacheEvent":
    """Blocks without tokens carry only their hashes; a listener that does not know a hash ignores it."""
    medium = MEDIUM_CPU if change.tier == Tier.HOST else MEDIUM_STORAGE
    hashes: list[Any] = list(change.hashes)
    if not change.is_stored:
        return BlockRemoved(block_hashes=hashes, medium=medium)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if change.parent is None else identity.engine_hash(change.parent),
        token_ids=change.tokens,
        block_size=block_tokens if change.tokens else 0,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


@dataclass
class KvasirMetadata(KVConnectorMetadata):
    """From the scheduler to the workers."""

    step: Step = field(default_factory=Step)


@dataclass
class KvasirWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvasirWorkerMetadata":
        assert isinstance(other, KvasirWorkerMetadata)
        self.report.add(other.report)
        return self


class KvasirConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's documentation."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        refuse(vllm_config, kv_cache_config)
        refuse_group_handoff(kv_cache_config, self._settings)
        refuse_handoff(vllm_config, self._settings)
        transfer = self._settings.transfer
        exposed = handoff.exposure(transfer, self._settings.rdma) if transfer is not None else None
        if exposed and role == KVConnectorRole.SCHEDULER:
            logger.warning("KvasirConnector: %s", exposed)
        self._engine = str(self._kv_transfer_config.engine_id)
        self._worker: Worker | None = None
        self._statistics_at = 0.0
        self._scheduler: Scheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not saved is a miss later and no loss."""
        return False

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduling.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        scheduled = scheduler_output.num_scheduled_tokens
        return KvasirMetadata(self._scheduling.next_step(scheduled, state.resolve_block_ids))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvasirWorkerMetadata):
            self._scheduling.take_report(told.report)

    def take_events(self) -> Iterable["KVCacheEvent"]:
        scheduling = self._scheduling
        return [_event(change, scheduling.block_tokens) for change in scheduling.take_tiers()]

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self._scheduling.is_waiting()

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.is_about_to_free()

    def reset_cache(self) -> bool | None:
        return self._scheduling.reset()

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.shutdown()
        blocks = self._kv_cache_config.num_blocks
        found = layout(kv_caches, blocks)
        memory, device, record = memory_of(kv_caches)
        name = worker_name(self._vllm_config)
        number, pieces = self._process_number, self._pieces(found)
        ordinal, tells_tiers = device if memory is Memory.CUDA else None, self._tells_tiers
        text = self._settings.toml(found.block_bytes, name, ordinal, number, pieces, tells_tiers)
        store = Store.open(Library(self._settings.library), text)
        handing_over = None
        try:
            tensors = store.register(found.planes, blocks, memory, device)
            if self._settings.transfer is not None:
                planes = [plane for layer in found.layers.values() for plane in layer]
                cut = store.register(planes, blocks, memory, device)
                host = handoff.host(str(self._settings.transfer.get("socket_folder", "")))
                parallel, deadline = self._vllm_config.parallel_config, self._settings.handoff_deadline
                shares = self._shares(found)
                handing_over = HandOff(cut, list(found.layers), host, deadline, shares, int(parallel.rank))
                slots = store.handoff_statistics()["slots"]
                logger.info("Kvasir hands over up to %d blocks at a time at %s", slots, ", ".join(store.handoff_address()))
        except BaseException:
            store.close()
            raise
        settings, replicas = self._settings, int(self._kv_cache_config.kv_tp_replicas)
        layout_facts = (*found.facts, *group_facts(self._kv_cache_config))
        facts = worker_facts(
            self._vllm_config, layout_facts, kv_caches, settings.namespace, settings.is_fetching, replicas
        )
        key = identity.key(facts)
        groups = len(self._kv_cache_config.kv_cache_groups)
        self._worker = Worker(store, tensors, key, found.block_bytes, record, handing_over, tells_tiers, groups)
        _WORKERS[self._engine] = self._worker
        logger.info(
            "Kvasir keeps blocks of %d bytes in %d pieces (worker %s); the store has %s",
            found.block_bytes,
            len(found.planes),
            name,
            store.statistics(),
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Loads may begin behind the step (`start_load_kv`); its layers are pushed within it.
        self._working.begin(self._told)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.load(self._told)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved after the last layer, and handed over layer by layer."""
        self._working.computed(layer_name)

    def wait_for_save(self) -> None:
        self._working.save(self._told)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._working.poll()
        return KVConnectorTransferResults(
            finished_recving=self._working.take_arrived(), failed_recving=self._working.take_failed()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_missing()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._working.take_report()
        return None if report.is_empty() else KvasirWorkerMetadata(report)

    # Either side.

    def get_kv_connector_stats(self) -> KvasirStats | None:
        if self._scheduler is not None:
            # The engine asks for these whenever the result of a step has come.
            self._scheduler.step_finished()
            stats = KvasirStats.of(self._scheduler.take_counters())
            if self._scheduler.was_reset:
                stats.unset_shared()
        else:
            stats = KvasirStats.of(self._working.take_counters())
            if time.monotonic() - self._statistics_at >= _STATISTICS_SECONDS:
                self._statistics_at = time.monotonic()
                name = worker_name(self._vllm_config)
                working = self._working
                stats.add_store(name, working.statistics(), working.node_statistics())
                stats.add_handoff_details(name, working.rail_statistics(), working.stage_times())
                # A gateway can resolve only the names of rank 0, whose tiers' events it gets.
                if self._tells_tiers and has_stable_hashes() and (stores := self._settings.shared_stores):
                    stats.set_shared(stores, working.tag)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvasirStats:
        return KvasirStats(data=data) if data is not None else KvasirStats()

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KvasirMetrics:
        return KvasirMetrics(*arguments)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _WORKERS.pop(self._engine, None)
            worker.close()

    @property
    def _scheduling(self) -> Scheduler:
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    @property
    def _working(self) -> Worker:
        assert self._worker is not None, "called on the scheduler's connector, or before register_kv_caches"
        return self._worker

    @property
    def _told(self) -> Step:
        told = self._get_connector_metadata()
        assert isinstance(told, KvasirMetadata)
        return told.step

    @functools.cached_property
    def _tells_tiers(self) -> bool:
        """Whether this worker tells what its store's tiers gain and lose: the first, when anybody listens to the engine's events."""
        events, is_first = self._vllm_config.kv_events_config, int(self._vllm_config.parallel_config.rank) == 0
        is_heard = events is not None and bool(events.enable_kv_cache_events)
        is_wanted = self._settings.offload and is_first and is_heard
        if is_wanted and not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
            logger.warning("KvasirConnector: KV events of the store's tiers need VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1")
            return False
        return is_wanted

    @property
    def _process_number(self) -> int:
        """This worker's number among all of the engine's, over all data-parallel ranks."""
        parallel = self._vllm_config.parallel_config
        return int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)

    def _shares(self, found: Layout) -> handoff.HeadPartition:
        """How this engine's processes share out the heads of each block."""
        parallel = self._vllm_config.parallel_config
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        shares = handoff.HeadPartition(int(heads), int(parallel.world_size))
        own = {cut.heads for cut in found.head_layouts.values()}
        if own == {len(shares.of(int(parallel.rank)))}:
            return shares
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if int(parallel.world_size) > 1 and not isinstance(spec, MLAAttentionSpec):
            raise ValueError(
                f"KvasirConnector: KV caches with {sorted(own)} heads in a process, of {heads} over {parallel.world_size} "
                "processes, cannot be handed over"
            )
        # Each process has the latents whole.
        return handoff.HeadPartition(1, int(parallel.world_size))

    def _pieces(self, found: Layout) -> dict[str, Any]:
        if self._settings.transfer is None:
            return {}
        head_layouts = set(found.head_layouts.values())
        if len(head_layouts) > 1:
            raise ValueError(f"KvasirConnector: layers that are cut in {len(head_layouts)} ways cannot be handed over: {head_layouts}")
        (cut,) = head_layouts
        shares = self._shares(found)
        own = shares.of(int(self._vllm_config.parallel_config.rank))
        layer_bytes = cut.rows * cut.heads * cut.head_bytes
        if len(own) == cut.heads:
            rows, head_bytes = cut.rows, cut.head_bytes
        else:
            rows, head_bytes = 1, layer_bytes
        dtypes = sorted({str(fact[1]) for fact in found.facts if isinstance(fact, tuple)})
        same = [list(found.layers), dtypes, rows, head_bytes, cut.axes, shares.heads]
        facts = handoff_facts(self._vllm_config, same, list(found.layers), self._settings.namespace)
        pieces = {"layers": len(found.layers), "rows": rows, "first_head": own.start, "heads": len(own)}
        return pieces | {"head_bytes": f"{head_bytes} B", "fingerprint": handoff.fingerprint(facts)}

    def _make_scheduler(self) -> Scheduler:
        block_tokens, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(
            self._kv_cache_config, self._vllm_config
        )
        workers = self._vllm_config.parallel_config.world_size

        def nearby() -> Look | None:
            worker = _WORKERS.get(self._engine) if workers == 1 else None
            return worker.look if worker is not None else None

        return Scheduler(
            block_tokens=block_tokens,
            hash_tokens=hash_tokens,
            workers=workers,
            saving_blocks_max=self._settings.saving_blocks_max or max(self._kv_cache_config.num_blocks // 4, 1),
            load_blocks_min=self._settings.load_blocks_min,
            nearby=nearby,
            adapter_salt=adapter_salt(os.urandom(32)),
            is_offloading=self._settings.offload,
            is_handing_over=self._settings.transfer is not None,
            is_fetching=self._settings.is_fetching,
            is_prefetching=self._settings.offload and self._settings.is_prefetching,
            windows=windows(self._kv_cache_config),
        )
