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
from .library import IDENTITY_BYTES, Completion, Library, Memory, Operation, Plane, Store, StoreError
from .settings import Settings, SettingsError

_log = logging.getLogger("sglang.kvasir_kv")

_OWN_KEYS = ("library", "store", "store_file", "namespace")
_SGLANG_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")

_PATIENCE = 5.0
"""Seconds for a call: SGLang gives its threads 10 when it ends."""

_NO_CHAIN = HiCacheStorageExtraInfo()
"""For pages that stand for themselves."""

_REPLICATED = (PoolName.KV, PoolName.INDEXER)
"""Pools of which all ranks of an MLA model hold the same bytes."""


@dataclass(frozen=True)
class _Pool:
    """A registered pool. One without memory of its own (`tensors` 0) has a page wherever the pools beside it have one."""

    name: str
    key: bytes
    page_size: int
    block_bytes: int
    planes: Sequence[Plane]
    pages: int
    tensors: int = 0

    def blocks(self, host_indices: torch.Tensor) -> list[int]:
        """Numbers of the pages that the indices of their tokens lie in."""
        numbers: list[int] = (host_indices[:: self.page_size] // self.page_size).tolist()
        return numbers


class KvasirHiCache(HiCacheStorage):
    """See the module's documentation."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        given = dict(storage_config.extra_config or {})
        if unknown := sorted(set(given) - {*_OWN_KEYS, *_SGLANG_KEYS}):
            raise SettingsError(f"hicache-storage-backend-extra-config has no {', '.join(unknown)}; Kvasir has {', '.join(_OWN_KEYS)}")
        if not given.get("interface_v1"):
            raise SettingsError('hicache-storage-backend-extra-config needs "interface_v1": 1')
        self._settings = Settings.parse({name: value for name, value in given.items() if name in _OWN_KEYS})
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
        self._epoch = b""
        self._lock = threading.Condition()
        self._moving: set[bytes] = set()
        """Names of blocks that are being moved."""
        self._waiting: dict[int, Future[Completion]] = {}
        self._numbers = 0
        self._stats: Any = None
        self._is_told = False

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[PoolName.KV] = self._describe(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name in self._pools:
            # The anchor comes this way, too.
            return
        self._pools[host_pool_name] = self._describe(host_pool_name, host_pool)
        if self._store is not None:
            self._register(host_pool_name)

    def on_host_pools_registered(self) -> None:
        largest = max(pool.block_bytes for pool in self._pools.values())
        if largest == 0:
            raise ValueError("KvasirHiCache: no pool has memory of its own")
        text = self._settings.toml(largest, self._worker)
        self._store = Store.open(Library(self._settings.library), text)
        try:
            for name in list(self._pools):
                self._register(name)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._dispatch, args=(self._store,), name="kvasir-hicache", daemon=True).start()
        sizes = ", ".join(f"{name} {pool.block_bytes}" for name, pool in self._pools.items())
        _log.info("Kvasir keeps pages of (bytes) %s; the store has %s", sizes, self._store.statistics())

    def _describe(self, name: str, pool: Any) -> _Pool:
        """Where the pages of a pool lie: each buffer of a page is a plane, with the same distance from page to page."""
        config, page_size, pages = self._config, int(pool.page_size), int(pool.size) // int(pool.page_size)
        planes = [] if pool.kv_buffer is None and not pool.size_per_token else _planes(name, pool, page_size, pages)
        ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size]
        if not (config.is_mla_model and name in _REPLICATED):
            ranks += [config.tp_rank, config.tp_size]
        facts = self._facts | {
            "pool": str(name),
            "layout": [str(pool.layout), str(pool.dtype), page_size, [plane.block_bytes for plane in planes]],
            "layers": [int(getattr(pool, what, -1)) for what in ("layer_num", "start_layer", "end_layer")],
            "ranks": ranks,
            "model": [config.model_name, config.is_mla_model, config.tp_lcm_size, config.should_split_heads],
        }
        return _Pool(str(name), identity.key(facts), page_size, sum(plane.block_bytes for plane in planes), planes, pages)

    def _register(self, name: str) -> None:
        pool = self._pools[name]
        if pool.planes:
            number = self._opened.register(pool.planes, pool.pages, Memory.HOST)
            self._pools[name] = replace(pool, tensors=number)

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "on_host_pools_registered was not called"
        return self._store

    # The interface of pages of one pool.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._found(keys, _prefix(extra_info))

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
        found = self._found(keys, _prefix(extra_info))
        restorable = list(range(1, found + 1))
        hits = {PoolName.KV: found} if found else {}
        for transfer in pool_transfers or []:
            is_there = self._are_there(self._pools[transfer.name], keys[:found])
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                # These are a second form of pages that are there already, and decide nothing.
                covered = _leading(is_there) // max(transfer.block_pages, 1) * max(transfer.block_pages, 1)
                if covered:
                    hits[transfer.name] = covered
                continue
            window = len(keys) if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else max(len(transfer.keys or ()), 1)
            good = {length for length in range(1, found + 1) if all(is_there[max(length - window, 0) : length])}
            if good:
                hits[transfer.name] = max(good)
            restorable = [length for length in restorable if length in good]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for one in transfers:
            pool = self._pools[one.name]
            results[one.name] = self._load(pool, one.keys or [], self._indices(pool, one))
        return results

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for one in transfers:
            pool = self._pools[one.name]
            # Of other pools only some pages are there: these are no chain.
            chain = extra_info if one.hit_policy == PoolHitPolicy.ALL_PAGES else _NO_CHAIN
            results[one.name] = self._save(pool, one.keys or [], self._indices(pool, one), chain)
        return results

    @staticmethod
    def _indices(pool: _Pool, transfer: PoolTransfer) -> torch.Tensor:
        indices, wanted = transfer.host_indices, len(transfer.keys or ()) * pool.page_size
        if indices is None or indices.numel() != wanted:
            raise ValueError(f"{pool.name}: {0 if indices is None else indices.numel()} indices for {wanted} tokens")
        return indices

    # Single pages with copies of their own: `interface_v1` says that they are not used.

    def exists(self, key: str) -> bool:
        return self._found([key], []) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        raise NotImplementedError('"interface_v1": 1')

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        raise NotImplementedError('"interface_v1": 1')

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError('"interface_v1": 1')

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError('"interface_v1": 1')

    # The rest.

    def clear(self) -> None:
        """Makes all that was stored unreachable for this process. One that starts later loads the weights of its files, and finds
        the pages that were made with those."""
        with self._lock:
            self._epoch = os.urandom(16)

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
        return identity.identities(pool.key, identity.salted(self._epoch, [_hash(key) for key in keys]))

    def _are_there(self, pool: _Pool, keys: Sequence[str]) -> list[bool]:
        if not pool.tensors:
            return [True] * len(keys)
        names = self._names(pool, keys)
        return [self._opened.match(name) == 1 for name in _each(names)]

    def _found(self, keys: Sequence[str], prefix: Sequence[str]) -> int:
        """How many pages of the anchor are here, from the first on, after other nodes were asked for what is not."""
        pool = self._kv
        if not pool.tensors:
            return len(keys)
        names = self._names(pool, keys)
        found = self._opened.match(names)
        if found == len(keys) or not self._settings.is_fetching:
            return found
        chain, held = self._names(pool, prefix) + names, len(prefix)
        # Within the tiers' deadlines.
        completion = self._finish(lambda number: self._opened.fetch(number, chain, held, _PATIENCE))
        return max(completion.blocks - held, found)

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
        elif not self._is_told:
            self._is_told = True
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
        if not pool.tensors or not keys:
            return len(keys)
        names, blocks, started = self._names(pool, keys), pool.blocks(host_indices), time.monotonic()
        deadline = _PATIENCE if operation == Operation.LOAD else 0.0
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
        future: Future[Completion] = Future()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = future
        try:
            while not submit(number):
                time.sleep(0.001)
        except BaseException:
            with self._lock:
                del self._waiting[number]
            raise
        completion = future.result()
        if completion.failure:
            raise StoreError("transfer", completion.status, completion.failure)
        return completion

    def _dispatch(self, store: Store) -> None:
        """Tells who waits. Ends when the store is closed, which waits for all transfers that have begun."""
        gone = StoreError("poll", -1, "the store is closed")
        try:
            while True:
                for completion in store.poll(timeout_ms=-1):
                    with self._lock:
                        future = self._waiting.pop(completion.user)
                    future.set_result(completion)
        except StoreError as problem:
            gone = problem
        finally:
            with self._lock:
                left, self._waiting = self._waiting, {}
            for future in left.values():
                future.set_exception(gone)

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


def _engine_facts(settings: Settings) -> dict[str, object]:
    """What decides a page's bytes, beside tokens and the pool: model, weights, and how they are computed with."""
    from sglang.srt.runtime_context import get_server_args
    from sglang.version import __version__

    arguments = get_server_args()
    names = (
        "model_path revision load_format quantization dtype kv_cache_dtype json_model_override_args attention_backend model_impl "
        "quantization_param_path speculative_algorithm speculative_draft_model_path speculative_draft_model_revision"
    ).split()
    said = {name: str(getattr(arguments, name, None)) for name in names}
    if said["load_format"] == "dummy":
        said["random_seed"] = str(arguments.random_seed)
    places = [(said["model_path"], said["revision"])]
    if said["speculative_draft_model_path"] != "None":
        places.append((said["speculative_draft_model_path"], said["speculative_draft_model_revision"]))
    folder = getattr(arguments, "download_dir", None)
    weights = [_weights(place, None if revision == "None" else revision, folder, settings) for place, revision in places]
    if settings.is_fetching:
        # Machines may have the same weights in other places.
        said = {name: value for name, value in said.items() if not name.endswith(("path", "revision"))}
    return {"sglang": __version__, "namespace": settings.namespace, "arguments": said, "weights": weights}


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


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys if extra_info is not None else None) or []


def _each(names: bytes) -> Iterator[bytes]:
    return (names[at : at + IDENTITY_BYTES] for at in range(0, len(names), IDENTITY_BYTES))


def _leading(are_there: Sequence[bool]) -> int:
    return next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))
