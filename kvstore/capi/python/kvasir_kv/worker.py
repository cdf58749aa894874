"""The worker's side: carries out what the scheduler's side has decided, without waiting for any of it.

One thread calls it, the engine's own, a few times in each step. Transfers that the library has no room for wait here
and are tried again at the next step; the scheduler's side bounds how many there can be.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import identity
from .handoff import HeadPartition, Leg
from .library import EVENTS_AT_ONCE, Completion, ConversationEvent, Ending, Operation, Plan, Status, Store, StoreError, TierEvent
from .messages import Answer, Load, Push, Question, Report, Save, Step, Tally, TierChange

_log = logging.getLogger("vllm.kvasir_kv.worker")

_OWN_NUMBERS = 1 << 62
"""Numbers that a worker gives begin here: of pushes, and of fetches for further groups. Those of the scheduler's jobs and questions are smaller."""

_FETCHING_SHARE = 4
"""Blocks asked of other nodes at a time may have this part of host memory, as a divisor."""

_EVENT_BATCHES_PER_STEP = 4
"""Of `EVENTS_AT_ONCE` events; the rest waits for the next step."""

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


@dataclass
class HandOff:
    """What a worker needs to hand blocks over: their tensors, cut into these layers, and this process's host.

    `rank` is its own among those that share out each block's heads as `shares` say.
    """

    tensors: int
    layers: Sequence[str]
    host: str
    deadline: float
    shares: HeadPartition = HeadPartition(1, 1)
    rank: int = 0


@dataclass
class _Fetch:
    """A prompt's blocks that other nodes are asked for: those of the group that needs all, and what the others need before their end. Where nobody
    has told of that end, the others follow when the first have come."""

    question: Question
    deadline: float
    """Seconds for each fetch of the store. A step of the engine may pass before its completion is seen, which is not the nodes' fault."""
    under_way: int = 0
    """Fetches of the store whose completions are to come."""
    end: int = 0
    """The end that the other groups were asked for."""


@dataclass
class _Pushing:
    """A push, layer by layer."""

    job: Push
    transfers: list[int]
    """One for each process that takes a share; none when others send the same."""
    copied: int
    """The least number of blocks that a layer was copied of."""
    left: int
    """Layers that are not copied yet."""
    computed: int = 0
    submitted: int = 0


class Worker:
    """Owns an open store and the engine's registered tensors. `block_bytes` are those of a block, for the counters."""

    def __init__(
        self,
        store: Store,
        tensors: int,
        key: bytes,
        block_bytes: int,
        record: Callable[[], Event] = Event,
        handoff: HandOff | None = None,
        tells_tiers: bool = False,
        groups: int = 1,
    ) -> None:
        """`tells_tiers`: what the store's tiers gain and lose is reported. The first of an engine's workers does that for all, which
        store and lose the same blocks, or nearly so. `groups` of layers have as many blocks and events each."""
        self._store = store
        self._tensors = tensors
        self._key = key
        self._block_bytes = block_bytes
        self._record = record
        self._loads: deque[_Transfer] = deque()
        self._saves: deque[_Transfer] = deque()
        self._under_way: dict[int, _Transfer] = {}
        self._fetches: dict[int, _Fetch] = {}
        """By the question's number, or one of the worker's own for a further group."""
        self._questions: deque[Question] = deque()
        """Questions that wait: what all of them bring together would not fit into host memory."""
        self._fetching = 0
        """The most blocks that fetches under way may bring."""
        self._fetching_max = 0
        self._handoff = handoff
        self._tells_tiers = tells_tiers
        self._groups = groups
        self._layer_of = {name: at for at, name in enumerate(handoff.layers)} if handoff is not None else {}
        self._pushing: list[_Pushing] = []
        """Those of this step, and those that the queue had no room for."""
        self._pushed: dict[int, tuple[_Pushing, int, Event]] = {}
        """By the number of each submission, with its layers and the engine's work that it waits for."""
        self._computed: set[int] = set()
        """Layers that the engine has computed in this step, and how many of them there are from the first on."""
        self._computed_layers = 0
        self._sent_at: dict[int, int] = {}
        """Bytes that had been sent when a transfer's first push began."""
        self._unwanted: set[int] = set()
        """Transfers of which some more will be pushed and that nobody waits for."""
        self._numbers = _OWN_NUMBERS
        self._report = Report()
        self._arrived: set[str] = set()
        self._missing: set[int] = set()
        self._failed_loads: set[str] = set()
        self._counters: Counter[str] = Counter()
        self._told_at: float | None = None
        self._untold = 0

    def look(self, question: Question) -> Answer:
        """How many blocks are worth loading; none when the store cannot be asked."""
        plan = self._plan(question, question.may_fetch)
        return Answer(plan.blocks, plan.deadline, plan.operation == Operation.FETCH)

    def _plan(self, question: Question, may_fetch: bool) -> Plan:
        names = identity.identities(self._key, question.wanted(question.hashes))
        groups = [(identity.identities(self._key, question.wanted(hashes)), window) for hashes, window in question.groups]
        tokens, block_tokens, queued = question.tokens, question.block_tokens, question.queued_tokens
        try:
            others = None if question.others is None else max(question.others - question.held, 0)
            return self._store.plan(names, question.held, tokens, block_tokens, queued, may_fetch, groups, others)
        except StoreError as problem:
            self._failed("plan", str(problem))
            return Plan(None)

    def begin(self, step: Step) -> None:
        """Takes what is to be pushed of a step, before the engine computes it, and ends hand-offs."""
        self._computed.clear()
        self._computed_layers = 0
        for leg in step.cancelled:
            self._cancel(leg)
        for leg in step.declined:
            self._decline(leg)
        for job in step.pushes:
            self._pushing.append(_Pushing(job, self._transfers(job.leg), len(job.blocks), len(self._layer_of)))
            self._sent_at.setdefault(job.leg.transfer, self._sent())

    def load(self, step: Step) -> None:
        """Begins the loads of a step, and answers its questions; before or after the engine computes it."""
        for prefill in step.prefills:
            self._quietly("observe_prefill", lambda: self._store.observe_prefill(prefill.tokens, prefill.context, prefill.seconds))
        self._questions.extend(step.questions)
        for last in step.continued:
            self._tell_conversation(ConversationEvent.CONTINUED, [last])
        self._ask()
        self._begin(self._loads, step.loads)
        # Names of whole conversations are hashed when the loads are under way.
        for chain in step.idle:
            self._tell_conversation(ConversationEvent.IDLE, chain)
        for retention in step.retentions:
            names = identity.identities(self._key, retention.hashes)
            self._quietly("retain", lambda: self._store.retain(names, retention.seconds))

    def _tell_conversation(self, event: ConversationEvent, hashes: list[bytes]) -> None:
        names = identity.identities(self._key, hashes)
        self._quietly("conversation", lambda: self._store.conversation(event, names))

    def _ask(self) -> None:
        """Answers questions, or asks other nodes first, as far as there is room for their blocks."""
        while self._questions:
            question = self._questions[0]
            if question.may_fetch and self._fetches and self._fetching + question.blocks_max > self._fetching_limit():
                return
            self._questions.popleft()
            plan = self._plan(question, question.may_fetch)
            if plan.operation == Operation.FETCH:
                fetch = _Fetch(question, plan.deadline)
                if self._fetch(fetch, question.number, question.hashes, question.held):
                    self._fetching += question.blocks_max
                    self._fetch_groups(fetch, question.others or 0)
                    continue
                plan = self._plan(question, False)
            self._report.answers[question.number] = Tally(1, plan.blocks, plan.deadline)

    def _fetch(self, fetch: _Fetch, number: int, hashes: list[bytes], held: int) -> bool:
        """Asks other nodes for blocks that are not here, behind the first `held`. False when it cannot."""
        try:
            names = identity.identities(self._key, hashes)
            taken = self._store.fetch(number, names, held, fetch.deadline, fetch.question.tenant)
        except StoreError as problem:
            self._failed("fetch", str(problem))
            return False
        if taken:
            self._fetches[number] = fetch
            fetch.under_way += 1
        return taken

    def _fetch_groups(self, fetch: _Fetch, blocks: int) -> None:
        """Asks for what the other groups of layers need before the end of so many blocks of the prompt."""
        question = fetch.question
        end = min(blocks, len(question.hashes))
        if end <= question.held or end == fetch.end:
            return
        fetch.end = end
        for hashes, window in question.groups:
            self._numbers += 1
            # What is not fetched is computed.
            self._fetch(fetch, self._numbers, hashes[:end], max(end - window, question.held))

    def _fetching_limit(self) -> int:
        """A part of host memory, so that blocks stay there until they are loaded."""
        if self._fetching_max == 0:
            self._fetching_max = max(self.statistics().get("bytes_max", 0) // self._block_bytes // _FETCHING_SHARE, 1)
        return self._fetching_max

    def _fetched(self, completion: Completion) -> None:
        fetch = self._fetches.pop(completion.user)
        question, fetch.under_way = fetch.question, fetch.under_way - 1
        if completion.failure:
            self._failed("fetch", completion.failure)
        elif completion.user == question.number:
            self._fetch_groups(fetch, completion.blocks)
        if fetch.under_way:
            return
        self._fetching -= question.blocks_max
        plan = self._plan(question, False)
        self._report.answers[question.number] = Tally(1, plan.blocks, plan.deadline)

    def save(self, step: Step) -> None:
        """Begins the saves of a step; to be called when the engine's work on their blocks has been submitted."""
        for job in step.pushes:
            if job.is_last and (before := self._sent_at.pop(job.leg.transfer, None)) is not None:
                self._counters["early_bytes"] += self._sent() - before
        self._begin(self._saves, step.saves)
        self._push(len(self._layer_of))

    def computed(self, layer: str) -> None:
        """A layer of this step is computed: its blocks are sent while the next one is."""
        if not self._pushing or (at := self._layer_of.get(layer)) is None:
            return
        # Layers leave in the order of the tensors, in whatever order the engine computes them.
        self._computed.add(at)
        while self._computed_layers in self._computed:
            self._computed_layers += 1
        self._push(self._computed_layers)

    def poll(self) -> None:
        """Notes what is over. To be called once in each step."""
        self._submit()
        while finished := self._store.poll():
            for completion in finished:
                if completion.user in self._fetches:
                    self._fetched(completion)
                elif completion.user >= _OWN_NUMBERS:
                    self._layers_copied(completion)
                else:
                    self._finish(completion)
        self._submit()
        self._ask()
        self._push(0)

    def take_report(self) -> Report:
        """What is to be told to the scheduler's side."""
        if self._tells_tiers:
            self._note_tiers()
        report, self._report = self._report, Report()
        return report

    def _note_tiers(self) -> None:
        """Moves tier events of the store into the report; consecutive events of one tier and kind form one `TierChange`.

        Blocks with a salt (an adapter, or saved since a reset) go by hashes that no listener knows.
        """
        events: list[TierEvent] = []
        try:
            for _ in range(_EVENT_BATCHES_PER_STEP * self._groups):
                taken = self._store.take_events()
                events += taken
                if len(taken) < EVENTS_AT_ONCE:
                    break
        except StoreError as problem:
            self._failed("take_events", str(problem))
        tiers = self._report.tiers
        for event in events:
            if not tiers or (tiers[-1].tier, tiers[-1].is_stored) != (event.tier, event.is_stored):
                tiers.append(TierChange(event.tier, event.is_stored, []))
            tiers[-1].hashes.append(identity.engine_hash(event.identity))

    @property
    def tag(self) -> str:
        """How the names of this worker's blocks begin."""
        return identity.tag(self._key)

    def take_arrived(self) -> set[str]:
        """Requests whose loads are over, also if they failed."""
        arrived, self._arrived = self._arrived, set()
        return arrived

    def take_missing(self) -> set[int]:
        """Blocks of the engine that were to be loaded and hold nothing of use."""
        missing, self._missing = self._missing, set()
        return missing

    def take_failed(self) -> set[str]:
        """Requests whose loads are over and have brought nothing of use, because a part is missing."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_counters(self) -> dict[str, int]:
        """What happened since the last call."""
        counters, self._counters = self._counters, Counter()
        return dict(counters)

    def statistics(self) -> dict[str, int]:
        """The store's own counters and those of hand-offs; nothing when it cannot be asked."""
        try:
            handed_over = self._store.handoff_statistics() if self._handoff is not None else {}
            return self._store.statistics() | handed_over
        except StoreError as problem:
            self._failed("stats", str(problem))
            return {}

    def rail_statistics(self) -> dict[str, dict[str, int]]:
        """Counters of each transport of hand-offs; nothing when there are none, or they cannot be asked."""
        try:
            return self._store.rail_statistics() if self._handoff is not None else {}
        except StoreError as problem:
            self._failed("rails", str(problem))
            return {}

    def node_statistics(self) -> dict[str, dict[str, int]]:
        """State and counters of each node of the remote tier; nothing when there are none, or they cannot be asked."""
        try:
            return self._store.node_statistics()
        except StoreError as problem:
            self._failed("nodes", str(problem))
            return {}

    def stage_times(self) -> dict[str, dict[str, Any]]:
        """How long the stages of hand-offs took; nothing when there are none, or they cannot be asked."""
        try:
            return self._store.stage_times() if self._handoff is not None else {}
        except StoreError as problem:
            self._failed("stages", str(problem))
            return {}

    def close(self) -> None:
        """Waits until nobody touches the engine's memory any more, and ends the store."""
        self._loads.clear()
        self._saves.clear()
        self._questions.clear()
        self._pushing.clear()
        try:
            if self._handoff is not None:
                self._store.unregister(self._handoff.tensors)
            self._store.unregister(self._tensors)
        finally:
            self._store.close()

    def _begin(self, waiting: deque[_Transfer], jobs: list[Save] | list[Load]) -> None:
        if jobs:
            # One event stands for all work that has been submitted so far, also of earlier steps.
            event = self._record()
            waiting.extend(_Transfer(job, event) for job in jobs)
            self._submit()

    def _transfers(self, leg: Leg) -> list[int]:
        """The transfers of this process in a hand-off to another engine."""
        return leg.pushed(self._handoff.shares, self._handoff.rank) if self._handoff is not None else []

    def _senders(self, leg: Leg) -> dict[int, str]:
        """The transfers of this process in a hand-off from another engine, each with the way to its sender."""
        handoff = self._handoff
        return leg.expected(handoff.shares, handoff.rank, handoff.host) if handoff is not None else {}

    def _sent(self) -> int:
        """Bytes that were sent to other engines so far."""
        try:
            return self._store.handoff_statistics()["bytes_sent"]
        except StoreError:
            return 0

    def _cancel(self, leg: Leg) -> None:
        self._unwanted.discard(leg.transfer)
        self._sent_at.pop(leg.transfer, None)
        for pushing in [one for one in self._pushing if one.job.leg == leg]:
            # What was not submitted is not submitted any more: it would begin the hand-off anew.
            self._pushing.remove(pushing)
            self._settle(pushing, len(self._layer_of) - pushing.submitted, 0)
        for waiting in [one for one in self._loads if isinstance(one.job, Load) and one.job.source is not None]:
            if waiting.job.source.leg == leg:
                self._loads.remove(waiting)
                self._under_way[waiting.job.job] = waiting
                self._finish(Completion(waiting.job.job, Status.MISS, 0, "", Ending.CANCELLED))
        for transfer in self._transfers(leg) if leg.source is None else list(self._senders(leg)):
            self._quietly("cancel_handoff", lambda: self._store.cancel_handoff(transfer))

    def _decline(self, leg: Leg) -> None:
        for transfer, way in self._senders(leg).items():
            if way:
                self._quietly("decline_handoff", lambda: self._store.decline_handoff(transfer, way))

    def _quietly(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except StoreError as problem:
            self._failed(what, str(problem))

    def _push(self, computed: int) -> None:
        """Submits the layers that are computed, of this step's pushes so many; what the queue has no room for waits."""
        for pushing in self._pushing:
            # Those of earlier steps are computed as a whole.
            pushing.computed = max(pushing.computed, computed)
        ready = [pushing for pushing in self._pushing if pushing.submitted < pushing.computed]
        # One event stands for all work that has been submitted so far.
        event = self._record() if ready else Event()
        for pushing in ready:
            if not self._push_one(pushing, event):
                break
        self._pushing = [one for one in self._pushing if one.submitted < len(self._layer_of)]

    def _push_one(self, pushing: _Pushing, event: Event) -> bool:
        """Submits the layers of a push that are computed; false when the queue is full."""
        assert self._handoff is not None
        job, layers = pushing.job, range(pushing.submitted, pushing.computed)
        self._numbers += 1
        number, failure = self._numbers, ""
        is_unwanted = not pushing.transfers or job.leg.transfer in self._unwanted
        if not is_unwanted:
            try:
                taken = self._store.push(
                    number,
                    pushing.transfers,
                    job.content,
                    self._handoff.tensors,
                    job.first_block,
                    job.blocks,
                    layers,
                    event.handle,
                )
            except StoreError as problem:
                taken, failure = True, str(problem)
                for transfer in pushing.transfers:
                    self._quietly("cancel_handoff", lambda: self._store.cancel_handoff(transfer))
            if not taken:
                self._counters["throttled_transfers"] += 1
                return False
        pushing.submitted = pushing.computed
        self._pushed[number] = (pushing, len(layers), event)
        if failure or is_unwanted:
            blocks = 0 if pushing.transfers else len(job.blocks)
            self._layers_copied(Completion(number, Status.OK, blocks, failure))
        if job.is_last and pushing.submitted == len(self._layer_of):
            self._unwanted.discard(job.leg.transfer)
            if pushing.transfers:
                self._quietly("end_handoff", lambda: self._store.end_handoff(pushing.transfers[0]))
        return True

    def _layers_copied(self, completion: Completion) -> None:
        pushing, layers, _ = self._pushed.pop(completion.user)
        job, blocks = pushing.job, completion.blocks
        if completion.failure:
            self._failed("push", completion.failure)
        elif completion.status == Status.THROTTLED:
            self._failed("push", "no memory for its blocks: transfer.capacity, or device.handoff_capacity, is too small")
        if blocks < len(job.blocks) and pushing.submitted < len(self._layer_of):
            # Nobody waits for it any more, or there was no memory.
            self._unwanted.add(job.leg.transfer)
        self._settle(pushing, layers, blocks)

    def _settle(self, pushing: _Pushing, layers: int, blocks: int) -> None:
        """So many layers of a push are over, of which so many blocks were copied. With the last one the push is."""
        job = pushing.job
        pushing.copied = min(pushing.copied, blocks)
        pushing.left -= layers
        if pushing.left == 0:
            self._report.saved[job.job] = Tally(1, pushing.copied)
            self._counters["handed_over_blocks"] += pushing.copied
            self._counters["handed_over_bytes"] += pushing.copied * self._block_bytes
            self._counters["unwanted_blocks"] += len(job.blocks) - pushing.copied

    def _submit(self) -> None:
        # Somebody waits for a load, and nobody for a save, which takes no room that a load has been refused.
        while waiting := self._loads or self._saves:
            transfer = waiting[0]
            job = transfer.job
            try:
                taken = self._begin_one(transfer)
            except StoreError as problem:
                waiting.popleft()
                self._under_way[job.job] = transfer
                self._finish(Completion(job.job, problem.status, 0, str(problem)))
                continue
            if not taken:
                self._counters["throttled_transfers"] += 1
                return
            waiting.popleft()
            self._under_way[job.job] = transfer

    def _begin_one(self, transfer: _Transfer) -> bool:
        """Submits a save or a load; false when the queue is full."""
        job = transfer.job
        source = job.source if isinstance(job, Load) else None
        if source is None:
            names = identity.identities(self._key, job.hashes)
            chain, tenant = None, 0
            if isinstance(job, Save):
                tenant = job.tenant
                parent = None if job.parent is None else identity.identities(self._key, [job.parent])
                chain = (job.first, parent)
            deadline = job.deadline if isinstance(job, Load) else 0.0
            return self._store.submit(
                job.job, transfer.operation, self._tensors, names, job.blocks, transfer.event.handle, chain, deadline, tenant
            )
        senders = self._senders(source.leg)
        if self._handoff is None or not all(senders.values()):
            raise StoreError("expect", Status.INVALID_ARGUMENT, f"no transport leads to {source.leg.source}")
        tensors, deadline = self._handoff.tensors, self._handoff.deadline
        return self._store.expect(
            job.job,
            senders,
            source.content,
            tensors,
            source.first_block,
            job.blocks,
            deadline,
            transfer.event.handle,
        )

    def _finish(self, completion: Completion) -> None:
        number, blocks, failure = completion.user, completion.blocks, completion.failure
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
        if not job.all_or_nothing:
            self._missing.update(job.blocks[blocks:])
        elif missing:
            self._failed_loads.add(job.request)
        if job.source is not None:
            self._received(job, completion)
            return
        self._counters["loaded_blocks"] += blocks
        self._counters["loaded_bytes"] += blocks * self._block_bytes
        self._counters["missing_blocks"] += missing

    def _received(self, job: Load, completion: Completion) -> None:
        missing = len(job.blocks) - completion.blocks
        self._counters["received_blocks"] += completion.blocks
        self._counters["received_bytes"] += completion.blocks * self._block_bytes
        self._counters["unreceived_blocks"] += missing
        if missing and not completion.failure and completion.ending != Ending.CANCELLED:
            ending = Ending(completion.ending).name.lower().replace("_", " ")
            self._failed("hand-off", f"{missing} of {len(job.blocks)} blocks of {job.request} did not come: {ending}")

    def _failed(self, what: str, text: str) -> None:
        self._counters["failures"] += 1
        now = time.monotonic()
        if self._told_at is not None and now - self._told_at < _QUIET_SECONDS:
            self._untold += 1
            return
        more = f" ({self._untold} more failures since the last line)" if self._untold else ""
        _log.warning("Kvasir's store: %s: %s%s", what, text, more)
        self._told_at, self._untold = now, 0
