"""The scheduler's side: decides which blocks are loaded and which are saved.

A block is saved in the step that completes it. Until the workers say that the copy is over, its reference count in the
engine's pool is one higher, so that it is not given to another request, whatever becomes of its own: that one may
finish, be preempted or be aborted, and nothing waits. How many blocks may be held so is bounded; above, saves wait
while their request runs and are given up when it ends.

A request loads once each time it is admitted. While it loads, the engine keeps its blocks and computes others; what
does not come is computed.

Blocks are named by the engine's own hashes here. Where the worker lives in this process, it is asked at once how many
blocks of a prompt are worth loading. Where workers are processes of their own, the question goes with one step and the answer
comes with its result, so that the request waits for one step. With stores that bring blocks from other nodes a request whose
prompt is not all here waits, once, until these have been asked and what they have has come, if that is worth the time.

The stores know what is worth loading: they measure their tiers, and learn from `step_finished` how fast the engine computes prompts. A load ends
at a deadline, beyond which it would cost more than it saves; the blocks that have not come are computed.

Layers may be in several groups that have blocks of their own (hybrid models): those with a sliding window, for one, need only the
last blocks before the next token, and the engine gives the earlier ones up. A request loads at once what all groups need; when a
part of that is missing, the whole load has failed.

A request may be one leg of a hand-off (see `handoff`). The engine that computes its prompt pushes each whole block in the
step that completes it; such a block, too, is held until it was copied. The engine that generates from it loads, once,
the blocks that it lacks of those before the prompt's last token from there, as it would from the store: what does not come is
computed. Both name the transfer's content by the hash of the last of these blocks.

The engine calls `reset` also when its own cache could not be emptied. Until a reset finds it empty, what is in there
may have been made with other weights: a request that begins with such blocks is neither saved nor loaded.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import handoff, identity
from .conversations import IdleConversations
from .handoff import Leg
from .messages import Answer, Load, Prefill, Push, Question, Report, Retain, Save, Source, Step, TierChange

Look = Callable[[Question], Answer]
BlocksOf = Callable[[str], Sequence[Sequence[int]]]
"""Gives the numbers of a request's blocks, in each of the engine's groups of layers."""

_WHOLE_PREFIX = (1 << 64) - 1
"""The window of a group that needs all blocks."""

_LOOK_STEPS = 8
"""A look into the store of a worker in this process holds for so many steps: the engine asks for the request at the head of its
queue in each step until there is room for it, and a look hashes a name for each block of its prompt. What has gone by then is
computed, what has come is found by the next look."""


_STEPS_UNDER_WAY_MAX = 64
"""Far more than an engine has; older ones are forgotten."""

_PREFILL_TOKENS_MIN = 16
"""Steps with fewer tokens of prompts say little of how fast prompts are computed."""


class Block(Protocol):
    """A block of the engine's pool."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> object | None:
        """Its name in the engine's own cache, if it is in there."""


class Pool(Protocol):
    """The engine's pool of blocks."""

    blocks: Sequence[Block]

    def touch(self, blocks: Sequence[Block]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None: ...


@dataclass
class _Tracked:
    """What is known of a request. Its blocks are counted from the first one."""

    request: Any
    salt: bytes
    tenant: int = 0
    offered: int = 0
    """Blocks before this one need no look any more."""
    loads: int = 0
    loaded: range = range(0)
    """Its blocks that were loaded, in all groups that needed them."""
    first: int = 0
    """Where the blocks begin that were last looked for."""
    computed: int = 0
    """Tokens that the engine had when it last asked for this request."""
    look: tuple[int, int, Answer] | None = None
    """The last look into the store of a worker in this process: where its blocks began and ended, and what was worth loading."""
    look_until: int = 0
    """The step from which on that does not hold any more."""
    asked: int | None = None
    """Where the blocks begin that the workers were asked for."""
    question: int = 0
    answer: int | None = None
    deadline: float = 0.0
    """Seconds that its load may take."""
    is_stale: bool = False
    """Its blocks were computed before a reset, or may have been, or follow such: they are neither saved nor loaded."""
    leg: Leg | None = None
    """What is still to be done of its hand-off: none once that is under way or over (to generate), or pushed (to compute)."""
    pushed: int = 0
    receiving: Leg | None = None
    """The hand-off whose blocks it waits for."""
    group_names: dict[int, list[bytes]] = field(default_factory=dict)
    """Names of its blocks in the other groups, as far as they were needed."""
    described: list[int] = field(default_factory=list)
    """Short hashes of its blocks in `Scheduler._described_blocks`."""


@dataclass
class _StepUnderWay:
    """A step that the engine has begun: its prompts' tokens, and the pairs of one of them and one that it attends to."""

    at: float
    tokens: int = 0
    pairs: float = 0.0

    def add(self, before: int, tokens: int) -> None:
        """Adds tokens of a prompt that are computed behind `before` others."""
        self.tokens += tokens
        self.pairs += tokens * (before + tokens / 2)

    def prefill(self, seconds: float) -> Prefill:
        """One prompt of as many tokens, behind as many as give the same pairs."""
        return Prefill(self.tokens, max(round(self.pairs / self.tokens - self.tokens / 2), 0), seconds)


class Scheduler:
    """See the module's documentation."""

    def __init__(
        self,
        block_tokens: int,
        hash_tokens: int,
        workers: int,
        saving_blocks_max: int,
        load_blocks_min: int = 1,
        nearby: Callable[[], Look | None] = lambda: None,
        adapter_salt: Callable[[Any], bytes] = lambda request: b"",
        is_offloading: bool = True,
        is_handing_over: bool = False,
        is_fetching: bool = False,
        is_prefetching: bool = False,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """`hash_tokens` lie between two of the engine's hashes; `nearby` gives a look into the store of a worker in this process.

        `is_offloading`: blocks are kept in the store. `is_handing_over`: the workers can hand blocks to other engines.
        `is_fetching`: the stores bring blocks from other nodes or object storage. `is_prefetching`: they bring the blocks of idle
        conversations up before these go on. `windows` has for each of the engine's groups
        of layers how many blocks before the next token these need, none for all.
        """
        self._block_tokens = block_tokens
        self._hashes_per_block = block_tokens // hash_tokens
        self._workers = workers
        self._saving_blocks_max = saving_blocks_max
        self._load_blocks_min = max(load_blocks_min, 1)
        self._nearby = nearby
        self._adapter_salt = adapter_salt
        self._is_offloading = is_offloading
        self._is_handing_over = is_handing_over
        self._is_fetching = is_fetching
        self._is_prefetching = is_prefetching
        self._windows = tuple(windows)
        self._prefix_group = self._windows.index(None) if None in self._windows else 0
        """The group whose blocks are named by the engine's hashes alone: one that needs the whole prefix, if there is one."""
        self._all_or_nothing = self._windows != (None,)
        """Whether a part of a load is useless: a window may end behind the block that is missing."""
        self._pool: Pool | None = None
        self._requests: dict[str, _Tracked] = {}
        self._step = Step()
        self._held: dict[int, list[Block]] = {}
        """Blocks of a save or a push, by its job."""
        self._saves: dict[int, list[int]] = {}
        self._saving: set[int] = set()
        self._loading: dict[int, tuple[str, int]] = {}
        """The request of a load, and how many blocks are to come."""
        self._asking: dict[int, str] = {}
        self._reports = Report()
        self._tiers: list[TierChange] = []
        self._described_blocks: dict[int, list[tuple[_Tracked, int]]] = {}
        """Requests that load a block or fetch it from other nodes, with its number in each, by the engine's short hash."""
        self._numbers = 0
        self._steps = 0
        self._under_way: deque[_StepUnderWay] = deque(maxlen=_STEPS_UNDER_WAY_MAX)
        """Steps whose results have not come."""
        self._last_finished_at = 0.0
        """When the last one's came."""
        self._is_warm = False
        """Whether a step with _PREFILL_TOKENS_MIN tokens of prompts has finished; the first one is not measured."""
        self._uncomputed_tokens: dict[str, int] = {}
        """Tokens of prompts that are still to be computed, of requests that the engine has admitted."""
        self._idle_conversations = IdleConversations()
        self._epoch = b""
        self._is_cache_stale = False
        self._counters: Counter[str] = Counter()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._block_tokens

    def bind(self, pool: Pool) -> None:
        """Takes the engine's pool, whose blocks are held while they are saved."""
        self._pool = pool

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the computed ones that can be loaded, and whether they are loaded between steps.

        None: not known yet; the engine asks again in the next step.
        """
        tracked = self._track(request)
        tracked.computed = computed_tokens
        # It may have been preempted: it waits again, and nothing of it is computed before itself.
        self._uncomputed_tokens.pop(request.request_id, None)
        tracked.is_stale |= self._is_cache_stale and computed_tokens > 0
        first, odd = divmod(computed_tokens, self._block_tokens)
        is_wanted = not (odd or request.skip_reading_prefix_cache or tracked.is_stale)
        if tracked.leg is not None and tracked.leg.source is not None:
            stop = self._prompt_blocks(tracked)
            if is_wanted and stop > first:
                tracked.first = first
                return (stop - first) * self._block_tokens, True
            self._refuse(tracked)
        if not self._is_offloading:
            return 0, False
        # The last token is always computed: its output is what the request is for.
        stop = min((request.num_tokens - 1) // self._block_tokens, self._hashed(request))
        may_load = tracked.loads <= request.num_preemptions and stop - first >= self._load_blocks_min
        if not (is_wanted and may_load):
            return 0, False
        stored = self._stored(tracked, first, stop)
        if stored is None or stored > 0:
            self._describe(tracked, first, self._hashed(request))
        if stored is None:
            return None, False
        if stored < self._load_blocks_min:
            return 0, False
        return stored * self._block_tokens, True

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has given a request its blocks, of each group of layers, of which those for `external_tokens` are to be loaded."""
        tracked = self._track(request)
        tracked.asked = tracked.answer = tracked.look = None
        self._uncomputed_tokens[request.request_id] = request.num_tokens - tracked.computed - external_tokens
        count = external_tokens // self._block_tokens
        if count == 0:
            return
        wanted = range(tracked.first, tracked.first + count)
        if tracked.leg is not None and tracked.leg.source is not None:
            self._receive(tracked, tracked.leg, wanted, blocks[self._prefix_group])
        else:
            self._load(tracked, wanted, blocks)
        tracked.loaded = wanted

    def _receive(self, tracked: _Tracked, leg: Leg, wanted: range, numbers: Sequence[int]) -> None:
        """Waits for blocks of a prompt that another engine computes."""
        job, name = self._next_number(), tracked.request.request_id
        source = Source(leg, self._content(tracked), wanted.start)
        self._step.loads.append(Load(job, name, [], list(numbers[wanted.start : wanted.stop]), source))
        self._loading[job] = name, len(wanted)
        # Received blocks are not saved: the store's names promise how a block was computed, which the sender does not tell.
        tracked.receiving, tracked.leg = leg, None
        self._counters["awaited_blocks"] += len(wanted)

    def _load(self, tracked: _Tracked, wanted: range, blocks: Sequence[Sequence[int]]) -> None:
        """Loads from the store all that the groups of layers need of these blocks."""
        names: list[bytes] = []
        chosen: list[int] = []
        for group, numbers in enumerate(blocks):
            # Blocks that a group does not need have no place.
            needed = [at for at in range(wanted.start, min(wanted.stop, len(numbers))) if not self._is_null(numbers[at])]
            if needed:
                of_group = self._names(tracked, needed[0], needed[-1] + 1, group)
                names += [of_group[at - needed[0]] for at in needed]
                chosen += [numbers[at] for at in needed]
        job, name = self._next_number(), tracked.request.request_id
        self._step.loads.append(Load(job, name, names, chosen, None, tracked.deadline, self._all_or_nothing))
        self._loading[job] = name, len(chosen)
        tracked.loads += 1

    def next_step(self, scheduled: Mapping[str, int], blocks_of: BlocksOf) -> Step:
        """What the workers are to do in this step.

        `scheduled` are each request's tokens that are computed in it, `blocks_of` a request's blocks of each group.
        """
        begun = _StepUnderWay(time.monotonic())
        for name, tokens in scheduled.items():
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            before = tracked.request.num_computed_tokens
            computed = before + tokens
            left = tracked.request.num_tokens - computed
            if left > 0:
                self._uncomputed_tokens[name] = left
            else:
                self._uncomputed_tokens.pop(name, None)
            if before < tracked.request.num_prompt_tokens:
                begun.add(before, tokens)
            if tracked.leg is not None and tracked.leg.source is None:
                self._push(tracked, tracked.leg, computed, blocks_of)
            if self._is_offloading and not tracked.is_stale:
                self._offer(tracked, computed, blocks_of)
        step, self._step = self._step, Step()
        self._steps += 1
        self._under_way.append(begun)
        return step

    def step_finished(self) -> None:
        """The result of the oldest step under way has come. To be called for each step, those without tokens included."""
        if not self._under_way:
            return
        # The engine may have begun this step while it computed the one before.
        begun, now = self._under_way.popleft(), time.monotonic()
        seconds, self._last_finished_at = now - max(begun.at, self._last_finished_at), now
        if begun.tokens < _PREFILL_TOKENS_MIN:
            return
        if self._is_warm:
            self._step.prefills.append(begun.prefill(seconds))
        # The first such step includes the compilation of kernels and allocation at first use.
        self._is_warm = True

    def take_report(self, report: Report) -> None:
        """What workers have done; counts when all of them have."""
        self._reports.add(report)
        self._tiers += self._with_tokens(self._reports.tiers)
        self._reports.tiers = []
        complete = self._reports.take_complete(self._workers)
        for job in complete.saved:
            self._saving.difference_update(self._saves.pop(job, ()))
            self._release(self._held.pop(job))
        for job, tally in complete.loaded.items():
            name, count = self._loading.pop(job)
            tracked = self._requests.get(name)
            if tracked is not None:
                tracked.receiving = None
                # What did not come is computed, and then it is to be saved.
                if not self._all_or_nothing:
                    tracked.loaded = tracked.loaded[: tally.least]
                elif tally.least < count:
                    tracked.loaded = tracked.loaded[:0]
                tracked.offered = min(tracked.offered, tracked.loaded.stop)
        for number, tally in complete.answers.items():
            tracked = self._requests.get(self._asking.pop(number))
            # A reset, or another request of the same name, may have made the question void.
            if tracked is not None and tracked.asked is not None and tracked.question == number:
                # With windows a worker that has more may have holes behind fewer blocks.
                is_common = not self._all_or_nothing or tally.least == tally.most
                tracked.answer, tracked.deadline, tracked.look = tally.least if is_common else 0, tally.deadline, None

    def finished(self, request: Any) -> None:
        """Forgets a request. Its blocks that are being saved or loaded are still held."""
        tracked = self._requests.pop(request.request_id, None)
        self._uncomputed_tokens.pop(request.request_id, None)
        if tracked is not None:
            self._forget_description(tracked)
            self._conversation_idle(tracked)
            self._retain(tracked)
        if tracked is None:
            # It was given up before anybody looked at it: the other side waits.
            if self._is_handing_over and (leg := Leg.of(request)) is not None:
                (self._step.declined if leg.source is not None else self._step.cancelled).append(leg)
            return
        if tracked.receiving is not None:
            self._step.cancelled.append(tracked.receiving)
        elif tracked.leg is not None:
            # It was given up before its prompt was computed, or its blocks were asked for.
            self._refuse(tracked)
        if self._is_offloading and not tracked.is_stale:
            complete = self._complete_blocks(request)
            self._counters["given_up_blocks"] += max(complete - tracked.offered, 0)

    def is_waiting(self) -> bool:
        """Whether the engine has to go on stepping for the workers' reports, also when it has nothing to compute."""
        step = self._step
        return bool(self._held or self._asking or step.cancelled or step.declined or step.idle or step.retentions)

    def is_about_to_free(self) -> bool:
        """Whether blocks are held here that nobody else holds."""
        return any(block.ref_cnt == 1 for blocks in self._held.values() for block in blocks)

    def reset(self) -> bool:
        """Makes all stored blocks unreachable for this process; false, and nothing done, while blocks are loaded.

        The engine asks for it when its weights have changed. A process that starts later begins with the weights of its
        files again, and finds the blocks that were made with those.
        """
        if self._loading:
            return False
        self._epoch = os.urandom(16)
        self._is_cache_stale = not self._is_cache_empty()
        for name, tracked in list(self._requests.items()):
            self._forget_description(tracked)
            if tracked.request.num_computed_tokens == 0:
                # It has not begun: the next look at it names its blocks anew.
                del self._requests[name]
            else:
                tracked.is_stale = True
        return True

    @property
    def was_reset(self) -> bool:
        """Whether names have had a salt since a reset."""
        return bool(self._epoch)

    def take_tiers(self) -> list[TierChange]:
        """What the tiers of the workers' stores have gained and lost since the last call, in its order."""
        tiers, self._tiers = self._tiers, []
        return tiers

    def _with_tokens(self, changes: list[TierChange]) -> Iterator[TierChange]:
        """Adds the tokens of blocks that requests load or fetch: a listener may not know them."""
        for change in changes:
            if change.is_stored and self._epoch:
                # Blocks from before a reset would be taken for those of the new weights; blocks since then have other hashes.
                continue
            known = self._described_blocks.keys() & change.hashes if change.is_stored else set()
            for name in filter(known.__contains__, change.hashes):
                tracked, at = self._described_blocks[name][0]
                request, first = tracked.request, at * self._block_tokens
                parent = bytes(request.block_hashes[at * self._hashes_per_block - 1]) if at > 0 else None
                tokens = list(request.all_token_ids[first : first + self._block_tokens])
                yield TierChange(change.tier, True, [name], tokens, parent)
            rest = [name for name in change.hashes if name not in known] if known else change.hashes
            if rest:
                yield TierChange(change.tier, change.is_stored, rest)

    def _describe(self, tracked: _Tracked, first: int, stop: int) -> None:
        """Keeps the tokens of these blocks at hand until the request ends."""
        request = tracked.request
        has_extra_keys = any(getattr(request, what, None) for what in ("lora_request", "mm_features", "cache_salt"))
        if tracked.described or tracked.salt or has_extra_keys:
            return
        tracked.described = [identity.engine_hash(name) for name in self._names(tracked, first, stop)]
        for at, name in enumerate(tracked.described):
            self._described_blocks.setdefault(name, []).append((tracked, first + at))

    def _forget_description(self, tracked: _Tracked) -> None:
        for name in tracked.described:
            owners = [owner for owner in self._described_blocks.pop(name, []) if owner[0] is not tracked]
            if owners:
                self._described_blocks[name] = owners
        tracked.described = []

    def _end(self, tracked: _Tracked, block: int) -> bytes:
        """Names the end of a request's block, for conversations."""
        return tracked.salt + bytes(tracked.request.block_hashes[(block + 1) * self._hashes_per_block - 1])

    def _conversation_continued(self, tracked: _Tracked) -> None:
        """Tells the stores if a request goes on with an idle conversation."""
        blocks = reversed(range(self._hashed(tracked.request)))
        last = self._idle_conversations.take_continued(self._end(tracked, block) for block in blocks)
        if last is not None:
            self._step.continued.append(last)

    def _conversation_idle(self, tracked: _Tracked) -> None:
        """Tells the stores that an answer is complete, or was given up: its user may go on with it."""
        if not self._is_prefetching or tracked.is_stale:
            return
        request = tracked.request
        complete = self._complete_blocks(request)
        if complete == 0:
            return
        names = self._names(tracked, 0, complete)
        self._step.idle.append(names)
        first = min(max(request.num_prompt_tokens // self._block_tokens, 1), complete) - 1
        self._idle_conversations.add(names[-1], [self._end(tracked, block) for block in range(first, complete)])

    def _retain(self, tracked: _Tracked) -> None:
        """Has the stores retain the blocks of a request that is over, if it asks for that."""
        seconds = handoff.retain_seconds(tracked.request)
        if not self._is_offloading or tracked.is_stale or seconds == 0:
            return
        complete = self._complete_blocks(tracked.request)
        if complete > 0:
            for group in range(len(self._windows)):
                self._step.retentions.append(Retain(self._names(tracked, 0, complete, group), seconds))

    def take_counters(self) -> dict[str, int]:
        """What happened since the last call."""
        counters, self._counters = self._counters, Counter()
        return {name: count for name, count in counters.items() if count}

    def _is_cache_empty(self) -> bool:
        """Whether the engine's cache has no block, and nobody holds one that could come into it."""
        if self._pool is None:
            return True
        return all(block.is_null or (block.block_hash is None and block.ref_cnt == 0) for block in self._pool.blocks)

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tenant = identity.tenant(getattr(request, "cache_salt", None))
            tracked = _Tracked(request, self._epoch + self._adapter_salt(request), tenant)
            self._requests[request.request_id] = tracked
            if self._is_prefetching:
                self._conversation_continued(tracked)
            tracked.leg = Leg.of(request) if self._is_handing_over else None
            if tracked.leg is not None and tracked.salt:
                # Nobody can tell whether the other engine has the weights that were put into this one, or the same adapter.
                self._refuse(tracked)
        return tracked

    def _refuse(self, tracked: _Tracked) -> None:
        """Takes no part in a hand-off, and tells the other side."""
        assert tracked.leg is not None
        (self._step.declined if tracked.leg.source is not None else self._step.cancelled).append(tracked.leg)
        tracked.leg = None

    def _prompt_blocks(self, tracked: _Tracked) -> int:
        """Whole blocks of a prompt before its last token: those that a hand-off moves, on either side."""
        request = tracked.request
        return min((request.num_prompt_tokens - 1) // self._block_tokens, self._hashed(request))

    def _content(self, tracked: _Tracked) -> bytes:
        last = tracked.request.block_hashes[self._prompt_blocks(tracked) * self._hashes_per_block - 1]
        leg = tracked.leg
        assert leg is not None
        sides = (leg.source.processes, self._workers) if leg.source is not None else (self._workers, leg.receivers)
        return handoff.content(bytes(last), *sides)

    def _push(self, tracked: _Tracked, leg: Leg, computed: int, blocks_of: BlocksOf) -> None:
        """Sends the prompt's blocks that are complete after this step."""
        stop = self._prompt_blocks(tracked)
        if tracked.is_stale or self._pool is None:
            # The receiver may have other weights, and computes it all.
            self._refuse(tracked)
            return
        numbers = blocks_of(tracked.request.request_id)[self._prefix_group]
        complete = min(computed // self._block_tokens, stop, len(numbers))
        if complete > tracked.pushed:
            first, tracked.pushed = tracked.pushed, complete
            job = self._next_number()
            chosen = list(numbers[first:complete])
            self._hold(job, chosen)
            is_last = complete == stop
            self._step.pushes.append(Push(job, leg, self._content(tracked), first, chosen, is_last))
            self._counters["pushed_blocks"] += len(chosen)
        if tracked.pushed == stop:
            tracked.leg = None

    def _complete_blocks(self, request: Any) -> int:
        """Leading blocks of a request that have been computed and have names."""
        return min(request.num_computed_tokens // self._block_tokens, self._hashed(request))

    def _hashed(self, request: Any) -> int:
        return len(request.block_hashes) // self._hashes_per_block

    def _names(self, tracked: _Tracked, first: int, stop: int, group: int | None = None) -> list[bytes]:
        """Hashes of a request's blocks in a group. The hash at a block's end stands for all that comes before it."""
        step = self._hashes_per_block
        hashes = tracked.request.block_hashes
        if group is None or group == self._prefix_group:
            return identity.salted(tracked.salt, [bytes(hashes[at * step - 1]) for at in range(first + 1, stop + 1)])
        known = tracked.group_names.setdefault(group, [])
        new = [bytes(hashes[at * step - 1]) for at in range(len(known) + 1, stop + 1)]
        known += identity.salted(tracked.salt + b"group %d" % group, new)
        return known[first:stop]

    def _is_null(self, number: int) -> bool:
        return self._pool is not None and self._pool.blocks[number].is_null

    def _stored(self, tracked: _Tracked, first: int, stop: int) -> int | None:
        """How many blocks from `first` on are to be loaded; None: not known yet."""
        tracked.first = first
        if tracked.asked is not None and tracked.answer is None:
            return None
        may_fetch = self._is_fetching and tracked.answer is None
        nearby = self._nearby()
        if nearby is not None:
            if tracked.look is None or tracked.look[:2] != (first, stop) or self._steps >= tracked.look_until:
                tracked.look = (first, stop, nearby(self._question(tracked, first, stop, may_fetch)))
                tracked.look_until = self._steps + _LOOK_STEPS
            answer = tracked.look[2]
            if not answer.wants_fetch:
                tracked.deadline = answer.deadline
                return min(answer.blocks, stop - first)
        if tracked.asked is None or tracked.answer is None or first < tracked.asked:
            tracked.asked, tracked.answer, tracked.question = first, None, self._next_number()
            self._asking[tracked.question] = tracked.request.request_id
            self._step.questions.append(self._question(tracked, first, stop, self._is_fetching))
            return None
        return max(min(tracked.asked + tracked.answer, stop) - first, 0)

    def _question(self, tracked: _Tracked, first: int, stop: int, may_fetch: bool) -> Question:
        # Object storage finds whole runs only, so all whole blocks are named: the one that is computed again may end a run. With several groups
        # it is left out: their windows are counted back from the end of what came.
        last = stop if self._all_or_nothing else self._hashed(tracked.request)
        wanted = range(0, last) if may_fetch else range(first, stop)
        names, tokens = self._names(tracked, wanted.start, wanted.stop), tracked.request.num_tokens
        queued = sum(self._uncomputed_tokens.values())
        groups = [
            (self._names(tracked, wanted.start, wanted.stop, group), _WHOLE_PREFIX if window is None else window)
            for group, window in enumerate(self._windows)
            if group != self._prefix_group
        ]
        # The gateway does not know what a salt makes of names.
        others = None if tracked.salt else handoff.shared_blocks(tracked.request)
        return Question(tracked.question, names, first, tokens, self._block_tokens, queued, may_fetch, groups, tracked.tenant, others)

    def _offer(self, tracked: _Tracked, computed: int, blocks_of: BlocksOf) -> None:
        """Saves the blocks that a request completes in this step, and those that had to wait.

        Blocks that the engine had already are offered too: the store may have lost them since, and one that it has
        costs a look.
        """
        complete = min(computed // self._block_tokens, self._hashed(tracked.request))
        if complete <= tracked.offered or self._pool is None:
            return
        groups = blocks_of(tracked.request.request_id)
        runs: list[list[range]] = [[] for _ in groups]
        chosen = 0
        while tracked.offered < min(complete, *map(len, groups)):
            at = tracked.offered
            fresh = [] if at in tracked.loaded else [group for group, numbers in enumerate(groups) if self._is_fresh(numbers[at])]
            under_way = len(self._saving) + chosen
            if under_way and under_way + len(fresh) > self._saving_blocks_max:
                break
            tracked.offered += 1
            chosen += len(fresh)
            for group in fresh:
                if runs[group] and runs[group][-1].stop == at:
                    runs[group][-1] = range(runs[group][-1].start, at + 1)
                else:
                    runs[group].append(range(at, at + 1))
        for group, numbers in enumerate(groups):
            for run in runs[group]:
                self._save(tracked, run, numbers, group)

    def _is_fresh(self, number: int) -> bool:
        """Whether a block is one that can be saved, and is not being saved."""
        return number not in self._saving and not self._is_null(number)

    def _hold(self, job: int, numbers: list[int]) -> None:
        assert self._pool is not None
        blocks = [self._pool.blocks[number] for number in numbers]
        self._pool.touch(blocks)
        self._held[job] = blocks

    def _save(self, tracked: _Tracked, run: range, numbers: Sequence[int], group: int) -> None:
        """Saves blocks of a group that follow one another."""
        job, chosen = self._next_number(), list(numbers[run.start : run.stop])
        self._hold(job, chosen)
        self._saving.update(chosen)
        self._saves[job] = chosen
        before = max(run.start - 1, 0)
        names = self._names(tracked, before, run.stop, group)
        parent = names.pop(0) if run.start > 0 else None
        self._step.saves.append(Save(job, names, chosen, run.start, parent, tracked.tenant))

    def _release(self, blocks: list[Block]) -> None:
        assert self._pool is not None
        # Those that are freed first are given away first: a chain is to lose its end.
        self._pool.free_blocks(blocks[::-1])

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
