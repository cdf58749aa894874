"""What an engine is started with: `kv_connector_extra_config` of vLLM, and of SGLang (`library`, `store`, `store_file` and `namespace`
only) `--hicache-storage-backend-extra-config`.

    library            path of libkvasir_kv; default: KVASIR_KV_LIBRARY, then the one in this package, then the loader's own search
    store              the store's configuration, as an object of sections or as TOML text (see `kvasir_kv_open`)
    store_file         the same in a file of TOML; one of the two at most
    namespace          text that keeps this engine's blocks apart from others'; default ""
    saving_blocks_max  blocks of the engine that may wait for being saved at a time; default a quarter of them
    load_blocks_min    fewer blocks than these are computed and not loaded, whatever the plan says; default 1
    offload            whether blocks are kept in the store at all; default true
    handoff_deadline   seconds for which a request waits for the blocks of another engine; default 60

With a section `transfer` in the store's configuration the engine hands blocks to others and takes theirs; one that
computes prompts for others names a port in `transfer.listen`.

Three things are filled in when the store's configuration leaves them out, because only the engine knows them:
`store.slot`, which is a block's bytes, `device.ordinal` for tensors in CUDA memory, and a folder below
`disk_tier.path` for each worker, because a folder is for one open store at a time (of a list of devices
each process takes its own). In `transfer`, the layout of blocks
and the addresses of each process are filled in, too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import handoff

_DEVICE_ENGINES = ("nvme-passthrough", "nvme-user", "spdk")
"""Engines of `disk_tier` that take a device and no folder: one for each process."""
_PAGE_BYTES = 4096
_EVENTS = 1 << 18
"""`queue.events` of a worker's store: tier events that may wait for the next steps of the engine, 24 bytes each."""
_KEYS = (
    "library",
    "store",
    "store_file",
    "namespace",
    "saving_blocks_max",
    "load_blocks_min",
    "offload",
    "handoff_deadline",
)


class SettingsError(ValueError):
    """What is wrong with the configuration, and where."""


@dataclass(frozen=True)
class Settings:
    """See the module's documentation."""

    library: str = ""
    store: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    namespace: str = ""
    saving_blocks_max: int = 0
    load_blocks_min: int = 1
    offload: bool = True
    handoff_deadline: float = 60.0

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Settings":
        """Reads the engine's object; refuses what it does not know."""
        unknown = sorted(set(given) - set(_KEYS))
        if unknown:
            raise SettingsError(f"kv_connector_extra_config has no {', '.join(unknown)}; it has {', '.join(_KEYS)}")
        if "store" in given and "store_file" in given:
            raise SettingsError("kv_connector_extra_config has both store and store_file")
        return cls(
            library=_text(given, "library"),
            store=_store(given),
            namespace=_text(given, "namespace"),
            saving_blocks_max=_number(given, "saving_blocks_max", 0),
            load_blocks_min=_number(given, "load_blocks_min", 1),
            offload=_switch(given, "offload", True),
            handoff_deadline=_seconds(given, "handoff_deadline", 60.0),
        )

    @property
    def transfer(self) -> Mapping[str, Any] | None:
        """The section of hand-offs, if there is one."""
        return self.store.get("transfer")

    @property
    def rdma(self) -> Mapping[str, Any]:
        """The section of RDMA."""
        return self.store.get("rdma", {})

    @property
    def is_fetching(self) -> bool:
        """Whether the store brings blocks from other nodes or object storage."""
        others = self.store.get("remote_tier", {}).get("nodes"), self.store.get("object_tier", {}).get("url")
        return any(others)

    @property
    def shared_stores(self) -> list[str]:
        """Names of the nodes whose stores are shared with other engines."""
        nodes = self.store.get("remote_tier", {}).get("nodes", [])
        return sorted({str(node).partition("=")[0].strip() for node in nodes})

    @property
    def is_prefetching(self) -> bool:
        """Whether the blocks of idle conversations are brought up from tiers below host memory."""
        has_disk = str(self.store.get("disk_tier", {}).get("path", "")) not in ("", "[]")
        return self.store.get("host_tier", {}).get("prefetch", True) is True and (has_disk or self.is_fetching)

    @property
    def direct(self) -> bool:
        """Whether blocks go between devices' memory, past the host's."""
        return self.store.get("device", {}).get("direct") is True

    def toml(
        self,
        block_bytes: int,
        worker: str,
        device: int | None = None,
        process: int = 0,
        pieces: Mapping[str, Any] | None = None,
        tells_tiers: bool = False,
    ) -> str:
        """The store's configuration for one worker, whose blocks have so many bytes and lie on that device, if on any.

        `pieces` are the keys of `transfer` that say how a block of it is cut. `tells_tiers`: the store notes what its tiers gain and
        lose.
        """
        sections = {name: dict(values) for name, values in self.store.items()}
        if self.transfer is not None:
            own, rails = handoff.sections(self.transfer, self.rdma, process)
            sections["transfer"] = own | dict(pieces or {})
            # Requests that wait for another engine count, too.
            sections.setdefault("queue", {}).setdefault("depth", 4096)
            if rails:
                sections["rdma"] = rails
        if tells_tiers:
            sections.setdefault("queue", {}).setdefault("events", _EVENTS)
        slot = -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        sections.setdefault("store", {}).setdefault("slot", f"{slot} B")
        if device is not None:
            sections.setdefault("device", {}).setdefault("ordinal", device)
        elif "device" in sections:
            raise SettingsError("kv_connector_extra_config: store has a section device, and the KV caches are in host memory")
        disk = sections.get("disk_tier", {})
        devices = disk.get("path")
        devices = list(devices) if isinstance(devices, (list, tuple)) else [devices]
        are_devices = any(isinstance(device, str) and Path(device).is_block_device() for device in devices)
        if (engine := disk.get("engine", "auto")) in _DEVICE_ENGINES or are_devices:
            if process >= len(devices) or not isinstance(devices[process], str) or not devices[process]:
                text = f"disk_tier.path has no device for process {process}: each needs one of its own (engine {engine!r})"
                raise SettingsError(f"kv_connector_extra_config: {text}")
            disk["path"] = devices[process]
        elif isinstance(paths := disk.get("path"), (list, tuple)):
            if not all(isinstance(path, str) and path for path in paths):
                raise SettingsError(f"kv_connector_extra_config: disk_tier.path lists something that is no folder: {paths!r}")
            disk["path"] = [str(Path(str(path)) / worker) for path in paths]
        elif paths:
            disk["path"] = str(Path(str(paths)) / worker)
        return "".join(_section(name, values) for name, values in sections.items())


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise SettingsError(f"kv_connector_extra_config: {name} is no text: {value!r}")
    return value


def _number(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SettingsError(f"kv_connector_extra_config: {name} is no number of blocks: {value!r}")
    return value


def _switch(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise SettingsError(f"kv_connector_extra_config: {name} is neither true nor false: {value!r}")
    return value


def _seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 3600:
        raise SettingsError(f"kv_connector_extra_config: {name} is not a number of seconds up to 3600: {value!r}")
    return float(value)


def _store(given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    store, where = given.get("store", {}), "store"
    if "store_file" in given:
        where = _text(given, "store_file")
        try:
            store = Path(where).read_text()
        except OSError as problem:
            raise SettingsError(f"store_file: {problem}") from problem
    if isinstance(store, str):
        store = _parse_toml(store, where)
    if not isinstance(store, Mapping) or not all(isinstance(values, Mapping) for values in store.values()):
        raise SettingsError(f"{where}: not an object of sections such as host_tier")
    return store


def _parse_toml(text: str, where: str) -> Mapping[str, Any]:
    try:
        import tomllib
    except ImportError as problem:
        raise SettingsError(f"{where}: TOML needs Python 3.11; give `store` as an object") from problem
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise SettingsError(f"{where}: {problem}") from problem


def _section(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"[{name}]"]
    for key, value in values.items():
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not (texts or isinstance(value, (bool, int, str))):
            raise SettingsError(f"store: {name}.{key} is no text, number, true, false or list of texts: {value!r}")
        # What JSON writes is TOML but for two things: an escape is a whole character there, and U+007F must be one.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"
