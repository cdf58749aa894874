"""A thin binding of `libkvasir_kv` (`kvstore/capi/include/kvasir_kv.h`) with `ctypes`.

Statuses of 0 and above are outcomes and come back as values; those below 0 are failures and raise `StoreError` with
the library's own text. Nothing here waits, except `Store.open`, `Store.close`, `Store.unregister` and a `poll` that is
told to.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

IDENTITY_BYTES = 16
"""Bytes of a block's name."""

_ERROR_BYTES = 1024
_POLL_MAX = 64
_LIBRARY_NAME = "libkvasir_kv.so.0"


class Status(IntEnum):
    """The outcomes of `kvasir_kv_status`, and the failures that the package itself raises as a `StoreError`."""

    INVALID_HANDLE = -2
    INVALID_ARGUMENT = -1

    OK = 0
    MISS = 1
    PRESENT = 2
    THROTTLED = 3


class Operation(IntEnum):
    """The transfers, hand-offs and fetches of `kvasir_kv_operation`."""

    SAVE = 5
    LOAD = 6
    PUSH = 7
    EXPECT = 8
    FETCH = 9


class ConversationEvent(IntEnum):
    """What has become of a conversation, `kvasir_kv_conversation_event`."""

    CONTINUED = 0
    IDLE = 1


class Ending(IntEnum):
    """How an expectation ended, `kvasir_kv_ending`."""

    COMPLETE = 0
    CORRUPTED = 1
    SENDER_STOPPED = 2
    PEER_DOWN = 3
    DEADLINE = 4
    REFUSED = 5
    CANCELLED = 6


class EventKind(IntEnum):
    """The kinds of `kvasir_kv_event_kind`."""

    STORED = 1
    REMOVED = 2


class Tier(IntEnum):
    """The tiers of `kvasir_kv_tier`."""

    HOST = 1
    DISK = 2


@dataclass(frozen=True)
class TierEvent:
    """A tier has gained (`is_stored`) or lost a block."""

    identity: bytes
    is_stored: bool
    tier: int


@dataclass(frozen=True)
class Plan:
    """The plan for a prompt: to load its first `blocks`, to fetch, or (None) to compute it all.

    A load or a fetch is to take no longer than `deadline` seconds.
    """

    operation: Operation | None
    blocks: int = 0
    deadline: float = 0.0


class Memory(IntEnum):
    """Where registered tensors lie, `kvasir_kv_memory`."""

    HOST = 0
    CUDA = 1


class StoreError(RuntimeError):
    """The library refused or failed; `status` is below 0."""

    def __init__(self, operation: str, status: int, text: str) -> None:
        super().__init__(f"kvasir_kv_{operation}: {text} (status {status})")
        self.status = status


@dataclass(frozen=True)
class Plane:
    """Block `b` of a plane is `block_bytes` bytes at `start + b * block_stride`."""

    start: int
    block_stride: int
    block_bytes: int


@dataclass(frozen=True)
class Completion:
    """A finished transfer, fetch or part of a hand-off.

    `blocks` is how many of a save's blocks are in the store, the length of a load's or an expectation's prefix that came, how many
    blocks of a fetch are here, or how many blocks of a push were copied. `failure` is the library's text when `status` is below 0, else empty. `ending`
    is an expectation's `Ending`.
    """

    user: int
    status: int
    blocks: int
    failure: str
    ending: int = 0


class _Plane(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("block_stride", ctypes.c_uint64), ("block_bytes", ctypes.c_uint64)]


class _Tensors(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("blocks", ctypes.c_uint64),
        ("planes", ctypes.POINTER(_Plane)),
        ("plane_count", ctypes.c_size_t),
    ]


class _Transfer(ctypes.Structure):
    _fields_ = [
        ("user", ctypes.c_uint64),
        ("operation", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("tensors", ctypes.c_uint64),
        ("identities", ctypes.c_char_p),
        ("blocks", ctypes.POINTER(ctypes.c_uint64)),
        ("count", ctypes.c_size_t),
        ("event", ctypes.c_void_p),
        ("parent", ctypes.c_char_p),
        ("position", ctypes.c_uint32),
        ("is_chain", ctypes.c_uint32),
        ("deadline_us", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("tenant", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class _Group(ctypes.Structure):
    _fields_ = [("identities", ctypes.c_char_p), ("window_blocks", ctypes.c_uint64)]


class _Prompt(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_uint32),
        ("block_tokens", ctypes.c_uint32),
        ("identities", ctypes.c_char_p),
        ("count", ctypes.c_size_t),
        ("held", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("queued_tokens", ctypes.c_uint64),
        ("may_fetch", ctypes.c_uint32),
        ("others", ctypes.c_uint32),
        ("groups", ctypes.POINTER(_Group)),
        ("group_count", ctypes.c_size_t),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [("operation", ctypes.c_uint32), ("deadline_us", ctypes.c_uint32), ("blocks", ctypes.c_uint64)]


class _HandOff(ctypes.Structure):
    _fields_ = [
        ("user", ctypes.c_uint64),
        ("operation", ctypes.c_uint32),
        ("first_block", ctypes.c_uint32),
        ("content", ctypes.c_uint8 * 16),
        ("tensors", ctypes.c_uint64),
        ("blocks", ctypes.POINTER(ctypes.c_uint64)),
        ("count", ctypes.c_size_t),
        ("transfers", ctypes.POINTER(ctypes.c_uint64)),
        ("transfer_count", ctypes.c_size_t),
        ("addresses", ctypes.POINTER(ctypes.c_char_p)),
        ("first_layer", ctypes.c_uint32),
        ("layers", ctypes.c_uint32),
        ("deadline_ms", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    ]


class _HandOffStatistics(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "blocks_received",
            "transfers_completed",
            "transfers_incomplete",
            "transfers_cancelled",
            "leases_expired",
            "peers_lost",
            "bytes_sent",
            "checksum_failures",
            "slots_used",
            "sent_directly",
            "sent_staged",
            "received_directly",
            "received_staged",
            "slots",
        )
    ]


_RAIL_COUNTERS = ("block_bytes", "slices_retried", "links_failed", "nanoseconds_per_kib", "slow")
_RAILS_MAX = 32


class _RailStatistics(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 64), *((name, ctypes.c_uint64) for name in _RAIL_COUNTERS)]


_NODE_COUNTERS = (
    "usable",
    "latency_us",
    "requests",
    "timeouts",
    "refused",
    "failures",
    "read_blocks",
    "read_bytes",
    "damaged_blocks",
    "stored_blocks",
    "leases",
)


class _NodeStatistics(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 128), *((name, ctypes.c_uint64) for name in _NODE_COUNTERS)]


STAGE_BOUNDS = [16e-6 * 2**index for index in range(23)]
"""Seconds that the buckets of a stage's times end at; one more bucket has the longer ones."""
_STAGES_MAX = 16


class _StageStatistics(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 16),
        ("sum_us", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("at_most", ctypes.c_uint64 * len(STAGE_BOUNDS)),
    ]


class _Event(ctypes.Structure):
    _fields_ = [("identity", ctypes.c_uint8 * 16), ("kind", ctypes.c_uint32), ("tier", ctypes.c_uint32)]


EVENTS_AT_ONCE = 1024
"""Events that `Store.take_events` returns at most."""


class _Completion(ctypes.Structure):
    _fields_ = [
        ("user", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("meta_bytes", ctypes.c_uint64),
        ("payload_bytes", ctypes.c_uint64),
    ]


class _Statistics(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "blocks",
            "bytes",
            "bytes_max",
            "hits",
            "misses",
            "stored",
            "throttled",
            "evicted",
            "disk_blocks",
            "disk_bytes_max",
            "disk_read",
            "disk_written",
            "disk_evicted",
            "damaged",
            "far_read",
            "far_written",
            "far_too_large",
            "events_lost",
            "recomputed",
            "late",
            "prefetched",
            "prefetch_used",
            "prefetch_wasted",
            "checksummed_bytes",
            "disk_write_failures",
            "far_searches",
            "far_unanswered",
            "far_cut",
            "far_not_asked",
            "retained",
            "retention_refused",
        )
    ]


def _found_library() -> str:
    """The library that a wheel has inside, else the name for the loader's own search."""
    inside = Path(__file__).with_name(_LIBRARY_NAME)
    return str(inside) if inside.exists() else _LIBRARY_NAME


class Library:
    """The loaded library. `path` is a file, or empty for `KVASIR_KV_LIBRARY`, then the one in this package's folder, and then the
    loader's own search.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path or os.environ.get("KVASIR_KV_LIBRARY") or _found_library()
        try:
            self.calls = ctypes.CDLL(self.path)
            self._declare()
        except (OSError, AttributeError) as problem:
            raise StoreError("load", -6, f"{self.path} is no library of this version: {problem}") from problem

    def _declare(self) -> None:
        handle, size = ctypes.c_void_p, ctypes.c_size_t
        size_out = ctypes.POINTER(size)
        for name, arguments in {
            "open": [ctypes.c_char_p, ctypes.POINTER(handle), ctypes.c_char_p, size],
            "close": [handle],
            "match": [handle, ctypes.c_char_p, size, size_out],
            "stats": [handle, ctypes.POINTER(_Statistics), size],
            "nodes": [handle, ctypes.POINTER(_NodeStatistics), size, size, size_out],
            "register": [handle, ctypes.POINTER(_Tensors), ctypes.POINTER(ctypes.c_uint64)],
            "unregister": [handle, ctypes.c_uint64],
            "take_events": [handle, ctypes.POINTER(_Event), size, size_out],
            "submit_transfer": [handle, ctypes.POINTER(_Transfer)],
            "plan_prompt": [handle, ctypes.POINTER(_Prompt), ctypes.POINTER(_Plan)],
            "observe_prefill": [handle, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64],
            "conversation": [handle, ctypes.c_uint32, ctypes.c_char_p, size],
            "retain": [handle, ctypes.c_char_p, size, ctypes.c_uint32],
            "submit_handoff": [handle, ctypes.POINTER(_HandOff)],
            "end_handoff": [handle, ctypes.c_uint64],
            "cancel_handoff": [handle, ctypes.c_uint64],
            "decline_handoff": [handle, ctypes.c_uint64, ctypes.c_char_p],
            "handoff_address": [handle, ctypes.c_char_p, size, size_out],
            "handoff_stats": [handle, ctypes.POINTER(_HandOffStatistics), size],
            "handoff_rails": [handle, ctypes.POINTER(_RailStatistics), size, size, size_out],
            "handoff_stages": [handle, ctypes.POINTER(_StageStatistics), size, size, size_out],
            "poll": [handle, ctypes.POINTER(_Completion), size, ctypes.c_int32, size_out],
        }.items():
            call = getattr(self.calls, f"kvasir_kv_{name}")
            call.argtypes, call.restype = arguments, ctypes.c_int32
        self.calls.kvasir_kv_last_error.argtypes = [ctypes.c_char_p, size]
        self.calls.kvasir_kv_last_error.restype = size
        self.calls.kvasir_kv_version.restype = ctypes.c_uint32

    def version(self) -> tuple[int, int, int]:
        """Major, minor and patch."""
        number = self.calls.kvasir_kv_version()
        return number // 1_000_000, number // 1000 % 1000, number % 1000

    def last_error(self) -> str:
        """The text of this thread's last failure."""
        text = ctypes.create_string_buffer(_ERROR_BYTES)
        self.calls.kvasir_kv_last_error(text, _ERROR_BYTES)
        return text.value.decode(errors="replace")

    def call(self, operation: str, *arguments: object) -> int:
        """Calls a function and returns its outcome; raises its failure."""
        status: int = getattr(self.calls, f"kvasir_kv_{operation}")(*arguments)
        if status < 0:
            raise StoreError(operation, status, self.last_error())
        return status


class Store:
    """An open store. May be used from any thread; `close` ends it, and so does the end of a `with` block."""

    def __init__(self, library: Library, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle
        self._completion = _Completion()
        self._events = (_Event * EVENTS_AT_ONCE)()

    @classmethod
    def open(cls, library: Library, configuration: str) -> "Store":
        """Opens a store from TOML text. Waits for the disk."""
        handle, error = ctypes.c_void_p(), ctypes.create_string_buffer(_ERROR_BYTES)
        status = library.calls.kvasir_kv_open(configuration.encode(), ctypes.byref(handle), error, _ERROR_BYTES)
        if status < 0:
            raise StoreError("open", status, error.value.decode(errors="replace"))
        return cls(library, handle)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for transfers that have begun and for the disk. A second close is an error."""
        self._library.call("close", self._handle)

    def match(self, identities: bytes) -> int:
        """How many blocks are there, from the first on; `identities` are 16 bytes each."""
        matched = ctypes.c_size_t()
        self._library.call("match", self._handle, identities, _count(identities), ctypes.byref(matched))
        return matched.value

    def plan(
        self,
        identities: bytes,
        held: int,
        tokens: int,
        block_tokens: int,
        queued_tokens: int,
        may_fetch: bool,
        groups: Sequence[tuple[bytes, int]] = (),
        others: int | None = None,
    ) -> Plan:
        """What is best done with a prompt of so many tokens, of which the engine has `held` blocks and `identities` name the next.

        The engine computes `queued_tokens` of other prompts before. `may_fetch`: other nodes were not asked yet. `groups` are the
        identities of further groups of layers, one for each of `identities`, with the number of blocks before the first computed one that each needs.
        `others`: how many of the identities, from the first on, other nodes are known to hold; None: not known.
        """
        size, count = ctypes.sizeof(_Prompt), _count(identities)
        array = (_Group * len(groups))(*groups)
        is_known = may_fetch and others is not None
        fetch, there = (2, min(others or 0, count)) if is_known else (may_fetch, 0)
        prompt = _Prompt(size, block_tokens, identities, count, held, tokens, queued_tokens, fetch, there, array, len(groups))
        plan = _Plan()
        self._library.call("plan_prompt", self._handle, ctypes.byref(prompt), ctypes.byref(plan))
        return Plan(Operation(plan.operation) if plan.operation else None, plan.blocks, plan.deadline_us / 1e6)

    def observe_prefill(self, tokens: int, context: int, seconds: float) -> None:
        """Tells how long the engine took to compute so many tokens behind so many."""
        self._library.call("observe_prefill", self._handle, tokens, context, round(seconds * 1e6))

    def conversation(self, event: ConversationEvent, identities: bytes) -> None:
        """Tells that a conversation goes on, by its last block, or waits for its user, by all of its blocks."""
        self._library.call("conversation", self._handle, event, identities, _count(identities))

    def retain(self, identities: bytes, seconds: int) -> bool:
        """Retains blocks of a chain, from its first one on, for so many seconds; false when too many requests wait."""
        return self._library.call("retain", self._handle, identities, _count(identities), seconds) == Status.OK

    def fetch(self, user: int, identities: bytes, held: int, deadline: float = 0.0, tenant: int = 0) -> bool:
        """Brings blocks of a chain, from its first one on, here from other nodes and object storage; false when the queue is full.

        The caller has the first `held` of them. Its completion says how many are here then, those included. It takes no longer than
        `deadline` seconds, if that is not 0, and than the deadlines of the tiers. `tenant`: whose share the blocks count against.
        """
        transfer = _Transfer(user, Operation.FETCH, ctypes.sizeof(_Transfer))
        transfer.identities, transfer.count, transfer.held = identities, _count(identities), held
        transfer.tenant = tenant
        transfer.deadline_us = _microseconds(deadline)
        return self._library.call("submit_transfer", self._handle, ctypes.byref(transfer)) == Status.OK

    def register(self, planes: Sequence[Plane], blocks: int, memory: Memory, device: int = 0) -> int:
        """Registers paged tensors, and returns their number. The memory must stay until `unregister` or `close`."""
        array = (_Plane * len(planes))(*(_Plane(one.start, one.block_stride, one.block_bytes) for one in planes))
        tensors = _Tensors(memory, device, blocks, array, len(planes))
        number = ctypes.c_uint64()
        status = self._library.call("register", self._handle, ctypes.byref(tensors), ctypes.byref(number))
        if status != Status.OK:
            raise StoreError("register", status, "64 tensors are registered")
        return number.value

    def unregister(self, tensors: int) -> None:
        """Waits until no transfer works on them; their memory may go afterwards."""
        self._library.call("unregister", self._handle, tensors)

    def submit(
        self,
        user: int,
        operation: Operation,
        tensors: int,
        identities: bytes,
        blocks: Sequence[int],
        event: int = 0,
        chain: tuple[int, bytes | None] | None = None,
        deadline: float = 0.0,
        tenant: int = 0,
    ) -> bool:
        """Submits a save or a load of one block for each identity; false when the queue is full.

        `chain`: the identities of a save are one chain; its first block's place, and the identity of the one before it, none
        at the beginning. Without, each stands for itself.

        The blocks must stay as they are until the completion with this `user` was polled. `event` is the handle of a
        recorded CUDA event that the device's work waits for, or 0. `deadline`: seconds for which a load may wait for the disk.
        `tenant`: whose share the blocks of a save count against.
        """
        if _count(identities) != len(blocks):
            raise ValueError(f"{_count(identities)} identities for {len(blocks)} blocks")
        numbers = (ctypes.c_uint64 * len(blocks))(*blocks)
        position, parent = chain or (0, None)
        if parent is not None and len(parent) != IDENTITY_BYTES:
            raise ValueError(f"a parent of {len(parent)} bytes")
        size = ctypes.sizeof(_Transfer)
        transfer = _Transfer(
            user, operation, size, tensors, identities, numbers, len(blocks), event or None, parent, position, chain is not None
        )
        transfer.deadline_us, transfer.tenant = _microseconds(deadline), tenant
        return self._library.call("submit_transfer", self._handle, ctypes.byref(transfer)) == Status.OK

    def poll(self, timeout_ms: int = 0) -> list[Completion]:
        """Takes finished transfers, up to a limit: all that there are when fewer than 64 come back.

        One at a time, because the library keeps the text of only the last failure of a call.
        """
        finished: list[Completion] = []
        count = ctypes.c_size_t()
        while len(finished) < _POLL_MAX:
            wait = 0 if finished else timeout_ms
            try:
                self._library.call("poll", self._handle, ctypes.byref(self._completion), 1, wait, ctypes.byref(count))
            except StoreError:
                if finished:
                    # Closed meanwhile: the next call says so.
                    break
                raise
            if count.value == 0:
                break
            taken = self._completion
            failure = self._library.last_error() if taken.status < 0 else ""
            finished.append(Completion(taken.user, taken.status, taken.payload_bytes, failure, taken.meta_bytes))
        return finished

    def take_events(self) -> list[TierEvent]:
        """What the tiers have gained and lost since the last call, at most `EVENTS_AT_ONCE` events."""
        count = ctypes.c_size_t()
        self._library.call("take_events", self._handle, self._events, EVENTS_AT_ONCE, ctypes.byref(count))
        taken = self._events[: count.value]
        return [TierEvent(bytes(event.identity), event.kind == EventKind.STORED, event.tier) for event in taken]

    def push(
        self,
        user: int,
        transfers: Sequence[int],
        content: bytes,
        tensors: int,
        first_block: int,
        blocks: Sequence[int],
        layers: range,
        event: int = 0,
    ) -> bool:
        """Sends these layers of blocks to whoever expects the transfers; false when the queue is full.

        The blocks must stay as they are until the completion with this `user` was polled. `event` is as for `submit`.
        """
        part = self._part(user, Operation.PUSH, transfers, content, tensors, first_block, blocks)
        part.first_layer, part.layers = layers.start, len(layers)
        part.event = event or None
        return self._library.call("submit_handoff", self._handle, ctypes.byref(part)) == Status.OK

    def expect(
        self,
        user: int,
        senders: Mapping[int, str],
        content: bytes,
        tensors: int,
        first_block: int,
        blocks: Sequence[int],
        deadline: float,
        event: int = 0,
    ) -> bool:
        """Receives blocks within so many seconds; false when the queue is full.

        `senders` has the address of the process that sends a share, by its transfer. The blocks must not be used until the
        completion with this `user` was polled. `event` is as for `submit`.
        """
        part = self._part(user, Operation.EXPECT, list(senders), content, tensors, first_block, blocks)
        part.deadline_ms = min(int(deadline * 1000), 0xFFFF_FFFF)
        part.event = event or None
        part.addresses = (ctypes.c_char_p * len(senders))(*(address.encode() for address in senders.values()))
        return self._library.call("submit_handoff", self._handle, ctypes.byref(part)) == Status.OK

    def end_handoff(self, transfer: int) -> None:
        """Nothing more is pushed for the hand-off whose first transfer this is."""
        self._library.call("end_handoff", self._handle, transfer)

    def cancel_handoff(self, transfer: int) -> None:
        """Stops the hand-off whose first transfer this is, on whichever side that is."""
        self._library.call("cancel_handoff", self._handle, transfer)

    def decline_handoff(self, transfer: int, address: str) -> None:
        """Tells the process at `address` that nothing of this transfer is wanted."""
        self._library.call("decline_handoff", self._handle, transfer, address.encode())

    def handoff_address(self) -> list[str]:
        """The ways in which others reach this process, best first."""
        size, length = _ERROR_BYTES, ctypes.c_size_t()
        while True:
            text = ctypes.create_string_buffer(size)
            self._library.call("handoff_address", self._handle, text, size, ctypes.byref(length))
            if length.value < size:
                return text.value.decode().splitlines()
            size = length.value + 1

    def handoff_statistics(self) -> dict[str, int]:
        """The counters of `kvasir_kv_handoff_statistics`."""
        counters = _HandOffStatistics()
        self._library.call("handoff_stats", self._handle, ctypes.byref(counters), ctypes.sizeof(counters))
        return {field[0]: getattr(counters, field[0]) for field in _HandOffStatistics._fields_}

    def rail_statistics(self) -> dict[str, dict[str, int]]:
        """The counters of `kvasir_kv_rail_statistics` by the name of the transport."""
        rails, count = (_RailStatistics * _RAILS_MAX)(), ctypes.c_size_t()
        entry = ctypes.sizeof(_RailStatistics)
        self._library.call("handoff_rails", self._handle, rails, entry, _RAILS_MAX, ctypes.byref(count))
        known = rails[: min(count.value, _RAILS_MAX)]
        return {rail.name.decode(): {name: getattr(rail, name) for name in _RAIL_COUNTERS} for rail in known}

    def node_statistics(self) -> dict[str, dict[str, int]]:
        """State and counters of `kvasir_kv_node_statistics` by the name of the node in `remote_tier.nodes`."""
        count, entry = ctypes.c_size_t(), ctypes.sizeof(_NodeStatistics)
        self._library.call("nodes", self._handle, None, entry, 0, ctypes.byref(count))
        nodes = (_NodeStatistics * count.value)()
        self._library.call("nodes", self._handle, nodes, entry, len(nodes), ctypes.byref(count))
        return {node.name.decode(): {name: getattr(node, name) for name in _NODE_COUNTERS} for node in nodes}

    def stage_times(self) -> dict[str, dict[str, Any]]:
        """How long the stages of hand-offs took, of those that there were: by their names `seconds` together, `count`, and
        `at_most`, how many took at most as long as each of `STAGE_BOUNDS`.
        """
        stages, count = (_StageStatistics * _STAGES_MAX)(), ctypes.c_size_t()
        entry = ctypes.sizeof(_StageStatistics)
        self._library.call("handoff_stages", self._handle, stages, entry, _STAGES_MAX, ctypes.byref(count))
        known = [stage for stage in stages[: min(count.value, _STAGES_MAX)] if stage.count]
        return {
            stage.name.decode(): {"seconds": stage.sum_us / 1e6, "count": stage.count, "at_most": list(stage.at_most)}
            for stage in known
        }

    @staticmethod
    def _part(
        user: int,
        operation: Operation,
        transfers: Sequence[int],
        content: bytes,
        tensors: int,
        first_block: int,
        blocks: Sequence[int],
    ) -> _HandOff:
        numbers = (ctypes.c_uint64 * len(blocks))(*blocks)
        named = (ctypes.c_uint8 * 16).from_buffer_copy(content)
        each = (ctypes.c_uint64 * len(transfers))(*transfers)
        part = _HandOff(user, operation, first_block, named, tensors, numbers, len(blocks), each, len(transfers))
        part.bytes = ctypes.sizeof(part)
        return part

    def statistics(self) -> dict[str, int]:
        """The counters of `kvasir_kv_statistics`."""
        counters = _Statistics()
        self._library.call("stats", self._handle, ctypes.byref(counters), ctypes.sizeof(counters))
        return {field[0]: getattr(counters, field[0]) for field in _Statistics._fields_}


def _microseconds(seconds: float) -> int:
    """Of a deadline; none at all is 0."""
    return min(max(round(seconds * 1e6), 1), 2**32 - 1) if seconds > 0 else 0


def _count(identities: bytes) -> int:
    if len(identities) % IDENTITY_BYTES:
        raise ValueError(f"{len(identities)} bytes are no number of identities of {IDENTITY_BYTES}")
    return len(identities) // IDENTITY_BYTES
