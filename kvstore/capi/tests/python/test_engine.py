"""Both sides together, in an engine that has no model: what comes back for a prompt must be what was computed for it.

The engine here computes a block by writing bytes that follow from its tokens and from those before it. At its end each
request checks all of its blocks.
"""

import hashlib
import random
import tempfile
import time
import unittest
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from kvasir_kv import identity
from kvasir_kv.library import Library, Memory, Operation, Plan, Store, Tier
from kvasir_kv.messages import Answer, Prefill, Question, Report, Step, Tally
from kvasir_kv.planes import layout
from kvasir_kv.scheduler import Scheduler
from kvasir_kv.worker import Worker
from memory import Tensor

TOKENS, BLOCK_BYTES = 16, 4096


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: bytes | None = None


class Pool:
    """Blocks with reference counts; those that nobody holds are given away again, the first freed first.

    Until then they can be found by their names.
    """

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.free = deque(range(count))
        self.cached: dict[bytes, int] = {}

    def cache(self, number: int, name: bytes) -> None:
        if self.blocks[number].block_hash is None and name not in self.cached:
            self.blocks[number].block_hash = name
            self.cached[name] = number

    def hits(self, names: list[bytes]) -> list[int]:
        return [self.cached[name] for name in takewhile(self.cached.__contains__, names)]

    def reset(self) -> bool:
        if len(self.free) < len(self.blocks):
            return False
        self.forget(range(len(self.blocks)))
        return True

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.cached.pop(self.blocks[number].block_hash, None)
            self.blocks[number].block_hash = None

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        self.forget(taken)
        for number in taken:
            self.blocks[number].ref_cnt = 1
        return taken

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: list[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block.block_id)


@dataclass
class Request:
    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    is_loading: bool = False
    loaded: int = 0
    adapter: bytes = b""
    cache_salt: str | None = None
    kv_transfer_params: dict[str, object] | None = None

    def __post_init__(self) -> None:
        name = b""
        for at in range(0, len(self.tokens) - TOKENS + 1, TOKENS):
            name = hashlib.sha256(name + repr(self.tokens[at : at + TOKENS]).encode()).digest()
            self.block_hashes.append(name)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens


def content(name: bytes, weights: bytes = b"") -> bytes:
    return hashlib.shake_128(name + weights).digest(BLOCK_BYTES)


class Engine:
    """One step after the other, as vLLM's does it.

    `is_nearby`: the scheduler's side may call the worker's. `is_caching`: the engine looks into its own cache first.
    """

    def __init__(
        self,
        store: Store,
        blocks: int,
        is_nearby: bool,
        saving_blocks_max: int = 1000,
        is_caching: bool = False,
        is_fetching: bool = False,
        tells_tiers: bool = False,
        is_prefetching: bool = False,
    ) -> None:
        self.tensor, self.store = Tensor((blocks, BLOCK_BYTES)), store
        number = store.register(layout({"layer": self.tensor}, blocks).planes, blocks, Memory.HOST)
        self.worker = Worker(store, number, b"k" * 32, BLOCK_BYTES, tells_tiers=tells_tiers)
        self.pool = Pool(blocks)
        self.scheduler = Scheduler(
            TOKENS,
            TOKENS,
            1,
            saving_blocks_max,
            nearby=lambda: self.worker.look if is_nearby else None,
            adapter_salt=lambda request: request.adapter,
            is_fetching=is_fetching,
            is_prefetching=is_prefetching,
        )
        self.scheduler.bind(self.pool)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.wrong: list[str] = []
        self.is_caching = is_caching
        self.weights = b""
        self.loaded = 0

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def run(self, steps_max: int = 20_000) -> None:
        for _ in range(steps_max):
            if not (self.waiting or self.running or self.scheduler.is_waiting()):
                return
            self.step()
        raise AssertionError(f"not done after {steps_max} steps: {len(self.waiting)} wait, {len(self.running)} run")

    def step(self) -> None:
        scheduled = {request.request_id: self.schedule(request) for request in self.running}
        for request in list(self.waiting):
            if not request.is_loading and self.admit(request):
                scheduled[request.request_id] = self.schedule(request)
        blocks_of = {request.request_id: request.blocks for request in self.running}
        step = self.scheduler.next_step(scheduled, lambda name: [blocks_of[name]])
        self.worker.begin(step)
        for request in self.running:
            self.compute(request, scheduled[request.request_id])
        self.worker.load(step)
        self.worker.save(step)
        self.worker.poll()
        arrived, missing, report = self.worker.take_arrived(), self.worker.take_missing(), self.worker.take_report()
        self.after_loads(missing)
        self.scheduler.take_report(report)
        for request in self.waiting:
            request.is_loading &= request.request_id not in arrived
        for request in [request for request in self.running if request.num_computed_tokens == request.num_tokens]:
            self.finish(request)

    def admit(self, request: Request) -> bool:
        if request.num_computed_tokens == 0:
            hits = self.pool.hits(request.block_hashes[: (request.num_tokens - 1) // TOKENS]) if self.is_caching else []
            external, is_async = self.scheduler.matched_tokens(request, len(hits) * TOKENS)
            if external is None:
                return False
            self.pool.touch([self.pool.blocks[number] for number in hits])
            request.blocks = hits
            taken = self.pool.take(-(-request.num_tokens // TOKENS) - len(hits))
            if taken is None:
                self.free(request)
                return False
            request.blocks = hits + taken
            self.scheduler.allocated(request, [request.blocks], external)
            request.loaded = external // TOKENS
            request.num_computed_tokens = len(hits) * TOKENS + external
            request.is_loading = is_async
            if is_async:
                return False
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def schedule(self, request: Request) -> int:
        return min(request.num_tokens - request.num_computed_tokens, 3 * TOKENS + 5)

    def compute(self, request: Request, tokens: int) -> None:
        first = request.num_computed_tokens // TOKENS
        request.num_computed_tokens += tokens
        complete = request.num_computed_tokens // TOKENS
        for at in range(first, complete):
            # A block that follows one of other weights has neither those nor these.
            is_mixed = at > 0 and not self.is_right(request, at - 1)
            self.write(request.blocks[at], content(request.block_hashes[at], self.weights + b" mixed" * is_mixed))
        if self.is_caching:
            for number, name in zip(request.blocks[:complete], request.block_hashes):
                self.pool.cache(number, name)

    def is_right(self, request: Request, at: int) -> bool:
        return self.tensor.read(request.blocks[at]) == content(request.block_hashes[at], self.weights)

    def write(self, block: int, bytes_: bytes) -> None:
        self.tensor.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes_

    def after_loads(self, missing: set[int]) -> None:
        """What did not come is computed from there on; as vLLM does it."""
        for request in self.waiting:
            if request.is_loading:
                loaded = request.num_computed_tokens // TOKENS
                gone = [at for at in range(loaded) if request.blocks[at] in missing]
                if gone:
                    request.num_computed_tokens = gone[0] * TOKENS
                    if gone[0] == 0:
                        self.free(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def free(self, request: Request) -> None:
        self.pool.free_blocks([self.pool.blocks[number] for number in reversed(request.blocks)])
        request.blocks = []

    def finish(self, request: Request) -> None:
        for at in range(len(request.block_hashes)):
            if not self.is_right(request, at):
                self.wrong.append(f"block {at} of {request.request_id}")
        self.loaded += request.loaded
        self.running.remove(request)
        self.scheduler.finished(request)
        self.free(request)


def wait_until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_over():
        assert time.monotonic() < deadline, "waited for 20 seconds"
        time.sleep(0.002)


def configuration(blocks: int) -> str:
    return f'[store]\nslot = "{BLOCK_BYTES} B"\n[host_tier]\ncapacity = "{blocks * 2 * BLOCK_BYTES} B"\n'


class Sides(unittest.TestCase):
    def engine(
        self, stored: int = 1000, blocks: int = 64, is_nearby: bool = False, far: str = "", **more: int
    ) -> Engine:
        store = Store.open(Library(), configuration(stored) + far)
        self.addCleanup(store.close)
        return Engine(store, blocks, is_nearby, **more)

    def prompt(self, name: str, tokens: int, seed: int = 1, count: int | None = None) -> Request:
        """Of so many tokens, or the first `count` of them."""
        chance = random.Random(seed)
        return Request(name, [chance.randrange(1000) for _ in range(tokens)][:count])

    def test_a_prompt_is_loaded_the_second_time(self) -> None:
        for is_nearby in (False, True):
            with self.subTest(is_nearby=is_nearby):
                engine = self.engine(is_nearby=is_nearby)
                engine.submit(self.prompt("first", 20 * TOKENS))
                engine.run()
                self.assertEqual(engine.worker.take_counters()["saved_blocks"], 20)
                engine.submit(self.prompt("second", 20 * TOKENS))
                engine.run()
                # The last token is computed, and so is its block, which alone is offered again.
                self.assertEqual((engine.loaded, engine.wrong), (19, []))
                self.assertEqual(engine.worker.take_counters()["saved_blocks"], 1)
                self.assertEqual(len(engine.pool.free), 64)

    def test_a_tenant_fills_its_share_and_no_more(self) -> None:
        store = Store.open(Library(), configuration(16) + "tenant_share = 0.25\n")
        self.addCleanup(store.close)
        engine = Engine(store, 64, is_nearby=True)

        def run(name: str, seed: int, salt: str | None) -> None:
            request = self.prompt(name, 7 * TOKENS, seed=seed)
            request.cache_salt = salt
            engine.submit(request)
            engine.run()

        def quiet_blocks() -> list[int]:
            """For each block of the quiet tenant's prompt whether it is there."""
            names = identity.identities(engine.worker._key, self.prompt("quiet", 7 * TOKENS, seed=1).block_hashes)
            return [store.match(names[at : at + 16]) for at in range(0, len(names), 16)]

        run("quiet", 1, "quiet")
        # Each has four of sixteen slots.
        self.assertEqual(engine.worker.statistics()["blocks"], 4)
        there = quiet_blocks()
        for at in range(5):
            run(f"loud {at}", 2 + at, "loud")
        self.assertEqual(engine.worker.statistics()["blocks"], 8)
        run("nobody", 20, None)
        self.assertEqual((engine.worker.statistics()["blocks"], engine.wrong), (12, []))
        self.assertEqual((sum(there), quiet_blocks()), (4, there), "others have not evicted its blocks")

    def test_tenants_have_numbers(self) -> None:
        numbers = [identity.tenant(salt) for salt in (None, "", "one", "one", "two")]
        self.assertEqual((numbers[:2], numbers[2] == numbers[3]), ([0, 0], True))
        self.assertTrue(0 < numbers[2] != numbers[4] < (1 << 32) - 1)

    def test_blocks_of_another_engine_are_loaded(self) -> None:
        for is_nearby in (False, True):
            with self.subTest(is_nearby=is_nearby), tempfile.TemporaryDirectory() as folder:
                far = f'[object_tier]\nurl = "file://{folder}"\nrun = "2"\n'
                far += "[queue]\nevents = 1000\n"
                more = {"is_fetching": True, "is_caching": True, "tells_tiers": True}
                one, two = (self.engine(is_nearby=is_nearby, far=far, **more) for _ in range(2))
                # Object storage is slow: worth asking only where computing is slower.
                two.worker.load(Step(prefills=[Prefill(1000, 0, 10.0)] * 50))
                one.submit(self.prompt("first", 20 * TOKENS))
                one.run()
                wait_until(lambda: one.worker.statistics()["far_written"] == 20)
                # It has the first three blocks itself; the last token is computed, and so is its block.
                two.submit(self.prompt("its own", 20 * TOKENS, seed=1, count=3 * TOKENS))
                two.run()
                two.scheduler.take_tiers()
                before, request = two.loaded, self.prompt("second", 20 * TOKENS)
                two.submit(request)
                two.run()
                # Nobody has told of these blocks before: what they are is told with them.
                told = {change.parent: change for change in two.scheduler.take_tiers() if change.tokens}
                self.assertEqual(set(told) - {None}, set(request.block_hashes[2:19]))
                for at in range(3, 19):
                    change = told[request.block_hashes[at - 1]]
                    tokens = request.tokens[at * TOKENS : (at + 1) * TOKENS]
                    short = int.from_bytes(request.block_hashes[at][-8:], "big")
                    self.assertEqual((change.tokens, change.hashes), (tokens, [short]))
                self.assertEqual((two.loaded - before, two.wrong), (16, []))
                self.assertEqual(len(two.pool.free), 64)

    def test_a_request_waits_for_other_nodes_once(self) -> None:
        for here in (None, 1, 4):
            with self.subTest(here=here):

                def look(question: Question) -> Answer:
                    self.assertEqual(question.others, 3 if here == 1 else None)
                    if question.may_fetch:
                        return Answer(4) if here == 4 else Answer(0, 1.0, True)
                    return Answer(min(2, len(question.wanted(question.hashes))), 0.5)

                nearby = None if here is None else look
                scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: nearby, is_fetching=True)
                request = self.prompt("one", 5 * TOKENS)
                request.kv_transfer_params = {1: {"kvasir_shared_blocks": 3}, 4: {"kvasir_shared_blocks": True}}.get(here or 0)
                if here == 4:
                    self.assertEqual(scheduler.matched_tokens(request, 0), (4 * TOKENS, True))
                    self.assertFalse(scheduler.is_waiting())
                    continue
                self.assertEqual(scheduler.matched_tokens(request, TOKENS), (None, False))
                (question,) = scheduler.next_step({}, lambda name: [[]]).questions
                self.assertEqual((question.hashes, question.held), (request.block_hashes, 1))
                self.assertEqual(scheduler.matched_tokens(request, TOKENS), (None, False))
                self.assertTrue(scheduler.is_waiting())
                scheduler.take_report(Report(answers={question.number: Tally(1, 2, 0.5)}))
                for _ in range(20):
                    self.assertEqual(scheduler.matched_tokens(request, TOKENS), (2 * TOKENS, True))
                    self.assertEqual(scheduler.next_step({}, lambda name: [[]]).questions, [])
                self.assertFalse(scheduler.is_waiting())
                scheduler.allocated(request, [[0, 1, 2, 3, 4]], 2 * TOKENS)
                (load,) = scheduler.next_step({}, lambda name: [[]]).loads
                self.assertEqual((load.blocks, load.deadline), ([1, 2], 0.5))

    def test_the_stores_learn_how_fast_prompts_are_computed(self) -> None:
        scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: lambda question: Answer(0))
        one, two = self.prompt("one", 6 * TOKENS), self.prompt("two", 4 * TOKENS)
        for request in (one, two):
            self.assertEqual(scheduler.matched_tokens(request, 0), (0, False))
            scheduler.allocated(request, [list(range(10))], 0)
        asked: list[Question] = []

        def look(question: Question) -> Answer:
            asked.append(question)
            return Answer(0)

        scheduler._nearby = lambda: look
        blocks_of = lambda name: [list(range(10))]
        # The first step is not measured: it includes compilation.
        scheduler.next_step({"one": TOKENS}, blocks_of)
        scheduler.step_finished()
        self.assertEqual(scheduler.next_step({}, blocks_of).prefills, [])
        scheduler.step_finished()
        scheduler.next_step({"one": 2 * TOKENS, "two": 3 * TOKENS}, blocks_of)
        one.num_computed_tokens, two.num_computed_tokens = 2 * TOKENS, 3 * TOKENS
        scheduler.matched_tokens(self.prompt("three", 8 * TOKENS), 0)
        self.assertEqual((asked[0].tokens, asked[0].queued_tokens), (8 * TOKENS, 5 * TOKENS))
        # The second step is begun before the first is over.
        scheduler.next_step({"one": 4 * TOKENS, "two": TOKENS - 1}, blocks_of)
        time.sleep(0.03)
        scheduler.step_finished()
        time.sleep(0.01)
        scheduler.step_finished()
        first, second = scheduler.next_step({}, blocks_of).prefills
        # Two prompts of 32 and 48 tokens have (32² + 48²) / 2 pairs, fewer than one of 80 has.
        self.assertEqual((first.tokens, first.context), (5 * TOKENS, 0))
        pairs = 64 * (32 + 32) + 15 * (48 + 7.5)
        self.assertAlmostEqual(second.tokens * (second.context + second.tokens / 2), pairs, delta=second.tokens)
        self.assertTrue(0.03 <= first.seconds and 0.01 <= second.seconds < first.seconds, (first, second))
        self.assertEqual(scheduler.next_step({}, blocks_of).prefills, [])
        # Nothing of a request that was preempted is computed before itself.
        two.num_computed_tokens, two.num_preemptions = 0, 1
        scheduler._uncomputed_tokens["two"] = TOKENS
        scheduler.matched_tokens(two, 0)
        self.assertEqual(asked[-1].queued_tokens, 0)
        # A step that computes nothing of a prompt says nothing.
        one.num_computed_tokens = two.num_computed_tokens = 10 * TOKENS
        scheduler.next_step({"one": 1, "two": 1}, blocks_of)
        for _ in range(4):
            scheduler.step_finished()
        self.assertEqual(scheduler.next_step({}, blocks_of).prefills, [])

    def test_a_planned_fetch_may_take_as_long_as_the_tiers_may(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            nodes = '[remote_tier]\nnodes = ["n0=tcp:127.0.0.1:1"]\ndeadline = "1s"\n'
            engine = self.engine(far=f'{nodes}[object_tier]\nurl = "file://{folder}"\ndeadline = "3s"\n', is_fetching=True)
            engine.worker.load(Step(prefills=[Prefill(1000, 0, 10.0)] * 50))
            names = b"".join(bytes([at]) * 16 for at in range(1, 100))
            plan = engine.store.plan(names, 0, 100 * TOKENS, TOKENS, 0, True)
            self.assertEqual(plan.operation, Operation.FETCH)
            self.assertTrue(3.5 < plan.deadline <= 4.0, plan)

    def test_what_is_faster_computed_is_not_loaded(self) -> None:
        for is_nearby in (False, True):
            with self.subTest(is_nearby=is_nearby):
                engine = self.engine(is_nearby=is_nearby)
                engine.submit(self.prompt("first", 20 * TOKENS))
                engine.run()
                for _ in range(200):
                    engine.worker.load(Step(prefills=[Prefill(100_000, 0, 1e-6)]))
                engine.submit(self.prompt("second", 20 * TOKENS))
                engine.run()
                self.assertEqual((engine.loaded, engine.wrong), (0, []))
                self.assertEqual(engine.worker.statistics()["recomputed"], 19)
                for _ in range(200):
                    engine.worker.load(Step(prefills=[Prefill(1000, 0, 10.0)]))
                engine.submit(self.prompt("third", 20 * TOKENS))
                engine.run()
                self.assertEqual((engine.loaded, engine.wrong), (19, []))

    def test_the_tiers_are_told_by_the_engine_s_short_hashes(self) -> None:
        engine = self.engine(stored=12, far="[queue]\nevents = 1000\n", tells_tiers=True)
        held: set[int] = set()
        for seed in (1, 2):
            request = self.prompt(f"seed {seed}", 10 * TOKENS, seed=seed)
            engine.submit(request)
            engine.run()
            for change in engine.scheduler.take_tiers():
                self.assertEqual(change.tier, Tier.HOST)
                held = held | set(change.hashes) if change.is_stored else held - set(change.hashes)
            short = {int.from_bytes(name[-8:], "big") for name in request.block_hashes}
            self.assertGreaterEqual(len(held & short), 10 if seed == 1 else 1)
        self.assertEqual(len(held), engine.worker.statistics()["blocks"])
        self.assertEqual(engine.scheduler.take_tiers(), [])

    def test_an_adapter_hides_blocks(self) -> None:
        for is_nearby in (False, True):
            with self.subTest(is_nearby=is_nearby):
                engine = self.engine(is_nearby=is_nearby)
                for name, adapter, loaded in [("1", b"a", 0), ("2", b"", 0), ("3", b"b", 0), ("4", b"a", 9)]:
                    request = self.prompt(name, 10 * TOKENS)
                    request.adapter = adapter
                    engine.submit(request)
                    engine.run()
                    self.assertEqual((request.loaded, engine.wrong), (loaded, []))

    def test_a_reset_hides_blocks(self) -> None:
        engine = self.engine()
        engine.submit(self.prompt("first", 10 * TOKENS))
        engine.run()
        self.assertTrue(engine.scheduler.reset())
        engine.submit(self.prompt("second", 10 * TOKENS))
        engine.run()
        self.assertEqual(engine.loaded, 0)
        engine.submit(self.prompt("third", 10 * TOKENS))
        engine.run()
        self.assertEqual((engine.loaded, engine.wrong), (9, []))

    def test_a_request_that_runs_during_a_reset_is_not_saved(self) -> None:
        engine = self.engine()
        request = self.prompt("first", 10 * TOKENS)
        engine.submit(request)
        engine.step()
        engine.step()
        computed = request.num_computed_tokens // TOKENS
        self.assertTrue(0 < computed < 10)
        self.assertTrue(engine.scheduler.reset())
        engine.run()
        # A process that starts later has the names from before the reset.
        names = identity.identities(b"k" * 32, request.block_hashes)
        self.assertEqual(engine.store.match(names), computed)
        engine.submit(self.prompt("second", 10 * TOKENS))
        engine.run()
        self.assertEqual((engine.loaded, engine.wrong), (0, []))

    def test_blocks_of_old_weights_that_the_engine_kept_are_not_saved(self) -> None:
        engine = self.engine(is_caching=True)
        engine.submit(self.prompt("first", 5 * TOKENS))
        engine.run()
        (held,) = engine.pool.take(1)
        self.assertEqual((engine.pool.reset(), engine.scheduler.reset()), (False, True))
        engine.pool.free_blocks([engine.pool.blocks[held]])
        engine.weights = b"new"
        engine.submit(self.prompt("second", 20 * TOKENS))
        engine.run()
        # Its own cache misleads the engine, which was told that it is not empty; the store does not go on with that.
        self.assertEqual(len(engine.wrong), 20)
        engine.wrong.clear()
        for name in ("third", "fourth"):
            self.assertTrue(engine.pool.reset())
            engine.submit(self.prompt(name, 10 * TOKENS))
            engine.run()
        self.assertEqual((engine.loaded, engine.wrong), (9, []))

    def test_a_block_in_use_at_a_reset_may_come_into_the_engine_s_cache(self) -> None:
        engine = self.engine(is_caching=True)
        engine.pool.take(1)
        self.assertTrue(engine.scheduler.reset())
        for name, saved in (("first", 10), ("second", 0)):
            engine.submit(self.prompt(name, 10 * TOKENS))
            engine.run()
            self.assertEqual(engine.worker.take_counters().get("saved_blocks", 0), saved)

    def test_blocks_that_the_engine_has_are_offered_again_after_a_whole_reset(self) -> None:
        engine = self.engine(is_caching=True)
        engine.submit(self.prompt("first", 5 * TOKENS))
        engine.run()
        self.assertTrue(engine.scheduler.reset())
        self.assertTrue(engine.pool.reset() and engine.scheduler.reset())
        for name in ("second", "third"):
            engine.worker.take_counters()
            engine.submit(self.prompt(name, 10 * TOKENS))
            engine.run()
            self.assertEqual((engine.worker.take_counters()["saved_blocks"], engine.wrong), (10, []))

    def test_blocks_that_do_not_follow_one_another_are_saved_as_chains_of_their_own(self) -> None:
        scheduler, request, pool = Scheduler(TOKENS, TOKENS, 1, 1000), self.prompt("one", 6 * TOKENS), Pool(8)
        scheduler.bind(pool)
        request.blocks = pool.take(6)
        pool.blocks[request.blocks[2]].is_null = True
        scheduler.allocated(request, [request.blocks], 0)
        saves = scheduler.next_step({"one": 6 * TOKENS}, lambda name: [request.blocks]).saves
        hashes, found = request.block_hashes, [(save.first, save.parent, save.hashes, save.blocks) for save in saves]
        expected = [(0, None, hashes[:2], request.blocks[:2]), (3, hashes[2], hashes[3:], request.blocks[3:])]
        self.assertEqual(found, expected)

    def test_chains_lose_their_ends_first(self) -> None:
        engine = self.engine(stored=12)
        engine.submit(self.prompt("first", 10 * TOKENS))
        engine.run()
        engine.submit(self.prompt("second", 8 * TOKENS, seed=7))
        engine.run()
        for name, seed, tokens in [("first again", 1, 10), ("second again", 7, 8)]:
            engine.worker.take_counters()
            engine.pool.reset()
            engine.submit(self.prompt(name, tokens * TOKENS, seed=seed))
            engine.run()
            # The store has no room for both. What is left of each begins at its beginning, and so it can be found.
            self.assertGreaterEqual(engine.worker.take_counters().get("loaded_blocks", 0), 3, name)
        self.assertEqual(engine.wrong, [])

    def test_a_look_into_the_store_is_kept_for_some_steps(self) -> None:
        looks: list[int] = []

        def look(question: Question) -> Answer:
            looks.append(len(question.hashes))
            return Answer(2)

        scheduler, request = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: look), self.prompt("one", 5 * TOKENS)
        for step in range(24):
            self.assertEqual(scheduler.matched_tokens(request, 0), (2 * TOKENS, True))
            self.assertEqual(len(looks), 1 + step // 8)
            scheduler.next_step({}, lambda name: [[]])
        self.assertEqual(looks, [4] * 3)
        # Of other blocks of the prompt it says nothing.
        scheduler.matched_tokens(request, TOKENS)
        scheduler.matched_tokens(request, TOKENS)
        self.assertEqual(looks, [4, 4, 4, 3])
        # Nor after the request had room once: it may have been preempted.
        scheduler.allocated(request, [[0, 1, 2, 3, 4]], 2 * TOKENS)
        request.num_preemptions = 1
        scheduler.matched_tokens(request, TOKENS)
        self.assertEqual(looks, [4, 4, 4, 3, 3])

    def test_the_answer_to_a_question_from_before_is_none(self) -> None:
        for what in ("reset", "the name used again"):
            with self.subTest(what):
                scheduler, request = Scheduler(TOKENS, TOKENS, 1, 1000), self.prompt("one", 5 * TOKENS)
                self.assertEqual(scheduler.matched_tokens(request, 0), (None, False))
                (old,) = scheduler.next_step({}, lambda name: [[]]).questions
                if what == "reset":
                    self.assertTrue(scheduler.reset())
                else:
                    scheduler.finished(request)
                    request = self.prompt("one", 5 * TOKENS, seed=2)
                self.assertEqual(scheduler.matched_tokens(request, 0), (None, False))
                (new,) = scheduler.next_step({}, lambda name: [[]]).questions
                self.assertNotEqual(old.hashes, new.hashes)
                scheduler.take_report(Report(answers={old.number: Tally(1, 4)}))
                self.assertEqual(scheduler.matched_tokens(request, 0), (None, False))
                scheduler.take_report(Report(answers={new.number: Tally(1, 3)}))
                self.assertEqual(scheduler.matched_tokens(request, 0), (3 * TOKENS, True))
                self.assertFalse(scheduler.is_waiting())

    def test_the_least_that_one_of_two_workers_has_counts(self) -> None:
        scheduler, request, pool = Scheduler(TOKENS, TOKENS, 2, 1000), self.prompt("one", 5 * TOKENS), Pool(8)
        scheduler.bind(pool)
        scheduler.matched_tokens(request, 0)
        (question,) = scheduler.next_step({}, lambda name: [[]]).questions
        scheduler.take_report(Report(answers={question.number: Tally(1, 4)}))
        self.assertEqual(scheduler.matched_tokens(request, 0), (None, False))
        scheduler.take_report(Report(answers={question.number: Tally(1, 3)}))
        self.assertEqual(scheduler.matched_tokens(request, 0), (3 * TOKENS, True))
        request.blocks = pool.take(5)
        scheduler.allocated(request, [request.blocks], 3 * TOKENS)
        (load,) = scheduler.next_step({}, lambda name: [request.blocks]).loads
        self.assertEqual(load.blocks, request.blocks[:3])
        scheduler.take_report(Report(loaded={load.job: Tally(1, 1)}))
        scheduler.take_report(Report(loaded={load.job: Tally(1, 3)}))
        # What one of them lacks is computed by both.
        request.num_computed_tokens = TOKENS
        (save,) = scheduler.next_step({"one": 4 * TOKENS}, lambda name: [request.blocks]).saves
        self.assertEqual((save.blocks, save.hashes), (request.blocks[1:], request.block_hashes[1:]))
        self.assertEqual((save.first, save.parent), (1, request.block_hashes[0]))

    def test_what_was_promised_and_does_not_come_is_computed(self) -> None:
        for is_nearby in (False, True):
            with self.subTest(is_nearby=is_nearby):
                engine = self.engine(is_nearby=is_nearby)
                engine.store.plan = lambda names, *more: Plan(Operation.LOAD, len(names) // 16, 0.5)
                engine.submit(self.prompt("first", 10 * TOKENS))
                engine.run()
                counters = engine.worker.take_counters()
                self.assertEqual((counters["missing_blocks"], counters["saved_blocks"]), (9, 10))
                self.assertEqual(engine.wrong, [])

    def test_blocks_are_held_until_all_workers_have_saved_them(self) -> None:
        pool = Pool(8)
        scheduler = Scheduler(TOKENS, TOKENS, 2, 1000)
        scheduler.bind(pool)
        request = self.prompt("one", 4 * TOKENS)
        request.blocks = pool.take(4)
        scheduler.allocated(request, [request.blocks], 0)
        step = scheduler.next_step({"one": 4 * TOKENS}, lambda name: [request.blocks])
        (save,) = step.saves
        request.num_computed_tokens = 4 * TOKENS
        scheduler.finished(request)
        pool.free_blocks([pool.blocks[number] for number in request.blocks])
        self.assertTrue(scheduler.is_waiting() and scheduler.is_about_to_free())
        self.assertEqual(len(pool.free), 4)
        scheduler.take_report(Report(saved={save.job: Tally(1, 4)}))
        self.assertEqual(len(pool.free), 4)
        scheduler.take_report(Report(saved={save.job: Tally(1, 4)}))
        self.assertEqual((len(pool.free), scheduler.is_waiting()), (8, False))

    def test_what_may_wait_for_being_saved_is_bounded(self) -> None:
        engine = self.engine(saving_blocks_max=3)
        engine.submit(self.prompt("first", 40 * TOKENS))
        while engine.waiting or engine.running:
            engine.step()
            self.assertLessEqual(sum(map(len, engine.scheduler._held.values())), 3)
        engine.run()

    def test_many_requests_with_a_small_store_and_a_small_pool(self) -> None:
        for seed in range(4):
            with self.subTest(seed=seed):
                chance = random.Random(seed)
                engine = self.engine(stored=60, blocks=40, is_nearby=seed % 2 == 0, is_caching=seed == 2)
                for number in range(150):
                    tokens = chance.randrange(1, 12 * TOKENS)
                    engine.submit(self.prompt(f"request {number}", tokens, seed=chance.randrange(12)))
                steps = 0
                while engine.waiting or engine.running or engine.scheduler.is_waiting():
                    engine.step()
                    steps += 1
                    self.assertLess(steps, 50_000)
                    if engine.running and chance.random() < 0.05:
                        engine.preempt(chance.choice(engine.running))
                self.assertEqual(engine.wrong, [])
                self.assertGreater(engine.loaded, 0)
                self.assertEqual(len(engine.pool.free), 40)


if __name__ == "__main__":
    unittest.main()
