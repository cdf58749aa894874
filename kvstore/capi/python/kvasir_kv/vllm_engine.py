"""What the connector must know of a vLLM engine: can it serve it, what decides its blocks' bytes, where do they lie?"""

import dataclasses
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.version import __version__ as vllm_version

from . import identity
from .handoff import RECEIVERS_MAX, is_reachable, port_of
from .library import Memory
from .settings import Settings
from .worker import Event

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvasir_kv")

_HASHES = ("sha256", "sha256_cbor")

GROUPS_MAX = 65
"""The prefix's group, and as many others as the library takes."""


class _CudaEvent(Event):
    """All work that has been put on the current stream so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream())
        self.handle = self._event.cuda_event


def refuse(config: "VllmConfig", caches: "KVCacheConfig") -> None:
    """Raises what is wrong with an engine's configuration, all at once."""
    cache, parallel = config.cache_config, config.parallel_config
    problems = []
    kinds = [_kind(group.kv_cache_spec) for group in caches.kv_cache_groups]
    unknown = sorted({type(group.kv_cache_spec).__name__ for group, kind in zip(caches.kv_cache_groups, kinds) if kind is None})
    if unknown or not kinds:
        problems.append(f"groups of KV caches of kinds {unknown} are neither full, sliding window nor chunked attention")
    sizes = sorted({group.kv_cache_spec.block_size for group in caches.kv_cache_groups})
    if len(sizes) > 1:
        problems.append(f"groups of KV caches have blocks of {sizes} tokens, which must be equal")
    if len(kinds) > GROUPS_MAX:
        problems.append(f"{len(kinds)} groups of KV caches are more than {GROUPS_MAX}")
    if config.speculative_config is not None and windows(caches) != [None]:
        problems.append("speculative decoding needs more of a sliding window than is loaded here")
    if parallel.pipeline_parallel_size > 1 and windows(caches) != [None]:
        problems.append("pipeline stages need one group of full attention: sliding windows, chunks and several groups are not kept")
    executor = getattr(parallel, "distributed_executor_backend", "mp")
    if parallel.pipeline_parallel_size > 1 and executor != "mp" and not (executor == "ray" and envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND):
        problems.append(f"of pipeline stages over the executor {executor!r} only the last one would answer")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            problems.append(f"{name} is {getattr(parallel, name)} and must be 1")
    if cache.prefix_caching_hash_algo not in _HASHES:
        problems.append(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} could give two prompts one name: "
            "use sha256_cbor"
        )
    if not cache.enable_prefix_caching:
        problems.append("prefix caching is off, without which blocks have no names")
    if getattr(cache, "calculate_kv_scales", False):
        problems.append("calculate_kv_scales makes the bytes of a block depend on earlier requests")
    if config.model_config.enable_sleep_mode:
        problems.append("sleep mode takes the memory away that blocks are copied from")
    policy = getattr(config.kv_transfer_config, "kv_load_failure_policy", None)
    if policy != "recompute":
        problems.append(f'"kv_load_failure_policy" is {policy!r}: a lost block would end a request; set "recompute"')
    if problems:
        raise ValueError("KvasirConnector: " + "; ".join(problems))
    if not has_stable_hashes():
        logger.warning("This vLLM names blocks anew at each start; set PYTHONHASHSEED to find them after a restart.")


def has_stable_hashes() -> bool:
    """Whether other processes hash the same tokens to the same names."""
    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") or "PYTHONHASHSEED" in os.environ


def refuse_group_handoff(caches: "KVCacheConfig", settings: Settings) -> None:
    """Raises when an engine with several groups of layers, or windows, has a section `transfer`."""
    if windows(caches) != [None] and settings.transfer is not None:
        raise ValueError(
            "KvasirConnector: blocks of several groups of layers, or of sliding windows, are not handed over: leave section transfer out"
        )


def refuse_handoff(config: "VllmConfig", settings: Settings) -> None:
    """Raises what is wrong with an engine's configuration of hand-offs."""
    role = config.kv_transfer_config.kv_role
    if settings.transfer is None:
        if role != "kv_both":
            raise ValueError(
                f'KvasirConnector: "kv_role" is {role!r}, and the store\'s configuration has no section transfer: no blocks '
                "would be handed over"
            )
        return
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("KvasirConnector: an engine with pipeline stages hands no blocks over: leave section transfer out")
    if config.parallel_config.world_size > RECEIVERS_MAX:
        raise ValueError(f"KvasirConnector: blocks are handed over between at most {RECEIVERS_MAX} processes of each engine")
    if config.parallel_config.world_size > 1 and not is_reachable(settings.transfer):
        raise ValueError(
            "KvasirConnector: an engine of several processes must name a port in transfer.listen: the other side learns from "
            "there how many they are"
        )
    devices = settings.rdma.get("devices", [])
    if port_of(str(settings.rdma.get("listen", ""))) and len(devices) != 1:
        raise ValueError(
            f"KvasirConnector: rdma.listen names a port, and rdma.devices {len(devices)} devices: it must name one, because the "
            "next port is the next process's"
        )
    if role != "kv_consumer" and not is_reachable(settings.transfer):
        raise ValueError(
            f'KvasirConnector: "kv_role" is {role!r}, and transfer.listen names no port, so that nobody is told where this '
            'engine listens: set it, or "kv_role" to "kv_consumer"'
        )


def handoff_facts(
    config: "VllmConfig", layout_facts: list[object], tensors: Iterable[str], namespace: str
) -> dict[str, object]:
    """All that must be the same in two engines that hand blocks to each other, beside tokens and what a request brings.

    Not vLLM's version, so that a fleet can be renewed; and the machine for a CPU alone, whose instruction set decides how a
    cache lies in memory.
    """
    model, cache = config.model_config, config.cache_config
    layers = config.compilation_config.static_forward_context
    return {
        "namespace": namespace,
        **_shared_model(config, namespace),
        "multimodal": dataclasses.asdict(model.multimodal_config) if model.multimodal_config else None,
        "cache": [cache.cache_dtype, cache.block_size, cache.prefix_caching_hash_algo],
        "layout": layout_facts,
        "attention": [[name, _backend(layers.get(name)), str(getattr(layers.get(name), "isa", ""))] for name in tensors],
        "machine": [] if torch.cuda.is_available() else _machine(),
    }


def _portable_weights(config: "VllmConfig", model: Any, namespace: str) -> object:
    """What tells a model's weights from others on every machine.

    Weights that cannot be looked at go by their place, which is only told apart from other places: a namespace vouches for them.
    """
    place = _weights_place(config, model)
    is_named = place == model.model and not os.path.exists(place)
    commit = _commit(place, model.revision, config.load_config.download_dir) if is_named else None
    found = identity.portable(place, commit)
    if found is None and namespace:
        return ["unverified", place, model.revision]
    if found is None:
        raise ValueError(
            f"KvasirConnector: nobody can tell whether another engine has the same weights as {place}: give all engines that "
            'have them one "namespace" (wanted for hand-offs, remote_tier and object_tier)'
        )
    return found


def _config_facts(config: Any) -> object:
    """A model's configuration without where it was read from and by which version of the library."""
    left_out = ("_name_or_path", "transformers_version")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _kind(spec: Any) -> tuple[str, int] | None:
    """The kind of a group's attention and the tokens that it reaches back; none for those that blocks are not kept of.

    Kinds that are made from these may keep more than the tokens of a block in it.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {_kind(one) for one in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else None
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return "full", 0
    if type(spec) is SlidingWindowSpec:
        # A token attends to itself and to the sliding_window - 1 tokens before it.
        return "sliding", spec.sliding_window - 1 + int(getattr(spec, "extra_retained_tokens", 0))
    if type(spec) is ChunkedLocalAttentionSpec:
        return "chunked", spec.attention_chunk_size
    return None


def windows(caches: "KVCacheConfig") -> list[int | None]:
    """For each group of layers the number of blocks before the next token that it needs at most; none: all of them.

    Of an engine that `refuse` accepts: any other kind counts as one that needs all.
    """
    kinds = [(_kind(group.kv_cache_spec), group.kv_cache_spec.block_size) for group in caches.kv_cache_groups]
    return [None if kind is None or kind[0] == "full" else -(-kind[1] // size) for kind, size in kinds]


def group_facts(caches: "KVCacheConfig") -> list[object]:
    """What decides the meaning of blocks of several groups: their layers, and what these look at; nothing of one that needs all."""
    if windows(caches) == [None]:
        return []
    return [[_kind(group.kv_cache_spec), list(group.layer_names)] for group in caches.kv_cache_groups]


def worker_facts(
    config: "VllmConfig",
    layout_facts: tuple[object, ...],
    tensors: Iterable[str],
    namespace: str,
    is_shared: bool = False,
    replicas: int = 1,
) -> dict[str, object]:
    """All that decides the bytes of a worker's blocks, beside tokens and what a request brings.

    `is_shared`: engines on other machines have the same facts where they have the same weights, wherever their files are.
    `replicas`: ranks in a row that hold the same bytes, as MLA's latents and heads that are fewer than the ranks: other nodes keep
    these once.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    layers, draft = config.compilation_config.static_forward_context, config.speculative_config
    return {
        "namespace": namespace,
        **(_shared_model(config, namespace) if is_shared else _own_model(config)),
        # vLLM's hash of an image has what a request says about its processing, and not what the engine was told.
        "multimodal": dataclasses.asdict(model.multimodal_config) if model.multimodal_config else None,
        "cache": [cache.cache_dtype, cache.block_size, cache.prefix_caching_hash_algo],
        "shard": [parallel.rank // replicas, parallel.world_size, parallel.tensor_parallel_size],
        "layout": layout_facts,
        "attention": [[name, _backend(layers.get(name))] for name in tensors],
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "vllm": vllm_version,
        "machine": _machine(),
    }


def _own_model(config: "VllmConfig") -> dict[str, object]:
    """The model by its name, and its weights by their files."""
    model, draft, load = config.model_config, config.speculative_config, config.load_config
    weights = _weights(config, model)
    return {
        "model": [model.model, model.revision, model.quantization, str(model.dtype)],
        "weights": [str(load.load_format), model.seed, dict(load.model_loader_extra_config or {}), weights],
        "model_config": [model.compute_hash(), model.hf_config.to_dict()],
        "draft": [draft.method, draft.model, _draft_weights(config, weights)] if draft else None,
    }


def _shared_model(config: "VllmConfig", namespace: str) -> dict[str, object]:
    """The model by what it is, on whichever machine."""
    model, draft = config.model_config, config.speculative_config
    return {
        "model": [model.quantization, str(model.dtype), str(config.load_config.load_format), model.seed],
        "code": [getattr(model, "code_revision", None), str(getattr(model, "model_impl", ""))],
        "weights": _portable_weights(config, model, namespace),
        "model_config": _config_facts(model.hf_config),
        "draft": [draft.method, _portable_weights(config, draft.draft_model_config or model, namespace)] if draft else None,
    }


def _weights(config: "VllmConfig", model: Any) -> object:
    """What tells a model's weights from others, wherever its loader has them from."""
    place = _weights_place(config, model)
    is_named = place == model.model and not os.path.exists(place)
    return identity.source(place, _commit(place, model.revision, config.load_config.download_dir) if is_named else None)


def _weights_place(config: "VllmConfig", model: Any) -> str:
    """Where a loader reads the weights."""
    extra = config.load_config.model_loader_extra_config or {}
    tensors = extra.get("tensorizer_uri") or extra.get("tensorizer_dir")
    # A model in an object store leaves only its small files in the folder that it is named by.
    return str(tensors or getattr(model, "model_weights", "") or model.model)


def _commit(name: str, revision: str | None, folder: str | None) -> str | None:
    """The commit of a model that is named in a hub. ModelScope's has no commits that files show."""
    is_hidden = envs.VLLM_USE_MODELSCOPE and not identity.is_commit(revision)
    return None if is_hidden else identity.hub_commit(name, revision, folder)


def _draft_weights(config: "VllmConfig", of_model: object) -> object:
    """The same for what drafts tokens, which may be the model itself or have no weights."""
    model, draft = config.model_config, config.speculative_config.draft_model_config
    if draft is None or (draft.model, draft.revision) == (model.model, model.revision):
        return of_model
    return _weights(config, draft)


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None) or getattr(layer, "get_attn_backend", lambda: None)()
    return backend.get_name() if backend is not None else ""


def _machine() -> list[str]:
    """A cache on a CPU lies as the instruction set wants it, which its shape does not show; so may one on a GPU."""
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return [platform.machine(), features]


def memory_of(tensors: dict[str, torch.Tensor]) -> tuple[Memory, int, Callable[[], Event]]:
    """Where tensors lie: the memory, the device's number there, and what records an event of its work."""
    devices = {tensor.device for tensor in tensors.values()}
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return Memory.HOST, 0, Event
    if kinds == {"cuda"} and len(devices) == 1 and torch.version.hip is None:
        (device,) = devices
        return Memory.CUDA, device.index if device.index is not None else torch.cuda.current_device(), _CudaEvent
    places = sorted(map(str, devices))
    raise ValueError(f"KvasirConnector: KV caches on {places} are neither in host memory nor on one CUDA device")


def worker_name(config: "VllmConfig") -> str:
    """A worker's name among all of its engine's, the same at each start."""
    parallel = config.parallel_config
    return f"replica-{parallel.data_parallel_index}-rank-{parallel.rank}"


def adapter_salt(process: bytes) -> Callable[["Request"], bytes]:
    """Gives the salt of a request; `process` are random bytes of this process."""

    def salt(request: "Request") -> bytes:
        adapter = request.lora_request
        if adapter is None:
            return b""
        return identity.adapter(process, adapter.lora_name, adapter.lora_int_id, adapter.lora_path)

    return salt
