"""The worker's side above a store that is full or broken."""

import unittest
from unittest import mock

from kvasir_kv.library import Completion, Operation, Plan, StoreError
from kvasir_kv.messages import Load, Question, Save, Step, Tally
from kvasir_kv.worker import Worker

NAME = b"n" * 32


class FakeStore:
    """Takes as many transfers as it has room for, or fails each call."""

    def __init__(self, room: int = 0, is_broken: bool = False) -> None:
        self.room = room
        self.is_broken = is_broken
        self.is_closed = False
        self.taken: list[int] = []
        self.fetch_room = 100
        self.fetched: list[int] = []
        self.ranges: list[tuple[int, int]] = []
        """Of each fetch: blocks that are not asked for, and all of its chain."""
        self.others: list[int | None] = []
        self.finished: list[Completion] = []

    def submit(
        self,
        user: int,
        operation: Operation,
        tensors: int,
        identities: bytes,
        blocks: list[int],
        event: int,
        chain: tuple[int, bytes | None] | None,
        deadline: float,
        tenant: int = 0,
    ) -> bool:
        self.fail("submit_transfer")
        assert (chain is None) == (operation is Operation.LOAD)
        assert deadline == 0.0 or operation is Operation.LOAD
        if len(self.taken) == self.room:
            return False
        self.taken.append(user)
        return True

    def fetch(self, user: int, identities: bytes, held: int, deadline: float, tenant: int) -> bool:
        self.fail("fetch")
        assert deadline == 0.2
        if len(self.fetched) == self.fetch_room:
            return False
        self.fetched.append(user)
        self.ranges.append((held, len(identities) // 16))
        return True

    def plan(
        self,
        identities: bytes,
        held: int,
        tokens: int,
        block_tokens: int,
        queued_tokens: int,
        may_fetch: bool,
        groups: list[tuple[bytes, int]],
        others: int | None,
    ) -> Plan:
        self.fail("plan_prompt")
        self.others.append(others)
        return Plan(Operation.FETCH, 0, 0.2) if may_fetch else Plan(Operation.LOAD, len(identities) // 16, 0.5)

    def statistics(self) -> dict[str, int]:
        return {"bytes_max": 32 * 4096}

    def poll(self) -> list[Completion]:
        finished, self.finished = self.finished, []
        return finished

    def unregister(self, tensors: int) -> None:
        self.fail("unregister")

    def close(self) -> None:
        self.is_closed = True

    def fail(self, operation: str) -> None:
        if self.is_broken:
            raise StoreError(operation, -6, "the lane is gone")


class WorkersSide(unittest.TestCase):
    def test_loads_overtake_saves_that_wait(self) -> None:
        store = FakeStore(room=1)
        worker = Worker(store, 1, b"k" * 32, 4096)
        worker.save(Step(saves=[Save(job, [NAME], [job]) for job in (1, 2, 3)]))
        worker.load(Step(loads=[Load(job, f"request {job}", [NAME], [job]) for job in (4, 5)]))
        for room, taken in [(1, [1]), (2, [1, 4]), (9, [1, 4, 5, 2, 3])]:
            store.room = room
            worker.poll()
            self.assertEqual(store.taken, taken)

    def test_what_other_nodes_are_known_to_hold_counts_from_the_blocks_that_the_engine_has(self) -> None:
        store = FakeStore()
        worker = Worker(store, 1, b"k" * 32, 4096)
        for others in (None, 1, 4):
            worker.look(Question(1, [NAME] * 5, 2, tokens=100, block_tokens=16, may_fetch=True, others=others))
        self.assertEqual(store.others, [None, 0, 2])

    def test_questions_for_other_nodes_wait_for_room_in_host_memory(self) -> None:
        store = FakeStore()
        worker = Worker(store, 1, b"k" * 32, 4096)
        questions = [
            Question(number, [NAME] * 5, held, tokens=100, block_tokens=16, may_fetch=number < 4)
            for number, held in ((1, 0), (2, 1), (3, 0), (4, 0))
        ]
        worker.load(Step(questions=questions))
        # Of 32 blocks a quarter may be asked for, and one question always; the order is kept.
        self.assertEqual(store.fetched, [1])
        store.finished = [Completion(1, 0, 3, "")]
        worker.poll()
        self.assertEqual(store.fetched, [1, 2])
        self.assertEqual(worker.take_report().answers, {1: Tally(1, 5, 0.5)})
        store.finished = [Completion(2, 0, 3, "")]
        worker.poll()
        self.assertEqual(store.fetched, [1, 2, 3])
        # What the engine has itself does not count; one that asks nobody is answered at once.
        self.assertEqual(worker.take_report().answers, {2: Tally(1, 4, 0.5), 4: Tally(1, 5, 0.5)})

    def test_windows_are_fetched_before_the_end_of_what_came(self) -> None:
        """Two questions of three groups: the second waits until all of the first one's blocks are here, or are not to come."""
        windows = [(4, 6), (1, 6)]
        for what, others, room, ranges in (
            ("all come", None, 100, [(1, 9), *windows]),
            ("the queue is full", None, 2, [(1, 9), (4, 6)]),
            ("nothing came", None, 100, [(1, 9)]),
            ("the prefix failed", None, 100, [(1, 9)]),
            ("the end is known", 6, 100, [(1, 9), *windows]),
            ("the end is known, and is another", 8, 100, [(1, 9), (6, 8), (1, 8), *windows]),
            ("known is that they have nothing", 0, 100, [(1, 9), *windows]),
        ):
            with self.subTest(what):
                store = FakeStore()
                store.fetch_room = room
                worker = Worker(store, 1, b"k" * 32, 4096)
                groups = [([NAME] * 9, 2), ([NAME] * 9, 1 << 64)]
                worker.load(Step(questions=[
                    Question(number, [NAME] * 9, 1, 200, 16, may_fetch=True, groups=groups, others=others if number == 1 else None)
                    for number in (1, 2)
                ]))
                at_once = 1 if not others else 3
                self.assertEqual(store.ranges, ranges[:at_once])
                failure = "cut" if what == "the prefix failed" else ""
                store.finished = [Completion(1, -6 if failure else 0, 1 if what == "nothing came" else 6, failure)]
                worker.poll()
                store.fetch_room = 100
                self.assertEqual(store.ranges[: len(ranges)], ranges)
                of_groups = [number for number in store.fetched if number > 2]
                self.assertEqual(len(of_groups), len(ranges) - 1)
                for number in of_groups:
                    self.assertEqual((worker.take_report().answers, store.fetched.count(2)), ({}, 0))
                    store.finished = [Completion(number, 0, 6, "")]
                    worker.poll()
                self.assertEqual((list(worker.take_report().answers), store.fetched.count(2)), ([1], 1))

    def test_a_broken_store_is_told_of_now_and_then(self) -> None:
        worker = Worker(FakeStore(is_broken=True), 1, b"k" * 32, 4096)
        with mock.patch("kvasir_kv.worker.time.monotonic") as clock, self.assertLogs("vllm.kvasir_kv.worker") as lines:
            for job in range(1000):
                clock.return_value = job * 0.01
                worker.load(Step(loads=[Load(job, "one", [NAME], [job])]))
            self.assertEqual(len(lines.output), 1)
            clock.return_value = 10.0
            worker.load(Step(loads=[Load(1000, "one", [NAME], [0])]))
        self.assertRegex(lines.output[1], "the lane is gone.*999 more")
        self.assertEqual(worker.take_counters()["failures"], 1001)
        self.assertEqual(len(worker.take_missing()), 1000)

    def test_a_store_is_closed_even_if_its_tensors_cannot_be_taken_back(self) -> None:
        store = FakeStore(is_broken=True)
        with self.assertRaisesRegex(StoreError, "unregister"):
            Worker(store, 1, b"k" * 32, 4096).close()
        self.assertTrue(store.is_closed)


if __name__ == "__main__":
    unittest.main()
