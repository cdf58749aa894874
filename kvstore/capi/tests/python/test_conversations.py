"""Conversations that wait for their users: the store hears when an answer is complete and when a prompt goes on with it."""

import tempfile
import unittest
from dataclasses import dataclass

from kvasir_kv.conversations import IdleConversations
from kvasir_kv.library import Library, Store, StoreError
from kvasir_kv.messages import Answer, Question, Step
from kvasir_kv.scheduler import Scheduler
from kvasir_kv.settings import Settings
from test_engine import TOKENS, Engine, Request, configuration, wait_until


@dataclass
class Answered(Request):
    """A request whose last tokens are its answer."""

    answer: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) - self.answer


def answered(name: str, tokens: list[int], answer: int = 0) -> Answered:
    """A request that has been computed."""
    return Answered(name, tokens, num_computed_tokens=len(tokens), answer=answer)


def nothing(question: Question) -> Answer:
    """What a store without blocks says."""
    return Answer(0)


class Conversations(unittest.TestCase):
    def setUp(self) -> None:
        self.scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: nothing, is_prefetching=True)

    def step(self) -> Step:
        return self.scheduler.next_step({}, lambda name: [[]])

    def turn(self, request: Answered) -> Step:
        """What the workers are told of one that comes and is over."""
        self.scheduler.matched_tokens(request, 0)
        told = self.step()
        self.scheduler.finished(request)
        self.assertTrue(self.scheduler.is_waiting(), "the engine has to go on until the workers know")
        told.idle = self.step().idle
        return told

    def test_a_prompt_goes_on_with_an_answer(self) -> None:
        first = answered("first", list(range(100)), answer=40)
        told = self.turn(first)
        self.assertEqual((told.continued, told.idle), ([], [first.block_hashes[:6]]))
        for name, tokens in [
            # The answer's text is cut into the same tokens, or into others: its prompt is there in either case.
            ("same", list(range(100)) + [7] * 60),
            ("other", list(range(62)) + [7] * 60),
        ]:
            with self.subTest(name):
                second = answered(name, tokens)
                self.scheduler.matched_tokens(second, 0)
                self.assertEqual(self.step().continued, [first.block_hashes[5]])
                self.scheduler.finished(second)
                self.step()
                # It goes on once.
                self.scheduler.matched_tokens(answered("late", list(range(70))), 0)
                self.assertEqual(self.step().continued, [])
                self.turn(first)

    def test_prompts_that_only_begin_alike_are_other_conversations(self) -> None:
        self.turn(answered("first", list(range(100))))
        # A common system prompt of three blocks.
        told = self.turn(answered("second", list(range(3 * TOKENS)) + [9] * 60))
        self.assertEqual(told.continued, [])

    def test_a_reset_makes_others_of_them(self) -> None:
        self.turn(answered("first", list(range(100))))
        self.assertTrue(self.scheduler.reset())
        self.scheduler.matched_tokens(answered("second", list(range(120))), 0)
        self.assertEqual(self.step().continued, [])

    def test_nothing_is_told_where_nothing_is_fetched_ahead(self) -> None:
        self.scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: nothing)
        request = answered("first", list(range(100)))
        self.scheduler.matched_tokens(request, 0)
        self.scheduler.finished(request)
        self.assertFalse(self.scheduler.is_waiting())
        self.assertTrue(self.step().is_empty())

    def test_ends_of_conversations_are_bounded(self) -> None:
        idle = IdleConversations(conversations_max=3)
        for at in range(5):
            idle.add(b"%d" % at, [b"%d %d" % (at, end) for end in range(20)])
        self.assertEqual(len(idle), 3)
        first, middle, last = ([idle.take_continued([b"%d %d" % (at, end)]) for at in range(5)] for end in (0, 5, 19))
        self.assertEqual((first, middle, last), ([None, None, b"2", b"3", b"4"], [None] * 5, [None] * 5))
        idle.add(b"5", [b"5 %d" % end for end in range(20)])
        self.assertEqual([idle.take_continued([b"5 5"]), idle.take_continued([b"5 13"]), len(idle)], [None, b"5", 0])

    def test_an_end_that_two_conversations_have_tells_nothing(self) -> None:
        idle = IdleConversations()
        idle.add(b"one", [b"prompt", b"one"])
        idle.add(b"two", [b"prompt", b"two"])
        self.assertEqual(idle.take_continued([b"none", b"prompt"]), None)
        self.assertEqual(idle.take_continued([b"one", b"prompt"]), b"one")
        self.assertEqual(idle.take_continued([b"prompt"]), b"two", "it is the other one's alone now")
        self.assertEqual(len(idle), 0)
        # The same conversation twice is one.
        idle.add(b"one", [b"prompt"])
        idle.add(b"one", [b"prompt"])
        self.assertEqual(idle.take_continued([b"prompt"]), b"one")

    def test_an_answer_that_was_given_up_may_be_gone_on_with(self) -> None:
        request = answered("first", list(range(100)), answer=40)
        # The engine computed 50 of 60 tokens of the prompt.
        request.num_computed_tokens = 50
        self.assertEqual(self.turn(request).idle, [request.block_hashes[:3]])
        self.assertEqual(self.turn(answered("second", list(range(120)))).continued, [request.block_hashes[2]])

    def test_settings(self) -> None:
        def is_prefetching(**store: object) -> bool:
            return Settings.parse({"store": store}).is_prefetching

        self.assertFalse(is_prefetching())
        self.assertTrue(is_prefetching(disk_tier={"path": "/a"}))
        self.assertTrue(is_prefetching(object_tier={"url": "s3://bucket"}))
        self.assertFalse(is_prefetching(disk_tier={"path": "/a"}, host_tier={"prefetch": False}))

    def test_blocks_are_in_memory_before_the_prompt_comes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            text = configuration(24) + 'prefetch_chance = 0.0\nprefetch_lead = "10s"\n'
            text += f'[disk_tier]\npath = "{folder}"\ncapacity = "8 MiB"\nsegment = "8 MiB"\n'
            store = Store.open(Library(), text)
            self.addCleanup(store.close)
            engine = Engine(store, 64, is_nearby=True)
            tokens = list(range(4 * TOKENS))
            first = Request("first", tokens)
            engine.submit(first)
            engine.run()
            for at in range(4):
                engine.submit(Request(f"other {at}", [at + 1000] * 12 * TOKENS))
                engine.run()
            # Others have filled host memory when the store hears that it is idle.
            engine.worker.load(Step(idle=[first.block_hashes]))
            wait_until(lambda: engine.worker.statistics()["disk_read"] >= 4)
            self.assertEqual(engine.worker.statistics()["prefetched"], 4)
            engine.worker.load(Step(continued=first.block_hashes[-1:]))
            engine.submit(Request("second", tokens + [5] * TOKENS))
            engine.run()
            self.assertEqual((engine.loaded, engine.wrong), (4, []))
            wait_until(lambda: engine.worker.statistics()["prefetch_used"] == 4)
            self.assertEqual(engine.worker.statistics()["disk_read"], 4, "the load found them in memory")

    def test_the_library_refuses_what_is_no_conversation(self) -> None:
        store = Store.open(Library(), configuration(8))
        self.addCleanup(store.close)
        for event, names in [(2, b"n" * 16), (1, b"")]:
            with self.assertRaises(StoreError):
                store.conversation(event, names)


if __name__ == "__main__":
    unittest.main()
