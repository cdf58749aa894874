"""The worker's side: carries out what the scheduler's side has decided, without waiting for any of it.

One thread calls it, the engine's own, a few times in each step. Transfers that the library has no room for wait here
and are tried again at the next step; the scheduler's side bounds how many there can be.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from . import identity
from .library import Operation, Store, StoreError
from .messages import Load, Report, Save, Step, Tally

_log = logging.getLogger("vllm.kvasir_kv.worker")

_QUIET_SECONDS = 10.0
"""Between two lines of the log about failures: a store that is broken fails each transfer of each step."""


class Event:
    """A point in a device's work; on the host there is nothing to wait for."""

    handle = 0


@dataclass
class _Transfer:
    job: Save | Load
    event: Event

    @property
    def operation(self) -> Operation:
        return Operation.LOAD if isinstance(self.job, Load) else Operation.SAVE


class Worker:
    """Owns an open store and the engine's registered tensors. `block_bytes` are those of a block, for the counters."""

    def __init__(
        self, store: Store, tensors: int, key: bytes, block_bytes: int, record: Callable[[], Event] = Event
    ) -> None:
        self._store = store
        self._tensors = tensors
        self._key = key
        self._block_bytes = block_bytes
        self._record = record
        self._loads: deque[_Transfer] = deque()
        self._saves: deque[_Transfer] = deque()
        self._under_way: dict[int, _Transfer] = {}
        self._report = Report()
        self._arrived: set[str] = set()
        self._missing: set[int] = set()
        self._counters: Counter[str] = Counter()
        self._told_at: float | None = None
        self._untold = 0

    def match(self, hashes: list[bytes]) -> int:
        """How many blocks are in the store, from the first on; none when it cannot be asked."""
        try:
            return self._store.match(identity.identities(self._key, hashes))
        except StoreError as problem:
            self._failed("match", str(problem))
            return 0

    def load(self, step: Step) -> None:
        """Begins the loads of a step, and answers its questions."""
        for question in step.questions:
            self._report.answers[question.number] = Tally(1, self.match(question.hashes))
        self._begin(self._loads, step.loads)

    def save(self, step: Step) -> None:
        """Begins the saves of a step; to be called when the engine's work on their blocks has been submitted."""
        self._begin(self._saves, step.saves)

    def poll(self) -> None:
        """Notes what is over. To be called once in each step."""
        self._submit()
        while finished := self._store.poll():
            for completion in finished:
                self._finish(completion.user, completion.blocks, completion.failure)
        self._submit()

    def take_report(self) -> Report:
        """What is to be told to the scheduler's side."""
        report, self._report = self._report, Report()
        return report

    def take_arrived(self) -> set[str]:
        """Requests whose loads are over, also if they failed."""
        arrived, self._arrived = self._arrived, set()
        return arrived

    def take_missing(self) -> set[int]:
        """Blocks of the engine that were to be loaded and hold nothing of use."""
        missing, self._missing = self._missing, set()
        return missing

    def take_counters(self) -> dict[str, int]:
        """What happened since the last call."""
        counters, self._counters = self._counters, Counter()
        return dict(counters)

    def statistics(self) -> dict[str, int]:
        """The store's own counters; nothing when it cannot be asked."""
        try:
            return self._store.statistics()
        except StoreError as problem:
            self._failed("stats", str(problem))
            return {}

    def close(self) -> None:
        """Waits until nobody touches the engine's memory any more, and ends the store."""
        self._loads.clear()
        self._saves.clear()
        try:
            self._store.unregister(self._tensors)
        finally:
            self._store.close()

    def _begin(self, waiting: deque[_Transfer], jobs: list[Save] | list[Load]) -> None:
        if jobs:
            # One event stands for all work that has been submitted so far, also of earlier steps.
            event = self._record()
            waiting.extend(_Transfer(job, event) for job in jobs)
            self._submit()

    def _submit(self) -> None:
        # Somebody waits for a load, and nobody for a save, which takes no room that a load has been refused.
        while waiting := self._loads or self._saves:
            transfer = waiting[0]
            job = transfer.job
            try:
                names = identity.identities(self._key, job.hashes)
                taken = self._store.submit(
                    job.job, transfer.operation, self._tensors, names, job.blocks, transfer.event.handle
                )
            except StoreError as problem:
                waiting.popleft()
                self._under_way[job.job] = transfer
                self._finish(job.job, 0, str(problem))
                continue
            if not taken:
                self._counters["throttled_transfers"] += 1
                return
            waiting.popleft()
            self._under_way[job.job] = transfer

    def _finish(self, number: int, blocks: int, failure: str) -> None:
        job = self._under_way.pop(number).job
        if failure:
            self._failed("load" if isinstance(job, Load) else "save", failure)
        missing = len(job.blocks) - blocks
        if isinstance(job, Save):
            self._report.saved[number] = Tally(1, blocks)
            self._counters["saved_blocks"] += blocks
            self._counters["saved_bytes"] += blocks * self._block_bytes
            self._counters["unsaved_blocks"] += missing
            return
        self._report.loaded[number] = Tally(1, blocks)
        self._arrived.add(job.request)
        self._missing.update(job.blocks[blocks:])
        self._counters["loaded_blocks"] += blocks
        self._counters["loaded_bytes"] += blocks * self._block_bytes
        self._counters["missing_blocks"] += missing

    def _failed(self, what: str, text: str) -> None:
        self._counters["failures"] += 1
        now = time.monotonic()
        if self._told_at is not None and now - self._told_at < _QUIET_SECONDS:
            self._untold += 1
            return
        more = f" ({self._untold} more failures since the last line)" if self._untold else ""
        _log.warning("Kvasir's store: %s: %s%s", what, text, more)
        self._told_at, self._untold = now, 0
