"""An engine with several groups of layers, of which one needs the last blocks only: what comes back is what was computed.

The engine has no model. It writes bytes into a block that follow from its tokens, from those before it and from the group, and checks
before each step that the blocks which the step attends to are right.
"""

import random
import tempfile
import unittest

from kvasir_kv.library import Library, Memory, Store
from kvasir_kv.messages import Answer, Prefill, Question, Report, Step, Tally
from kvasir_kv.planes import layout
from kvasir_kv.scheduler import Scheduler
from kvasir_kv.worker import Worker
from memory import Tensor
from test_engine import BLOCK_BYTES, TOKENS, Pool, Request, configuration, content, wait_until

WINDOW = 2
WINDOW_TOKENS = WINDOW * TOKENS + 1
"""A token attends to itself and to as many before it as two blocks have."""


class Engine:
    """As vLLM's does it: groups share a pool, block 0 is the place of blocks that a group does not need."""

    def __init__(self, store: Store, blocks: int, windows: tuple[int | None, ...], look=None, **more: bool) -> None:
        self.tensor, self.windows, self.pool = Tensor((blocks, BLOCK_BYTES)), windows, Pool(blocks)
        self.pool.take(1)
        self.pool.blocks[0].is_null = True
        tensors = store.register(layout({"layer": self.tensor}, blocks).planes, blocks, Memory.HOST)
        self.worker = Worker(store, tensors, b"k" * 32, BLOCK_BYTES)
        near = look or self.worker.look
        self.scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: near, windows=windows, **more)
        self.scheduler.bind(self.pool)
        self.wrong: list[str] = []
        self.loaded = self.failed = 0

    def run(self, *requests: Request) -> None:
        for request in requests:
            request.blocks = [[] for _ in self.windows]
            while not self.admit(request):
                self.step({})
            while request.num_computed_tokens < request.num_tokens:
                self.compute(request, min(request.num_tokens - request.num_computed_tokens, 3 * TOKENS + 5))
            self.scheduler.finished(request)
            self.free(request)
        while self.scheduler.is_waiting():
            self.step({})

    def admit(self, request: Request) -> bool:
        external, _ = self.scheduler.matched_tokens(request, 0)
        if external is None:
            return False
        for group in range(len(self.windows)):
            skipped = self.first_needed(group, external) if external else 0
            taken = self.pool.take(-(-request.num_tokens // TOKENS) - skipped)
            assert taken is not None, "the pool is large enough for one request"
            request.blocks[group] = [0] * skipped + taken
        self.scheduler.allocated(request, request.blocks, external)
        if external:
            _, failed = self.step({}, until=request.request_id)
            if failed:
                self.failed += 1
                self.free(request)
                return False
        self.loaded += external // TOKENS
        request.num_computed_tokens = external
        return True

    def step(self, scheduled: dict[str, int], blocks=None, compute=lambda: None, until: str = "") -> tuple[set[str], set[str]]:
        """A step of the engine; with `until` as many as it takes to load that request's blocks."""
        step = self.scheduler.next_step(scheduled, lambda name: blocks)
        self.worker.begin(step)
        compute()
        self.worker.load(step)
        self.worker.save(step)
        arrived, failed = set[str](), set[str]()
        while True:
            self.worker.poll()
            arrived |= self.worker.take_arrived()
            failed |= self.worker.take_failed()
            assert not self.worker.take_missing(), "single blocks of several groups cannot be told apart"
            report = self.worker.take_report()
            self.scheduler.take_report(report)
            if not until or until in arrived:
                return arrived, failed

    def first_needed(self, group: int, tokens: int) -> int:
        """The first block that the token behind so many attends to."""
        return 0 if self.windows[group] is None else max(tokens + 1 - WINDOW_TOKENS, 0) // TOKENS

    def compute(self, request: Request, tokens: int) -> None:
        before, after = request.num_computed_tokens, request.num_computed_tokens + tokens
        for group, numbers in enumerate(request.blocks):
            first = self.first_needed(group, before)
            for at in range(first):
                if numbers[at]:
                    # The window has moved on.
                    self.pool.free_blocks([self.pool.blocks[numbers[at]]])
                    numbers[at] = 0

        def write() -> None:
            for group, numbers in enumerate(request.blocks):
                attended = range(self.first_needed(group, before), before // TOKENS)
                for at in attended:
                    if self.tensor.read(numbers[at]) != self.content(request, group, at):
                        self.wrong.append(f"block {at} of group {group} of {request.request_id}")
                for at in range(before // TOKENS, after // TOKENS):
                    place = slice(numbers[at] * BLOCK_BYTES, (numbers[at] + 1) * BLOCK_BYTES)
                    self.tensor.memory[place] = self.content(request, group, at)

        self.step({request.request_id: tokens}, request.blocks, write)
        request.num_computed_tokens = after

    def content(self, request: Request, group: int, at: int) -> bytes:
        return content(request.block_hashes[at], b"group %d" % group)

    def free(self, request: Request) -> None:
        held = [self.pool.blocks[number] for numbers in request.blocks for number in reversed(numbers) if number]
        self.pool.free_blocks(held)
        request.blocks = [[] for _ in self.windows]


class Groups(unittest.TestCase):
    def store(self, blocks: int = 1000, more: str = "") -> Store:
        store = Store.open(Library(), configuration(blocks) + more)
        self.addCleanup(store.close)
        return store

    def prompt(self, name: str, tokens: int, seed: int = 1) -> Request:
        chance = random.Random(seed)
        return Request(name, [chance.randrange(1000) for _ in range(tokens)])

    def test_a_load_has_all_of_the_prefix_and_the_last_blocks_of_windows(self) -> None:
        for windows, loaded in ((None,), 19), ((None, WINDOW), 21), ((WINDOW, None, WINDOW), 23), ((WINDOW,), 2):
            with self.subTest(windows=windows):
                engine = Engine(self.store(), 200, windows)
                engine.run(self.prompt("first", 20 * TOKENS))
                self.assertEqual(engine.worker.take_counters()["saved_blocks"], 20 * len(windows))
                engine.run(self.prompt("second", 20 * TOKENS))
                self.assertEqual((engine.loaded, engine.wrong), (19, []))
                self.assertEqual(engine.worker.take_counters()["loaded_blocks"], loaded)
                self.assertEqual(len(engine.pool.free), 199)

    def test_groups_have_names_of_their_own(self) -> None:
        store = self.store()
        one = Engine(store, 200, (None, WINDOW))
        one.run(self.prompt("first", 20 * TOKENS))
        # The third group has no saved blocks.
        other = Engine(store, 200, (None, WINDOW, WINDOW))
        other.run(self.prompt("second", 20 * TOKENS))
        self.assertEqual((other.loaded, other.wrong), (0, []))

    def test_what_all_groups_need_comes_from_elsewhere(self) -> None:
        prompt = self.prompt("first", 20 * TOKENS)
        for windows, taken in ((None, WINDOW), 19 + 2), ((WINDOW, None, WINDOW, None), 19 + 2 + 2 + 19), ((WINDOW,), 19):
            with self.subTest(windows=windows), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                far = f'[object_tier]\nurl = "file://{folder}"\nrun = "1"\n'
                one, two = (Engine(self.store(more=far), 200, windows, is_fetching=True) for _ in range(2))
                # Object storage is slow: worth asking only where computing is slower.
                two.worker.load(Step(prefills=[Prefill(1000, 0, 10.0)] * 50))
                one.run(prompt)
                wait_until(lambda: one.worker.statistics()["far_written"] == 20 * len(windows))
                two.run(Request("second", prompt.tokens))
                self.assertEqual((two.loaded, two.failed, two.wrong), (19, 0, []))
                self.assertEqual(two.worker.statistics()["far_read"], taken)
                # A conversation that goes on: the windows of its new end are not there, and are computed.
                longer = prompt.tokens + self.prompt("", 10 * TOKENS, seed=2).tokens
                two.run(Request("longer", longer))
                self.assertEqual((two.failed, two.wrong), (0, []))
                self.assertFalse(two.scheduler.is_waiting())

    def test_windows_that_are_nowhere_cost_no_load(self) -> None:
        """Another engine has stored the prefix and none of the windows."""
        prompt = self.prompt("first", 20 * TOKENS)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            far = f'[object_tier]\nurl = "file://{folder}"\nrun = "1"\n'
            one = Engine(self.store(more=far), 200, (None,), is_fetching=True)
            one.run(prompt)
            wait_until(lambda: one.worker.statistics()["far_written"] == 20)
            two = Engine(self.store(more=far), 200, (None, WINDOW), is_fetching=True)
            two.worker.load(Step(prefills=[Prefill(1000, 0, 10.0)] * 50))
            two.run(Request("second", prompt.tokens))
            self.assertEqual((two.loaded, two.failed, two.wrong), (0, 0, []))
            self.assertEqual((two.worker.statistics()["far_read"], two.worker.take_counters()["saved_blocks"]), (19, 40))
            # Now the windows are in the store, and nobody need be asked.
            searches = two.worker.statistics()["far_searches"]
            self.assertEqual(searches, 2)
            two.run(Request("third", prompt.tokens))
            self.assertEqual((two.loaded, two.failed, two.wrong), (19, 0, []))
            self.assertEqual(two.worker.statistics()["far_searches"], searches)

    def test_object_storage_has_windows_of_whole_runs(self) -> None:
        prompt = self.prompt("first", 20 * TOKENS)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            far = f'[object_tier]\nurl = "file://{folder}"\nrun = "16"\n'
            one, two = (Engine(self.store(more=far), 200, (None, WINDOW), is_fetching=True) for _ in range(2))
            two.worker.load(Step(prefills=[Prefill(1000, 0, 10.0)] * 50))
            one.run(prompt)
            wait_until(lambda: one.worker.statistics()["far_written"] == 2 * 16)
            two.run(Request("second", prompt.tokens))
            self.assertEqual((two.loaded, two.failed, two.wrong), (16, 0, []))

    def test_a_load_of_which_a_part_is_missing_fails_as_a_whole(self) -> None:
        for windows in (None, WINDOW), (WINDOW,):
            with self.subTest(windows=windows):
                store = self.store()
                saved = Engine(store, 200, windows)
                saved.run(self.prompt("first", 10 * TOKENS))
                # It is told of more blocks than there are.
                look = lambda question: Answer(len(question.wanted(question.hashes)), 1.0)
                engine = Engine(store, 200, windows, look)
                request = self.prompt("longer", 10 * TOKENS)
                request = Request("longer", request.tokens + self.prompt("", 10 * TOKENS, seed=2).tokens)
                engine.run(request)
                self.assertEqual((engine.failed, engine.loaded, engine.wrong), (1, 0, []))
                # All of it was computed, and is saved.
                engine.run(Request("again", request.tokens))
                self.assertEqual((engine.failed, engine.loaded, engine.wrong), (1, 19, []))

    def test_a_missing_block_of_a_window_is_saved_again(self) -> None:
        store = self.store()
        prompt = self.prompt("first", 20 * TOKENS)
        # The store has the whole prefix, and nothing of the windows.
        Engine(store, 200, (None,)).run(prompt)
        look = lambda question: Answer(len(question.wanted(question.hashes)), 1.0)
        told_wrong = Engine(store, 200, (None, WINDOW), look)
        told_wrong.run(Request("second", prompt.tokens))
        self.assertEqual((told_wrong.failed, told_wrong.loaded, told_wrong.wrong), (1, 0, []))
        again = Engine(store, 200, (None, WINDOW))
        again.run(Request("third", prompt.tokens))
        self.assertEqual((again.failed, again.loaded, again.wrong), (0, 19, []))

    def test_two_workers_load_what_both_have(self) -> None:
        scheduler = Scheduler(TOKENS, TOKENS, 2, 1000, windows=(None, WINDOW))
        pool = Pool(60)
        scheduler.bind(pool)
        request = self.prompt("one", 10 * TOKENS)
        self.assertEqual(scheduler.matched_tokens(request, 0), (None, False))
        (question,) = scheduler.next_step({}, lambda name: [[], []]).questions
        for blocks in (4, 4):
            scheduler.take_report(Report(answers={question.number: Tally(1, blocks, 1.0)}))
        self.assertEqual(scheduler.matched_tokens(request, 0), (4 * TOKENS, True))
        pool.blocks[0].is_null = True
        blocks = [list(range(10, 20)), [0, 0] + list(range(30, 38))]
        scheduler.allocated(request, blocks, 4 * TOKENS)
        (load,) = scheduler.next_step({}, lambda name: blocks).loads
        self.assertEqual((load.blocks, load.all_or_nothing), ([10, 11, 12, 13, 30, 31], True))
        # One of them lacks a block: everything is computed and saved.
        for least in (6, 5):
            scheduler.take_report(Report(loaded={load.job: Tally(1, least)}))
        saves = scheduler.next_step({"one": 10 * TOKENS}, lambda name: blocks).saves
        self.assertEqual([(save.first, len(save.blocks)) for save in saves], [(0, 10), (2, 8)])
        # Where one has windows behind six blocks, and the other behind four, neither may do for the other.
        other = self.prompt("two", 10 * TOKENS, seed=2)
        scheduler.matched_tokens(other, 0)
        (question,) = scheduler.next_step({}, lambda name: [[], []]).questions
        for blocks in (6, 4):
            scheduler.take_report(Report(answers={question.number: Tally(1, blocks, 1.0)}))
        self.assertEqual(scheduler.matched_tokens(other, 0), (0, False))

    def test_questions_name_the_blocks_of_all_groups(self) -> None:
        asked: list[Question] = []

        def look(question: Question) -> Answer:
            asked.append(question)
            return Answer(0)

        scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: look, windows=(WINDOW, None, None))
        request = self.prompt("one", 5 * TOKENS)
        scheduler.matched_tokens(request, TOKENS)
        (question,) = asked
        self.assertEqual(question.hashes, request.block_hashes[1:4])
        self.assertEqual([window for _, window in question.groups], [WINDOW, (1 << 64) - 1])
        names = question.hashes + [name for hashes, _ in question.groups for name in hashes]
        self.assertEqual((len(names), len(set(names))), (9, 9))

    def test_saves_of_all_groups_are_bounded_together(self) -> None:
        scheduler, request = Scheduler(TOKENS, TOKENS, 1, 8, windows=(None, WINDOW)), self.prompt("one", 10 * TOKENS)
        pool = Pool(30)
        scheduler.bind(pool)
        blocks = [pool.take(10), pool.take(10)]
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, blocks, 0)
        steps = []
        for _ in range(4):
            step = scheduler.next_step({"one": 10 * TOKENS}, lambda name: blocks)
            steps.append([(save.first, len(save.blocks)) for save in step.saves])
            done = Report()
            for save in step.saves:
                done.saved[save.job] = Tally(1, len(save.blocks))
            scheduler.take_report(done)
        self.assertEqual(steps, [[(0, 4)] * 2, [(4, 4)] * 2, [(8, 2)] * 2, []])

    def test_many_prompts_in_little_memory(self) -> None:
        for seed in range(3):
            with self.subTest(seed=seed):
                chance = random.Random(seed)
                engine = Engine(self.store(60), 200, (None, WINDOW, WINDOW))
                bases = [self.prompt("", 30 * TOKENS, seed=base).tokens for base in range(4)]
                for number in range(60):
                    base = bases[chance.randrange(4)][: chance.randrange(5, 30 * TOKENS)]
                    own = self.prompt("", chance.randrange(1, 3 * TOKENS), seed=1000 * seed + number).tokens
                    engine.run(Request(str(number), base + own))
                self.assertEqual(engine.wrong, [])
                self.assertGreater(engine.loaded, 30, "nothing was tried")
                self.assertEqual((len(engine.pool.free), engine.scheduler.is_waiting()), (199, False))


if __name__ == "__main__":
    unittest.main()
