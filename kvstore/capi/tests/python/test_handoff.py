"""Two engines without a model, one that computes prompts for the other: what arrives is what was computed, or is computed anew."""

import os
import random
import unittest
from typing import Any

from kvasir_kv import handoff
from kvasir_kv.handoff import Leg, DataPlaneAddress, HeadPartition
from kvasir_kv.library import Completion, Library, Memory, Status, Store
from kvasir_kv.messages import Load, Push, Source, Step
from kvasir_kv.planes import layout
from kvasir_kv.scheduler import Scheduler
from kvasir_kv.worker import Event, HandOff, Worker
from test_engine import BLOCK_BYTES, TOKENS, Engine, Request

NAME = b"n" * 32


class Prompt(Request):
    """A request that is a leg of a hand-off, or none."""

    kv_transfer_params: Any = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)


def prompt(name: str, blocks: int, seed: int = 1, params: Any = None) -> Prompt:
    chance = random.Random(seed)
    request = Prompt(name, [chance.randrange(1000) for _ in range(blocks * TOKENS)])
    request.kv_transfer_params = params
    return request


class HandingOver(Engine):
    """An engine whose library hands blocks over, and that keeps nothing in its store."""

    def __init__(self, transport: str, is_caching: bool = False, deadline: float = 20.0, capacity: int = 1000) -> None:
        transfer = f'[transfer]\ntransport = "{transport}"\nhead_bytes = "{BLOCK_BYTES} B"\n'
        slots = f'capacity = "{capacity * BLOCK_BYTES} B"\nlease = "2 s"\n'
        self.store = Store.open(Library(), f'[store]\nslot = "{BLOCK_BYTES} B"\n{transfer}{slots}')
        super().__init__(self.store, 64, False, is_caching=is_caching)
        cut = self.store.register(layout({"layer": self.tensor}, 64).planes, 64, Memory.HOST)
        kind, _, rest = self.store.handoff_address()[0].partition(":")
        self.place = DataPlaneAddress("here", rest, None) if kind == "shm" else DataPlaneAddress("here", None, rest)
        tensors = self.store.register(layout({"layer": self.tensor}, 64).planes, 64, Memory.HOST)
        self.worker = Worker(
            self.store, tensors, b"k" * 32, BLOCK_BYTES, handoff=HandOff(cut, ["layer"], "here", deadline)
        )
        self.scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, is_offloading=False, is_handing_over=True)
        self.scheduler.bind(self.pool)

    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.scheduler.is_waiting())

    def drop(self, request: Request) -> None:
        """As vLLM aborts: blocks that are loaded into stay until the load is over."""
        self.scheduler.finished(request)
        if request in self.running:
            self.running.remove(request)
            self.free(request)
        else:
            while request.is_loading:
                self.step()
            self.waiting.remove(request)
            self.free(request)


def legs(number: int, place: DataPlaneAddress) -> tuple[dict[str, Any], dict[str, Any]]:
    source = {"host": place.host, "shm": place.shm, "tcp": place.tcp}
    return {"kvasir": "prefill", "transfer_id": number}, {"kvasir": "decode", "transfer_id": number, "from": source}


class Sides(unittest.TestCase):
    number = os.getpid() << 20

    def pair(self, transport: str = "shm", **of_decode: Any) -> tuple[HandingOver, HandingOver]:
        pair = (HandingOver(transport), HandingOver(transport, **of_decode))
        for engine in pair:
            self.addCleanup(engine.store.close)
        return pair

    def legs(self, prefill: HandingOver) -> tuple[dict[str, Any], dict[str, Any]]:
        Sides.number += 1
        return legs(Sides.number, prefill.place)

    def run_both(self, *engines: HandingOver) -> None:
        for _ in range(2_000_000):
            busy = [engine for engine in engines if engine.busy()]
            if not busy:
                break
            for engine in busy:
                engine.step()
        for engine in engines:
            self.assertEqual((engine.wrong, len(engine.pool.free)), ([], 64))

    def rest(self, *engines: HandingOver) -> None:
        for engine in engines:
            for _ in range(1000):
                if engine.store.handoff_statistics()["slots_used"] == 0:
                    break
                engine.store.poll(10)
            self.assertEqual(engine.store.handoff_statistics()["slots_used"], 0)

    def test_a_prompt_arrives_over_each_transport(self) -> None:
        for transport in ("shm", "tcp"):
            with self.subTest(transport):
                prefill, decode = self.pair(transport)
                first, second = self.legs(prefill)
                decode.submit(prompt("d", 20, params=second))
                prefill.submit(prompt("p", 20, params=first))
                self.run_both(prefill, decode)
                # The last token is computed, and so is its block.
                self.assertEqual(decode.worker.take_counters()["received_blocks"], 19)
                self.assertEqual(prefill.worker.take_counters()["handed_over_blocks"], 19)
                self.assertEqual(decode.loaded, 19)
                self.rest(prefill, decode)

    def test_only_what_the_receiver_lacks_is_sent(self) -> None:
        prefill, decode = self.pair(is_caching=True)
        decode.submit(prompt("before", 20))
        decode.run()
        first, second = self.legs(prefill)
        longer = prompt("d", 30, seed=2, params=second)
        longer.tokens[: 12 * TOKENS] = prompt("before", 20).tokens[: 12 * TOKENS]
        longer.block_hashes.clear()
        longer.__post_init__()
        same = Prompt("p", list(longer.tokens))
        same.kv_transfer_params = first
        prefill.submit(same)
        decode.submit(longer)
        self.run_both(prefill, decode)
        self.assertEqual(decode.worker.take_counters()["received_blocks"], 29 - 12)
        self.assertEqual(prefill.store.handoff_statistics()["bytes_sent"], (29 - 12) * BLOCK_BYTES)
        # What is there already is asked for by nobody: its sender hears of it and stops.
        first, second = self.legs(prefill)
        prefill.submit(prompt("p2", 20, params=first))
        decode.submit(prompt("d2", 20, params=second))
        self.run_both(prefill, decode)
        self.assertEqual(decode.worker.take_counters().get("received_blocks", 0), 0)
        self.rest(prefill, decode)

    def test_what_does_not_come_is_computed(self) -> None:
        # Nobody computes it.
        prefill, decode = self.pair(deadline=0.05)
        _, second = self.legs(prefill)
        decode.submit(prompt("d", 10, params=second))
        with self.assertLogs("vllm.kvasir_kv.worker") as lines:
            self.run_both(decode)
        self.assertRegex(lines.output[0], "9 of 9 blocks of d did not come: deadline")
        self.assertEqual(decode.worker.take_counters()["unreceived_blocks"], 9)
        # Another prompt under the same number.
        prefill, decode = self.pair()
        first, second = self.legs(prefill)
        prefill.submit(prompt("p", 10, seed=2, params=first))
        decode.submit(prompt("d", 10, params=second))
        self.run_both(prefill, decode)
        self.assertEqual(decode.worker.take_counters()["unreceived_blocks"], 9)
        # Its sender is given up in the middle.
        first, second = self.legs(prefill)
        half = prompt("p", 20, seed=3, params=first)
        prefill.submit(half)
        decode.submit(prompt("d", 20, seed=3, params=second))
        for _ in range(2):
            decode.step()
            prefill.step()
        prefill.drop(half)
        self.run_both(prefill, decode)
        counted = decode.worker.take_counters()
        self.assertEqual(counted["received_blocks"] + counted["unreceived_blocks"], 19)
        self.assertGreater(counted["unreceived_blocks"], 9)
        # Nothing leads to its sender.
        decode.submit(prompt("d", 5, params=legs(1, DataPlaneAddress("elsewhere", "/x", None))[1]))
        self.run_both(decode)
        self.assertEqual(decode.worker.take_counters()["unreceived_blocks"], 4)
        self.rest(prefill, decode)

    def test_adapters_and_replaced_weights_are_not_handed_over(self) -> None:
        prefill, decode = self.pair()
        for engine in (prefill, decode):
            engine.scheduler = Scheduler(
                TOKENS, TOKENS, 1, 1000, is_offloading=False, is_handing_over=True, adapter_salt=lambda one: one.adapter
            )
            engine.scheduler.bind(engine.pool)
        for case in ("adapter", "weights"):
            with self.subTest(case):
                first, second = self.legs(prefill)
                pair = prompt("p", 10, params=first), prompt("d", 10, params=second)
                if case == "adapter":
                    pair[0].adapter = pair[1].adapter = b"a"
                else:
                    self.assertTrue(prefill.scheduler.reset())
                prefill.submit(pair[0])
                decode.submit(pair[1])
                self.run_both(prefill, decode)
                self.assertEqual(decode.worker.take_counters().get("received_blocks", 0), 0)
                self.assertEqual(prefill.store.handoff_statistics()["bytes_sent"], 0)

    def test_a_receiver_that_is_given_up_holds_nothing(self) -> None:
        prefill, decode = self.pair()
        first, second = self.legs(prefill)
        request = prompt("d", 20, params=second)
        decode.submit(request)
        decode.step()
        self.assertTrue(request.is_loading)
        decode.drop(request)
        self.run_both(decode)
        prefill.submit(prompt("p", 20, params=first))
        self.run_both(prefill)
        self.rest(prefill, decode)
        self.assertEqual(prefill.store.handoff_statistics()["bytes_sent"], 0)
        # One that had not begun declines.
        first, second = self.legs(prefill)
        request = prompt("d", 20, params=second)
        decode.submit(request)
        decode.scheduler.matched_tokens(request, 0)
        decode.drop(request)
        self.run_both(decode)
        prefill.submit(prompt("p", 20, params=first))
        self.run_both(prefill)
        self.rest(prefill, decode)

    def test_sides_that_disagree_on_processes_hand_nothing_over(self) -> None:
        # The decode engine is told of one process and asks it for all heads: the prefill engine has two.
        prefill, decode = self.pair()
        prefill.scheduler = Scheduler(TOKENS, TOKENS, 2, 1000, is_offloading=False, is_handing_over=True)
        prefill.scheduler.bind(prefill.pool)
        first, second = self.legs(prefill)
        step = prefill.scheduler.next_step({}, lambda name: [[]])
        request = prompt("p", 10, params=first)
        request.blocks = prefill.pool.take(10) or []
        prefill.scheduler.matched_tokens(request, 0)
        step = prefill.scheduler.next_step({"p": 10 * TOKENS}, lambda name: [request.blocks])
        self.assertEqual(len(step.pushes), 1)
        prefill.worker.begin(step)
        prefill.worker.save(step)
        decode.submit(prompt("d", 10, params=second))
        self.run_both(decode)
        self.assertEqual(decode.worker.take_counters()["unreceived_blocks"], 9)
        self.assertEqual(prefill.store.handoff_statistics()["bytes_sent"], 0)

    def test_a_request_that_nobody_looked_at_is_told_of(self) -> None:
        prefill, decode = self.pair()
        first, second = self.legs(prefill)
        decode.submit(prompt("d", 10, params=second))
        decode.step()
        prefill.scheduler.finished(prompt("p", 10, params=first))
        prefill.step()
        self.run_both(decode)
        self.assertEqual(decode.worker.take_counters()["unreceived_blocks"], 9)

    def test_random_hand_offs_are_right(self) -> None:
        seed = int(os.environ.get("KVASIR_SEED", "5"))
        chance = random.Random(seed)
        prefill, decode = self.pair(is_caching=True, capacity=40)
        received = 0
        for round_ in range(60):
            pairs = []
            for at in range(chance.randrange(1, 4)):
                first, second = self.legs(prefill)
                blocks, topic = chance.randrange(1, 20), chance.randrange(20)
                pair = [prompt(f"{round_}-{at}", blocks, topic, params) for params in (first, second)]
                pairs.append(pair)
                prefill.submit(pair[0])
                decode.submit(pair[1])
            for _ in range(chance.randrange(8)):
                for engine in chance.sample((prefill, decode), 2):
                    engine.step()
            for engine, side in ((prefill, 0), (decode, 1)):
                for pair in pairs:
                    request = pair[side]
                    if request in engine.running and chance.random() < 0.1:
                        engine.preempt(request)
                    elif (request in engine.running or request in engine.waiting) and chance.random() < 0.2:
                        engine.drop(request)
            self.run_both(prefill, decode)
            received += decode.worker.take_counters().get("received_blocks", 0)
        self.assertGreater(received, 100, f"KVASIR_SEED={seed}")
        self.rest(prefill, decode)


class FakeStore:
    """Takes pushes while it has room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pushed: list[tuple[int, range]] = []
        self.events: list[int] = []
        self.done: list[Completion] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []

    def push(
        self,
        user: int,
        transfers: list[int],
        content: bytes,
        tensors: int,
        first: int,
        blocks: list[int],
        layers: range,
        event: int,
    ) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.events.append(event)
        self.pushed += [(transfer, layers) for transfer in transfers]
        self.done.append(Completion(user, 0, len(blocks), ""))
        return True

    def expect(
        self,
        user: int,
        senders: dict[int, str],
        content: bytes,
        tensors: int,
        first: int,
        blocks: list[int],
        deadline: float,
        event: int,
    ) -> bool:
        self.events.append(event)
        return True

    def handoff_statistics(self) -> dict[str, int]:
        return {"bytes_sent": 100 * len(self.pushed)}

    def cancel_handoff(self, transfer: int) -> None:
        self.cancelled.append(transfer)

    def end_handoff(self, transfer: int) -> None:
        self.ended.append(transfer)

    def poll(self) -> list[Completion]:
        done, self.done = self.done, []
        return done


class Layers(unittest.TestCase):
    def worker(self, store: FakeStore) -> Worker:
        return Worker(store, 1, b"k" * 32, 4096, handoff=HandOff(2, ["a", "b", "c"], "here", 1.0))

    def test_layers_leave_as_they_are_computed(self) -> None:
        store = FakeStore(room=100)
        worker = self.worker(store)
        step = Step(pushes=[Push(1, Leg(7, None), NAME[:16], 0, [4, 5], True)])
        worker.begin(step)
        worker.computed("a")
        worker.computed("of no cache")
        worker.computed("b")
        self.assertEqual(store.pushed, [(7, range(0, 1)), (7, range(1, 2))])
        worker.save(step)
        self.assertEqual((store.pushed[2:], store.ended), ([(7, range(2, 3))], [7]))
        self.assertEqual(worker.take_counters()["early_bytes"], 200, "the last layer was not sent before its end")
        worker.poll()
        self.assertEqual(worker.take_report().saved[1].least, 2)

    def test_each_push_waits_for_the_work_that_was_submitted_before_it(self) -> None:
        class Recorded(Event):
            def __init__(self) -> None:
                recorded.append(self)
                self.handle = len(recorded)

        recorded: list[Recorded] = []
        store = FakeStore(room=3)
        worker = Worker(store, 1, b"k" * 32, 4096, Recorded, HandOff(2, ["a", "b", "c"], "here", 1.0))
        step = Step(pushes=[Push(job, Leg(job, None), NAME[:16], 0, [job], True) for job in (1, 2)])
        worker.begin(step)
        self.assertEqual(recorded, [], "nothing is computed")
        worker.computed("a")
        worker.computed("b")
        self.assertEqual(store.events, [1, 1, 2], "one for all pushes of a layer; the fourth had no room")
        store.room = 100
        worker.save(step)
        self.assertEqual(store.events, [1, 1, 2, 3, 3])
        self.assertEqual(store.pushed[3:], [(1, range(2, 3)), (2, range(1, 3))])
        # What comes may overwrite blocks that an earlier step still reads.
        source = Source(Leg(9, DataPlaneAddress("here", shm="/tmp/kvasir-vllm-7.sock")), NAME[:16], 0)
        worker.load(Step(loads=[Load(3, "a request", [NAME], [6], source)]))
        self.assertEqual(store.events[5:], [4])

    def test_a_push_without_memory_is_told(self) -> None:
        store = FakeStore(room=100)
        worker = self.worker(store)
        step = Step(pushes=[Push(1, Leg(7, None), NAME[:16], 0, [4], True)])
        worker.begin(step)
        worker.save(step)
        store.done = [Completion(store.done[0].user, Status.THROTTLED, 0, "")]
        with self.assertLogs("vllm.kvasir_kv.worker", "WARNING") as logged:
            worker.poll()
        self.assertIn("transfer.capacity, or device.handoff_capacity, is too small", logged.output[0])

    def test_a_layer_that_is_computed_early_waits_for_those_before_it(self) -> None:
        store = FakeStore(room=100)
        worker = self.worker(store)
        for number in (7, 8):
            step = Step(pushes=[Push(number, Leg(number, None), NAME[:16], 0, [4], True)])
            worker.begin(step)
            worker.computed("b")
            self.assertEqual(store.pushed, [])
            worker.computed("a")
            self.assertEqual(store.pushed, [(number, range(0, 2))])
            worker.save(step)
            self.assertEqual(store.pushed[1:], [(number, range(2, 3))])
            store.pushed.clear()

    def test_layers_that_had_no_room_go_later_and_together(self) -> None:
        store = FakeStore(room=1)
        worker = self.worker(store)
        first = Step(pushes=[Push(1, Leg(7, None), NAME[:16], 0, [4], False), Push(2, Leg(8, None), NAME[:16], 0, [5], True)])
        worker.begin(first)
        worker.computed("a")
        worker.save(first)
        worker.poll()
        second = Step(pushes=[Push(3, Leg(7, None), NAME[:16], 1, [6], True)])
        worker.begin(second)
        store.room = 2
        worker.computed("a")
        self.assertEqual(store.pushed, [(7, range(0, 1)), (7, range(1, 3)), (8, range(0, 3))])
        store.room = 9
        worker.save(second)
        self.assertEqual((store.pushed[3:], store.ended), ([(7, range(0, 3))], [8, 7]))
        worker.poll()
        self.assertEqual(sorted(worker.take_report().saved), [1, 2, 3])

    def test_what_was_cancelled_is_not_begun_anew(self) -> None:
        store = FakeStore(room=0)
        worker = self.worker(store)
        step = Step(pushes=[Push(1, Leg(7, None), NAME[:16], 0, [4], False), Push(2, Leg(8, None), NAME[:16], 0, [5], True)])
        worker.begin(step)
        worker.save(step)
        store.room = 9
        worker.begin(Step(cancelled=[Leg(7, None)]))
        worker.poll()
        worker.poll()
        self.assertEqual((store.pushed, store.cancelled, store.ended), ([(8, range(0, 3))], [7], [8]))
        self.assertEqual({job: tally.least for job, tally in worker.take_report().saved.items()}, {1: 0, 2: 1})

    def test_what_nobody_wants_is_not_pushed(self) -> None:
        store = FakeStore(room=9)
        worker = self.worker(store)
        step = Step(pushes=[Push(1, Leg(7, None), NAME[:16], 0, [4], True)])
        worker.begin(step)
        worker.computed("a")
        store.done = [Completion(store.done[0].user, 1, 0, "")]
        worker.poll()
        worker.save(step)
        self.assertEqual((store.pushed, store.ended), ([(7, range(0, 1))], [7]))
        self.assertEqual(worker.take_report().saved[1].least, 0)


class Places(unittest.TestCase):
    def test_a_leg_is_read_or_is_another_connectors(self) -> None:
        class Asked:
            def __init__(self, params: Any) -> None:
                self.kv_transfer_params = params

        first, second = legs(9, DataPlaneAddress("b/1", "/tmp/kvasir-vllm-7400.sock", "10.0.0.2:7400"))
        self.assertEqual(Leg.of(Asked(first)), Leg(9, None))
        place = DataPlaneAddress("b/1", "/tmp/kvasir-vllm-7400.sock", "10.0.0.2:7400")
        self.assertEqual(Leg.of(Asked(second)), Leg(9, place))
        moved = Leg.of(Asked(second | {"first_process": 2}))
        self.assertEqual(moved.source, DataPlaneAddress("b/1", "/tmp/kvasir-vllm-7402.sock", "10.0.0.2:7402"))
        self.assertEqual(Leg.of(Asked(first | {"receivers": 2})), Leg(9, None, 2))
        for params in (
            None,
            [],
            first | {"receivers": 0},
            {"do_remote_decode": True},
            first | {"transfer_id": "9"},
            first | {"transfer_id": 1 << 64},
            first | {"transfer_id": True},
            second | {"from": None},
            second | {"from": {"tcp": "x:1"}},
            second | {"from": {"host": "h", "rdma": [1]}},
            second | {"from": {"host": "h", "processes": 0}},
            second | {"first_process": -1},
            second | {"from": {"host": "h", "tcp": "a:" + "9" * 5000}},
            second | {"from": {"host": "h", "tcp": "a:70000"}},
            second | {"from": {"host": "h", "tcp": "a"}},
            second | {"from": {"host": "h", "shm": "/" * 5000}},
        ):
            with self.subTest(params):
                self.assertIsNone(Leg.of(Asked(params)))

    def test_processes_of_both_sides_find_each_other(self) -> None:
        for heads, of_prefill, of_decode in [(8, 1, 1), (8, 2, 1), (8, 1, 2), (8, 2, 4), (8, 8, 2), (2, 4, 2), (2, 1, 8), (1, 2, 4)]:
            with self.subTest(heads=heads, prefill=of_prefill, decode=of_decode):
                place = DataPlaneAddress("h", None, "10.0.0.2:7400", (), of_prefill)
                prefill, decode = HeadPartition(heads, of_prefill), HeadPartition(heads, of_decode)
                computing, generating = Leg(9, None, of_decode), Leg(9, place)
                pushed = {number: rank for rank in range(of_prefill) for number in computing.pushed(prefill, rank)}
                expected = [generating.expected(decode, rank, "h") for rank in range(of_decode)]
                self.assertEqual(sorted(pushed), sorted(number for one in expected for number in one))
                for rank, senders in enumerate(expected):
                    for number, way in senders.items():
                        self.assertEqual(way, f"tcp:10.0.0.2:{7400 + pushed[number]}")
                    found = sorted(head for number in senders for head in prefill.of(pushed[number]))
                    self.assertLessEqual(set(decode.of(rank)), set(found))
                    self.assertEqual(len(found), len(set(found)), "no head is sent twice")
                if of_prefill == of_decode == 1:
                    self.assertEqual(list(pushed), [9])

    def test_the_way_to_a_place(self) -> None:
        place = DataPlaneAddress("b/1", "/x", "127.0.0.1:7", ("10.0.0.1:1", "127.0.0.1:2"))
        self.assertEqual(place.address_from("b/1"), "shm:/x")
        self.assertEqual(place.address_from("b/2"), "rdma:10.0.0.1:1,rdma:127.0.0.1:2,tcp:127.0.0.1:7")
        self.assertEqual(place.address_from("c/1"), "rdma:10.0.0.1:1", "another machine's loopback")
        self.assertEqual(DataPlaneAddress("b/1", "/x", "[::1]:7").address_from("c/1"), "")
        self.assertEqual(DataPlaneAddress("h", None, None).address_from("h"), "")
        device, shm = "/tmp/kvasir-vllm-7400-device.sock", "/tmp/kvasir-vllm-7400.sock"
        direct = DataPlaneAddress("b/1", shm, "10.0.0.1:9", ("10.0.0.1:1",), cuda_ipc=device)
        self.assertEqual(
            direct.of_process(2).address_from("b/1"),
            "cuda_ipc:/tmp/kvasir-vllm-7402-device.sock,shm:/tmp/kvasir-vllm-7402.sock,rdma:10.0.0.1:3,tcp:10.0.0.1:11",
        )
        self.assertEqual(direct.address_from("c/1"), "rdma:10.0.0.1:1,tcp:10.0.0.1:9")
        told = {"host": "b/1", "shm": shm, "tcp": "10.0.0.1:9", "rdma": ["10.0.0.1:1"], "cuda_ipc": device}
        self.assertEqual(DataPlaneAddress.parse(told), direct)
        self.assertIsNone(DataPlaneAddress.parse(told | {"cuda_ipc": 7}))

    def test_a_place_is_what_the_library_opens(self) -> None:
        transfer = {"listen": f"127.0.0.1:{20000 + os.getpid() % 10000}", "head_bytes": "4096 B"}
        told = handoff.place(transfer, {}, 2)
        for process in (0, 3):
            own, _ = handoff.sections(transfer, {}, process)
            text = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in own.items())
            with Store.open(Library(), f'[store]\nslot = "4096 B"\n[transfer]\n{text}') as store:
                expected = told.of_process(process)
                self.assertEqual(store.handoff_address(), [f"shm:{expected.shm}", f"tcp:{expected.tcp}"])
        self.assertEqual((told.processes, handoff.is_reachable(transfer)), (2, True))
        self.assertFalse(handoff.is_reachable({"listen": "127.0.0.1:0"}) or handoff.is_reachable({}))

    def test_an_open_engine_without_a_secret_is_told_of(self) -> None:
        secret = os.environ.pop(handoff.SECRET_VARIABLE, None)
        try:
            for listen in ("10.0.0.1:7", "0.0.0.0:7", "[::]:7"):
                said = handoff.exposure({"listen": listen}, {})
                self.assertTrue(said and listen in said and "secret" in said, said)
            self.assertIn("10.0.0.2:8", handoff.exposure({"listen": "127.0.0.1:7"}, {"listen": "10.0.0.2:8"}) or "")
            for transfer in ({}, {"listen": "127.0.0.1:7"}, {"listen": "[::1]:7"}, {"listen": "10.0.0.1:7", "secret_file": "/s"}):
                self.assertIsNone(handoff.exposure(transfer, {}))
            os.environ[handoff.SECRET_VARIABLE] = "0" * 32
            self.assertIsNone(handoff.exposure({"listen": "10.0.0.1:7"}, {}))
        finally:
            os.environ.pop(handoff.SECRET_VARIABLE, None)
            if secret is not None:
                os.environ[handoff.SECRET_VARIABLE] = secret

    def test_facts_and_hashes_are_told_apart(self) -> None:
        prints = {handoff.fingerprint(facts) for facts in ({}, {"a": 1}, {"a": 2}, {"b": 1})}
        self.assertEqual((len(prints), {len(one) for one in prints}), (4, {16}))
        contents = {handoff.content(*given) for given in ((b"x", 1, 1), (b"y", 1, 1), (b"x", 2, 1), (b"x", 1, 2))}
        self.assertEqual((len(contents), {len(one) for one in contents}), (4, {16}))





if __name__ == "__main__":
    unittest.main()
