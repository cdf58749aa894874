"""Requests whose blocks are to be retained for a time: `kvasir_retain_seconds` in their `kv_transfer_params`."""

import unittest
from dataclasses import dataclass, field

from kvasir_kv.library import Library, Store, StoreError
from kvasir_kv.messages import Answer, Retain
from kvasir_kv.scheduler import Scheduler
from test_engine import TOKENS, Engine, Request, configuration, wait_until


@dataclass
class Retained(Request):
    """A request with parameters for the connector."""

    kv_transfer_params: dict[str, object] | None = field(default=None)


def retained(name: str, tokens: list[int], seconds: object) -> Retained:
    return Retained(name, tokens, kv_transfer_params={"kvasir_retain_seconds": seconds})


class Retention(unittest.TestCase):
    def test_the_workers_are_told_once_the_request_is_over(self) -> None:
        scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: lambda question: Answer(0))
        for seconds, expected in [(90, 90), (0, 0), (-1, 0), ("90", 0), (True, 0), (1 << 40, 0), (None, 0)]:
            with self.subTest(seconds=seconds):
                request = retained("first", list(range(5 * TOKENS + 3)), seconds)
                scheduler.matched_tokens(request, 0)
                self.assertEqual(scheduler.next_step({}, lambda name: [[]]).retentions, [])
                # It was given up when four blocks were computed.
                request.num_computed_tokens = 4 * TOKENS + 5
                scheduler.finished(request)
                self.assertEqual(scheduler.is_waiting(), expected > 0)
                told = scheduler.next_step({}, lambda name: [[]]).retentions
                self.assertEqual(told, [Retain(request.block_hashes[:4], expected)] if expected else [])

    def test_every_group_of_layers_is_retained(self) -> None:
        windows = (None, 2)
        scheduler = Scheduler(TOKENS, TOKENS, 1, 1000, nearby=lambda: lambda question: Answer(0), windows=windows)
        request = retained("first", list(range(4 * TOKENS)), 60)
        scheduler.matched_tokens(request, 0)
        request.num_computed_tokens = 4 * TOKENS
        scheduler.finished(request)
        told = scheduler.next_step({}, lambda name: [[], []]).retentions
        self.assertEqual([len(retention.hashes) for retention in told], [4, 4])
        self.assertEqual(len({name for retention in told for name in retention.hashes}), 8, "each group has names of its own")

    def test_blocks_outlast_those_of_others(self) -> None:
        store = Store.open(Library(), configuration(24))
        self.addCleanup(store.close)
        engine = Engine(store, 64, is_nearby=True)
        tokens = list(range(4 * TOKENS))
        kept = retained("kept", tokens, 3600)
        engine.submit(kept)
        engine.run()
        wait_until(lambda: engine.worker.statistics()["retained"] == 4)
        for at in range(6):
            engine.submit(Request(f"other {at}", [at + 1000] * 12 * TOKENS))
            engine.run()
        self.assertGreater(engine.worker.statistics()["evicted"], 24)
        engine.submit(Request("second", tokens + [5] * TOKENS))
        engine.run()
        self.assertEqual((engine.loaded, engine.wrong), (4, []))
        self.assertEqual(engine.worker.statistics()["retention_refused"], 0)

    def test_the_library_refuses_what_cannot_be_kept(self) -> None:
        store = Store.open(Library(), configuration(8))
        self.addCleanup(store.close)
        for names, seconds in [(b"", 60), (b"n" * 16, 0)]:
            with self.assertRaises(StoreError):
                store.retain(names, seconds)


if __name__ == "__main__":
    unittest.main()
