"""Kvasir's store as the storage (L3) of SGLang's hierarchical cache, written for 0.5.23: pages that leave the engine's host memory stay
in Kvasir's tiers, survive restarts, and are shared with other engines.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvasir", "module_path": "kvasir_kv.sglang",
        "class_name": "KvasirHiCache", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "store": {"host_tier": {"capacity": "16 GiB"}, "disk_tier": {"capacity": "1 TiB", "path": "/var/lib/kvasir"}}}'

SGLang makes one of these in each of its scheduler processes, calls it from a few threads of its own, and waits for what it asks. A page of
a pool is one block of the store, copied between the pool's memory and the store's by the library. SGLang's keys are a chain over
the tokens alone: all else that decides a page's bytes (weights, layout, rank) is added here to a block's name.

With several pools (sliding window, Mamba, an indexer) each pool's pages are blocks of their own, told apart by the pool's name.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from . import identity
from .library import IDENTITY_BYTES, Completion, Library, Memory, Operation, Plane, Status, Store, StoreError
from .settings import Settings, SettingsError

_log = logging.getLogger("sglang.kvasir_kv")

_OWN_KEYS = ("library", "store", "store_file", "namespace")
_SGLANG_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")

_DEADLINE = 2.0
"""Seconds for which a load waits for the disk, or a fetch for other nodes. SGLang gives its threads, which make several such calls in a row,
10 seconds to end. Saves, and waits for a full queue or for another transfer of the same page, have no bound."""

_WHOLE_PAGES = 'KvasirHiCache moves whole pages: set "interface_v1": 1'

_NO_CHAIN = HiCacheStorageExtraInfo()
"""For pages that stand for themselves."""

_epoch = b""
"""Of this process: names from before weights were changed, or the storage was cleared, are not used any more."""


@dataclass(frozen=True)
class _Pool:
    """A pool, and its number in the library. One without memory of its own has a page wherever the pools beside it have one."""

    name: str
    key: bytes
    page_size: int
    block_bytes: int
    planes: Sequence[Plane]
    pages: int
    tensors: int = 0

    @property
    def has_memory(self) -> bool:
        assert self.tensors or not self.planes, f"{self.name} is not registered"
        return bool(self.planes)

    def blocks(self, host_indices: torch.Tensor) -> list[int]:
        """Numbers of the pages that the indices of their tokens lie in."""
        numbers: list[int] = (host_indices[:: self.page_size] // self.page_size).tolist()
        return numbers


class KvasirHiCache(HiCacheStorage):
    """A storage backend of SGLang's, in one scheduler process."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        given = dict(storage_config.extra_config or {})
        if unknown := sorted(set(given) - {*_OWN_KEYS, *_SGLANG_KEYS}):
            raise SettingsError(f"hicache-storage-backend-extra-config has no {', '.join(unknown)}; Kvasir has {', '.join(_OWN_KEYS)}")
        if not given.get("interface_v1"):
            raise SettingsError('hicache-storage-backend-extra-config needs "interface_v1": 1')
        self._settings = Settings.parse({name: value for name, value in given.items() if name in _OWN_KEYS})
        if _is_adapted():
            raise SettingsError("KvasirHiCache: SGLang's keys do not tell the weights of LoRA adapters")
        if extra := {"transfer", "device"} & self._settings.store.keys():
            raise SettingsError(f"KvasirHiCache: store has a section {sorted(extra)[0]}, and pages are copied in host memory only")
        if storage_config.is_mla_model and storage_config.tp_size > 1 and not self._settings.is_fetching:
            raise SettingsError(
                "KvasirHiCache: of an MLA model only one rank writes, and each has a store of its own: name pools in "
                "store.remote_tier.nodes, or store.object_tier.url"
            )
        self._config = storage_config
        self._worker = (
            f"sglang-replica-{storage_config.dp_rank}-tp-{storage_config.tp_rank}-pp-{storage_config.pp_rank}"
            f"-cp-{storage_config.attn_cp_rank}"
        )
        self._facts = _engine_facts(self._settings)
        self._pools: dict[str, _Pool] = {}
        self._store: Store | None = None
        self._weight_version = _weight_version()
        self._lock = threading.Condition()
        self._moving: set[bytes] = set()
        """Names of blocks that are being moved."""
        self._waiting: dict[int, Future[Completion]] = {}
        self._numbers = 0
        self._stats: Any = None
        self._has_warned = False
        self._end: Exception | None = None
        """Why nothing completes any more."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[PoolName.KV] = self._describe(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name in self._pools:
            # The anchor comes this way, too.
            return
        pool = self._describe(host_pool_name, host_pool)
        self._pools[host_pool_name] = pool if self._store is None else self._registered(pool)

    def on_host_pools_registered(self) -> None:
        largest = max(pool.block_bytes for pool in self._pools.values())
        if largest == 0:
            raise ValueError("KvasirHiCache: no pool has memory of its own")
        config, others = self._config, [str(name) for name in self._pools if name != PoolName.KV]
        if config.is_mla_model and config.tp_size > 1 and others:
            # Of these, too, only one rank writes, and other ranks' stores do not fetch them.
            raise ValueError(f"KvasirHiCache: pools {others} of an MLA model with {config.tp_size} ranks are not supported")
        text = self._settings.toml(largest, self._worker, process=_process_number(config))
        self._store = Store.open(Library(self._settings.library), text)
        try:
            self._pools = {name: self._registered(pool) for name, pool in self._pools.items()}
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._dispatch, args=(self._store,), name="kvasir-hicache", daemon=True).start()
        sizes = ", ".join(f"{name} {pool.block_bytes}" for name, pool in self._pools.items())
        _log.info("Kvasir keeps pages of (bytes) %s; the store has %s", sizes, self._store.statistics())

    def _describe(self, name: str, pool: Any) -> _Pool:
        """Where the pages of a pool lie: each buffer of a page is a plane, with the same distance from page to page."""
        config, page_size, pages = self._config, int(pool.page_size), int(pool.size) // int(pool.page_size)
        planes = _planes(name, pool, page_size, pages) if pool.size_per_token else []
        ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size]
        if not (config.is_mla_model and name == PoolName.KV):
            ranks += [config.tp_rank, config.tp_size]
        facts = self._facts | {
            "pool": str(name),
            "layout": [str(pool.layout), str(pool.dtype), page_size, [plane.block_bytes for plane in planes]],
            "layers": [int(getattr(pool, what, -1)) for what in ("layer_num", "start_layer", "end_layer")],
            "ranks": ranks,
            "model": [config.is_mla_model, config.tp_lcm_size, config.should_split_heads],
        }
        return _Pool(str(name), identity.key(facts), page_size, sum(plane.block_bytes for plane in planes), planes, pages)

    def _registered(self, pool: _Pool) -> _Pool:
        return replace(pool, tensors=self._opened.register(pool.planes, pool.pages, Memory.HOST)) if pool.planes else pool

    @property
    def _opened(self) -> Store:
        store = self._store
        if store is None:
            raise StoreError("find", Status.INVALID_HANDLE, "the store is closed, or no pools were registered")
        return store

    # The interface of pages of one pool.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._found(self._kv, keys, extra_info, may_fetch=True)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._load(self._kv, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._save(self._kv, keys, host_indices, extra_info)

    # The same of several pools.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Of each prefix of the keys: are there all pages that it needs, of every pool?"""
        found = self._found(self._kv, keys, extra_info, may_fetch=True)
        restorable = list(range(1, found + 1))
        hits = {PoolName.KV: found} if found else {}
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                raise ValueError(f"KvasirHiCache: groups of blocks ({transfer.name}) are not supported")
            pool = self._pools[transfer.name]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = len(keys)
                self._found(pool, keys[:found], extra_info, may_fetch=True)
            else:
                window = max(len(transfer.keys or ()), 1)
                self._fetch_each(pool, keys[max(found - window, 0) : found])
            is_there = self._are_there(pool, keys[:found])
            good, run = set[int](), 0
            for length, is_here in enumerate(is_there, 1):
                run = run + 1 if is_here else 0
                if run >= min(window, length):
                    good.add(length)
            if good:
                hits[transfer.name] = max(good)
            restorable = [length for length in restorable if length in good]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for one in transfers:
            pool, keys = self._pools[one.name], one.keys or []
            indices = self._indices(pool, one)
            results[one.name] = [False] * len(keys) if indices is None else self._load(pool, keys, indices)
        return results

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for one in transfers:
            pool, keys = self._pools[one.name], one.keys or []
            indices = self._indices(pool, one)
            # Of other pools only some pages are there: these are no chain.
            chain = extra_info if one.hit_policy == PoolHitPolicy.ALL_PAGES else _NO_CHAIN
            results[one.name] = [False] * len(keys) if indices is None else self._save(pool, keys, indices, chain)
        return results

    @staticmethod
    def _indices(pool: _Pool, transfer: PoolTransfer) -> torch.Tensor | None:
        """None: they are not those of as many pages."""
        indices, wanted = transfer.host_indices, len(transfer.keys or ()) * pool.page_size
        if wanted and (indices is None or indices.numel() != wanted):
            _log.error("%s: %d indices for %d tokens", pool.name, 0 if indices is None else indices.numel(), wanted)
            return None
        return torch.empty(0, dtype=torch.int64) if indices is None else indices

    # Single pages with copies of their own: `interface_v1` says that they are not used.

    def exists(self, key: str) -> bool:
        return self._found(self._kv, [key], None, may_fetch=False) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        raise NotImplementedError(_WHOLE_PAGES)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        raise NotImplementedError(_WHOLE_PAGES)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError(_WHOLE_PAGES)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(_WHOLE_PAGES)

    def clear(self) -> None:
        """Makes all that was stored unreachable for this process. One that starts later loads the weights of its files, and finds
        the pages that were made with those. Until it is started again, this server shares no pages with others."""
        _begin_epoch()

    def get_stats(self) -> Any:
        with self._lock:
            stats, self._stats = self._stats, None
        return stats

    def close(self) -> None:
        """Waits for transfers that have begun and for the disk. SGLang frees the pools' memory afterwards."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    @property
    def _kv(self) -> _Pool:
        return self._pools[PoolName.KV]

    def _names(self, pool: _Pool, keys: Sequence[str]) -> bytes:
        version = _weight_version()
        if version != self._weight_version:
            # SGLang empties its own tiers when weights are changed, and not this one.
            self._weight_version = version
            _begin_epoch()
        return identity.identities(pool.key, identity.salted(_epoch, [_hash(key) for key in keys]))

    def _are_there(self, pool: _Pool, keys: Sequence[str]) -> list[bool]:
        if not pool.has_memory:
            return [True] * len(keys)
        names = self._names(pool, keys)
        return [self._opened.match(name) == 1 for name in _each(names)]

    def _found(self, pool: _Pool, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None, may_fetch: bool) -> int:
        """How many pages of the pool are here, from the first on. `may_fetch`: other nodes are asked for what is not."""
        if not pool.has_memory:
            return len(keys)
        names = self._names(pool, keys)
        found = self._opened.match(names)
        if found == len(keys) or not (may_fetch and self._settings.is_fetching):
            return found
        prefix = (extra_info.prefix_keys if extra_info is not None else None) or []
        chain, held = self._names(pool, prefix) + names, len(prefix)
        completion = self._finish(lambda number: self._opened.fetch(number, chain, held, _DEADLINE))
        return max(completion.blocks - held, found)

    def _fetch_each(self, pool: _Pool, keys: Sequence[str]) -> None:
        """Asks other nodes for pages that are no chain, and are not here."""
        if not pool.has_memory or not self._settings.is_fetching:
            return
        lacking = [name for name in _each(self._names(pool, keys)) if self._opened.match(name) == 0]
        fetches = [self._begin(lambda number, name=name: self._opened.fetch(number, name, 0, _DEADLINE)) for name in lacking]
        for fetch in fetches:
            self._end_of(fetch)

    def _load(self, pool: _Pool, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        loaded = self._move(Operation.LOAD, pool, keys, host_indices, None)
        return [at < loaded for at in range(len(keys))]

    def _save(
        self, pool: _Pool, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        prefix = extra_info.prefix_keys if extra_info is not None else None
        chain = None
        if extra_info is _NO_CHAIN:
            pass
        elif prefix is not None:
            chain = (len(prefix), self._names(pool, prefix[-1:]) or None)
        elif not self._has_warned:
            self._has_warned = True
            lost = ", and other nodes do not find them" if self._settings.is_fetching else ""
            _log.warning('Without "hicache_storage_pass_prefix_keys": true pages are evicted one by one%s', lost)
        saved = self._move(Operation.SAVE, pool, keys, host_indices, chain)
        return [True] * len(keys) if saved == len(keys) else self._are_there(pool, keys)

    def _move(
        self,
        operation: Operation,
        pool: _Pool,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        chain: tuple[int, bytes | None] | None,
    ) -> int:
        """How many pages were loaded from the first on, or are in the store now."""
        if not pool.has_memory or not keys:
            return len(keys)
        names, blocks, started = self._names(pool, keys), pool.blocks(host_indices), time.monotonic()
        deadline = _DEADLINE if operation == Operation.LOAD else 0.0
        with self._alone(names):
            completion = self._finish(
                lambda number: self._opened.submit(number, operation, pool.tensors, names, blocks, 0, chain, deadline)
            )
        self._count(operation, completion.blocks, completion.blocks * pool.block_bytes, time.monotonic() - started)
        return completion.blocks

    @contextmanager
    def _alone(self, names: bytes) -> Iterator[None]:
        """Keeps others from moving these blocks: the library moves a block for one transfer at a time."""
        own = set(_each(names))
        with self._lock:
            self._lock.wait_for(lambda: not own & self._moving)
            self._moving |= own
        try:
            yield
        finally:
            with self._lock:
                self._moving -= own
                self._lock.notify_all()

    def _finish(self, submit: Any) -> Completion:
        """Submits a transfer and waits for its end, however long that takes: the library works on the pages until then."""
        return self._end_of(self._begin(submit))

    def _begin(self, submit: Any) -> "Future[Completion]":
        future: Future[Completion] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = future
        try:
            while not submit(number):
                time.sleep(0.001)
        except BaseException:
            with self._lock:
                self._waiting.pop(number, None)
            raise
        return future

    @staticmethod
    def _end_of(future: "Future[Completion]") -> Completion:
        completion = future.result()
        if completion.failure:
            raise StoreError("transfer", completion.status, completion.failure)
        return completion

    def _dispatch(self, store: Store) -> None:
        """Tells who waits. Ends when the store is closed, which waits for all transfers that have begun."""
        end: Exception = StoreError("poll", Status.INVALID_HANDLE, "the store is closed")
        try:
            while True:
                for completion in store.poll(timeout_ms=-1):
                    with self._lock:
                        future = self._waiting.pop(completion.user, None)
                    if future is not None:
                        future.set_result(completion)
        except Exception as problem:
            end = problem
        finally:
            with self._lock:
                self._end = end
                left, self._waiting = self._waiting, {}
            for future in left.values():
                future.set_exception(end)

    def _count(self, operation: Operation, pages: int, size: int, seconds: float) -> None:
        if not self._config.enable_storage_metrics or not pages:
            return
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            self._stats = self._stats or StorageMetrics()
            is_load = operation == Operation.LOAD
            (self._stats.prefetch_pgs if is_load else self._stats.backup_pgs).append(pages)
            rates = self._stats.prefetch_bandwidth if is_load else self._stats.backup_bandwidth
            rates.append(size / max(seconds, 1e-9) / 1e9)


def _planes(name: str, pool: Any, page_size: int, pages: int) -> list[Plane]:
    """The buffers of a page, from what the pool says of its first, second and last one."""

    def buffers(page: int) -> list[tuple[int, int]]:
        indices = torch.arange(page * page_size, (page + 1) * page_size)
        starts, sizes = pool.get_page_buffer_meta(indices)
        return [(int(start), int(size)) for start, size in zip(starts, sizes, strict=True)]

    try:
        first, second, last = (buffers(page) for page in (0, min(1, pages - 1), pages - 1))
    except (NotImplementedError, AttributeError) as problem:
        raise ValueError(f"KvasirHiCache: the pool {name} ({pool.layout}) does not tell where its pages lie: {problem}") from problem
    planes = [Plane(start, max(after - start, size), size) for (start, size), (after, _) in zip(first, second, strict=True)]
    expected = [(plane.start + (pages - 1) * plane.block_stride, plane.block_bytes) for plane in planes]
    if not planes or last != expected:
        raise ValueError(f"KvasirHiCache: pages of the pool {name} ({pool.layout}) do not lie one after the other")
    return planes


def _begin_epoch() -> None:
    global _epoch
    _epoch = os.urandom(16)


def _process_number(config: Any) -> int:
    """Numbers the processes of all replicas, so that each takes a device of its own."""
    ranks = config.dp_rank * getattr(config, "pp_size", 1) + config.pp_rank
    ranks = ranks * getattr(config, "attn_cp_size", 1) + config.attn_cp_rank
    return ranks * config.tp_size + config.tp_rank


def _weight_version() -> object:
    """SGLang's word for the weights that a server has now."""
    from sglang.srt.runtime_context import get_serving

    return getattr(get_serving(), "weight_version", None)


def _is_adapted() -> bool:
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    return bool(getattr(arguments, "enable_lora", False) or getattr(arguments, "lora_paths", None))


def _engine_facts(settings: Settings) -> dict[str, object]:
    """What decides a page's bytes, beside tokens and the pool: model, weights, and how they are computed with."""
    from sglang.srt.runtime_context import get_server_args
    from sglang.version import __version__

    arguments = get_server_args()
    names = (
        "load_format quantization dtype kv_cache_dtype json_model_override_args attention_backend model_impl model_loader_extra_config "
        "modelopt_quant quantize_and_serve modelopt_checkpoint_restore_path rl_quant_profile speculative_algorithm "
        "speculative_draft_model_quantization"
    ).split()
    said = {name: str(getattr(arguments, name, None)) for name in names}
    if said["load_format"] == "dummy":
        said["random_seed"] = str(arguments.random_seed)
    scales, draft = getattr(arguments, "quantization_param_path", None), getattr(arguments, "speculative_draft_model_path", None)
    if scales is not None:
        said["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    places = [(str(arguments.model_path), getattr(arguments, "revision", None))]
    if draft is not None:
        places.append((str(draft), getattr(arguments, "speculative_draft_model_revision", None)))
    folder = getattr(arguments, "download_dir", None)
    weights = [_weights(place, revision, folder, settings) for place, revision in places]
    # Machines may have the same weights in other places.
    named = [] if settings.is_fetching else places
    return {"sglang": __version__, "namespace": settings.namespace, "arguments": said, "places": named, "weights": weights}


def _weights(place: str, revision: str | None, folder: str | None, settings: Settings) -> object:
    """What tells the weights at a place from others. A namespace vouches for those that nobody can look at."""
    commit = None if os.path.exists(place) else identity.hub_commit(place, revision, folder)
    if settings.is_fetching:
        found = identity.portable(place, commit)
        if found is None and not settings.namespace:
            raise SettingsError(f"KvasirHiCache: nobody can tell which weights {place} has: give it a namespace of its own")
        return found or place
    is_known = commit or identity.weights(place)
    return place if settings.namespace and not is_known else identity.source(place, commit)


def _hash(key: str) -> bytes:
    """SGLang's keys are hexadecimal; any other text has a hash, too."""
    try:
        name = bytes.fromhex(key)
    except ValueError:
        name = b""
    return name if len(name) == 32 else hashlib.sha256(key.encode()).digest()


def _each(names: bytes) -> Iterator[bytes]:
    return (names[at : at + IDENTITY_BYTES] for at in range(0, len(names), IDENTITY_BYTES))

