"""What the connector tells vLLM's metrics. The classes that vLLM gives are doubles here."""

import sys
import unittest
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

from kvasir_kv import library

PATH = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"


@dataclass
class Stats:
    """As vLLM's `KVConnectorStats`: a data class, whose generated `__init__` knows nothing of its subclasses' methods."""

    data: dict[str, Any] = field(default_factory=dict)


class Metric:
    """A gauge or a counter of prometheus_client, by the values of its labels."""

    known: dict[str, "Metric"] = {}

    def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str = "") -> None:
        self.labelnames, self.values, self.chosen = labelnames, dict[tuple[str, ...], float](), ()
        assert documentation.endswith("."), documentation
        Metric.known[name] = self

    def labels(self, *values: str) -> "Metric":
        assert len(values) == len(self.labelnames), (values, self.labelnames)
        self.chosen = values
        return self

    def set(self, value: float) -> None:
        self.values[self.chosen] = value

    def inc(self, value: float) -> None:
        self.values[self.chosen] = self.values.get(self.chosen, 0) + value


class PromMetrics:
    def __init__(self, vllm_config: Any) -> None:
        self._labelnames, self.per_engine_labelvalues = ["engine"], {0: ["0"], 1: ["1"]}
        self._gauge_cls = self._counter_cls = Metric


def load():
    """The module over doubles of vLLM's."""
    double = ModuleType(PATH)
    double.KVConnectorStats, double.KVConnectorPromMetrics = Stats, PromMetrics
    names = PATH.split(".")
    parents = {".".join(names[:count]): ModuleType(".".join(names[:count])) for count in range(1, len(names))}
    with mock.patch.dict(sys.modules, parents | {PATH: double}):
        from kvasir_kv import vllm_metrics
    return vllm_metrics


class Metrics(unittest.TestCase):
    def setUp(self) -> None:
        self.module = load()
        Metric.known = {}

    def stats(self, module, usable: int = 1):
        stats = module.KvasirStats.of({"loaded_blocks": 3})
        node = {name: 0 for name in library._NODE_COUNTERS} | {"usable": usable, "read_blocks": 7}
        times = {"seconds": 1.5, "count": 2, "at_most": [0] * 22 + [2]}
        stats.add_store("w0", {"blocks": 5, "retained": 1, "unknown": 9}, {"n0": node})
        stats.add_handoff_details("w0", {"shm": {"block_bytes": 64}}, {"verify": times})
        stats.set_shared(["n0=shm:x"], "ab")
        return stats

    def test_what_is_told_has_a_counter_of_the_library(self) -> None:
        fields = {name for name, *_ in library._Statistics._fields_}
        self.assertEqual(set(self.module.STORE) - fields, set())
        self.assertEqual(set(self.module.HANDOFF) - {name for name, *_ in library._HandOffStatistics._fields_}, set())
        self.assertEqual(set(self.module.NODE), set(library._NODE_COUNTERS))
        self.assertEqual(set(self.module.RAIL), set(library._RAIL_COUNTERS))

    def test_what_comes_later_replaces_and_counters_add_up(self) -> None:
        one, other = self.stats(self.module), self.stats(self.module, usable=0)
        one.aggregate(other)
        self.assertEqual(one.data["counters"], {"loaded_blocks": 6})
        self.assertEqual(one.data["nodes"]["w0"]["n0"]["usable"], 0)
        self.assertEqual(one.reduce(), {"loaded_blocks": 6, "blocks (w0)": 5, "retained (w0)": 1})
        one.reset()
        self.assertTrue(one.is_empty() and self.module.KvasirStats().is_empty())
        # Of a process that says less.
        self.module.KvasirStats({"counters": {}}).aggregate(other)

    def test_metrics_have_values_and_labels(self) -> None:
        with mock.patch.object(self.module.KvasirMetrics, "_tell_data_plane"):
            metrics = self.module.KvasirMetrics(None)
        metrics.observe(self.stats(self.module, usable=0).data, 1)
        values = {name: metric.values for name, metric in Metric.known.items()}
        self.assertEqual(values["vllm:kvasir_loaded_blocks"], {("1",): 3})
        self.assertEqual(values["vllm:kvasir_store_blocks"], {("1", "w0"): 5})
        self.assertEqual(values["vllm:kvasir_node_usable"], {("1", "w0", "n0"): 0})
        self.assertEqual(values["vllm:kvasir_node_read_blocks"], {("1", "w0", "n0"): 7})
        self.assertEqual(values["vllm:kvasir_rail_block_bytes"], {("1", "w0", "shm"): 64})
        self.assertEqual(values["vllm:kvasir_shared_stores"], {("1", "n0=shm:x", "ab"): 1})
        buckets = values["vllm:kvasir_handoff_stage_seconds_bucket"]
        self.assertEqual((buckets["1", "w0", "verify", "+Inf"], len(buckets)), (2, 24))


if __name__ == "__main__":
    unittest.main()
