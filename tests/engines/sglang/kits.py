"""SGLang's own fixtures of its hierarchical cache over Kvasir's store: the real radix tree, controller and threads, without a model.

    kits.py [unittest's options]      with KVASIR_KV_LIBRARY, in an environment of install.sh

The fixtures (`sglang.test.kits.unified_radix_cache`) come with SGLang and are for its own storage tests. What is a GPU's there is host
memory here, with the copies between the two in plain torch.
"""

import importlib.machinery
import json
import os
import pathlib
import shutil
import sys
import tempfile
import types
import unittest
from importlib.metadata import files
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "kvstore" / "capi" / "python"))
# SGLang compiles the hash of its pages with ninja, and its test utilities import a package that these tests have no use for.
ninja = next(file for file in files("ninja") if file.name == "ninja").locate().resolve().parent
os.environ["PATH"] = f"{ninja}:{os.environ['PATH']}"
os.environ["SGLANG_TEST_MAX_RETRY"] = "0"
datasets = types.ModuleType("datasets")
datasets.load_dataset, datasets.__spec__ = None, importlib.machinery.ModuleSpec("datasets", None)
sys.modules["datasets"] = datasets

import sglang.test.kits.unified_radix_cache.fixtures as fixtures  # noqa: E402
import sglang.test.kits.unified_radix_cache.mixins as mixins  # noqa: E402
import torch  # noqa: E402
from kvasir_kv.library import StoreError  # noqa: E402
from kvasir_kv.sglang import KvasirHiCache  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402
from sglang.test.test_utils import CustomTestCase  # noqa: E402

HOST = {"capacity": "64 MiB"}
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
scenario = types.SimpleNamespace(layout="page_first", store={})


def host_places(pool, reference, indices):
    """Places of these tokens in a buffer of the host's pool."""
    if pool.layout == "page_first_direct":
        return reference, (indices // pool.page_size, indices % pool.page_size)
    return reference, (indices,)


def backup(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.layer_num):
        for device, host in ((self.device_k_buffers, self.k_data_refs), (self.device_v_buffers, self.v_data_refs)):
            place, at = host_places(self, host[layer], host_indices.cpu())
            place[at] = device[layer][device_indices.cpu()]


def load(self, device_pool, host_indices, device_indices, layer, io_backend, *, is_draft=False):
    if not 0 <= layer < self.layer_num:
        return
    for device, host in ((self.device_k_buffers, self.k_data_refs), (self.device_v_buffers, self.v_data_refs)):
        place, at = host_places(self, host[layer], host_indices.cpu())
        device[layer][device_indices.cpu()] = place[at]


def unpinned(original):
    return lambda self, **more: original(self, **{**more, "pin_memory": False})


def over_kvasir(original):
    """Where a fixture names the file backend it gets Kvasir's."""

    def arguments(**more):
        if more.get("hicache_storage_backend") == "file":
            extra = json.loads(more.get("hicache_storage_backend_extra_config") or "{}")
            extra |= {"backend_name": "kvasir", "module_path": "kvasir_kv.sglang", "class_name": "KvasirHiCache", "interface_v1": 1,
                      "hicache_storage_pass_prefix_keys": True, "namespace": "kits", "store": scenario.store}
            more |= {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(extra),
                     "hicache_mem_layout": scenario.layout,
                     "hicache_io_backend": "direct" if scenario.layout == "page_first_direct" else "kernel"}
        return original(**more)

    return arguments


def recording_opened(original):
    def register(self):
        original(self)
        opened.append(self)

    return register


opened = []
KvasirHiCache.on_host_pools_registered = recording_opened(KvasirHiCache.on_host_pools_registered)
fixtures.get_device = lambda *_: "cpu"
MHATokenToKVPoolHost.backup_from_device_all_layer, MHATokenToKVPoolHost.load_to_device_per_layer = backup, load
HostKVCache.__init__ = unpinned(HostKVCache.__init__)
common._cuda_host_register = lambda *_, **__: None
mixins.ServerArgs = over_kvasir(mixins.ServerArgs)


class OverKvasir(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    """Each consumer has a store of its own: pages reach it through a folder that stands for object storage."""

    def setUp(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.addCleanup(lambda: [opened.pop().close() for _ in opened[:]])
        scenario.store = {"host_tier": HOST, "object_tier": {"url": f"file://{folder}", "run": "2"}}

    def comes_back(self, config, pages, layout, between=lambda: None):
        """What one cache has stored another one loads, to the last bit."""
        scenario.layout, self.cfg = layout, config
        tokens = self._make_seq(1, pages)
        stored = self._l3_produce("unused", tokens, marker=7)
        between()
        consumer, allocator, _ = self._l3_consumer("unused")
        self._consume_prefetch(consumer, tokens, CacheRequestHandle("one", 0))
        found = fixtures.match_prefix(consumer, tokens)
        self.assertEqual(found.host_hit_length, len(tokens))
        self._load_back_node(consumer, found.last_host_node)
        at = consumer.path_device_indices(fixtures.match_prefix(consumer, tokens).last_device_node)
        keys, values = self._snapshot_full_kv(allocator, at)
        self.assertTrue(torch.equal(keys, stored[0]) and torch.equal(values, stored[1]))
        return consumer.cache_controller.storage_backend

    def test_pages_come_back_in_each_layout(self):
        for layout in LAYOUTS:
            with self.subTest(layout):
                self.comes_back(CacheConfig(page_size=16), 4, layout)

    def test_many_pages_come_back(self):
        config = CacheConfig(page_size=4, kv_size=1024, max_context_len=1024, num_layers=2)
        self.comes_back(config, 200, "page_first")

    def test_two_layouts_are_told_apart(self):
        self.comes_back(CacheConfig(page_size=16), 4, "page_first")
        scenario.layout = "page_first_direct"
        tokens = self._make_seq(1, 4)
        consumer, _, _ = self._l3_consumer("unused")
        self._consume_prefetch(consumer, tokens, CacheRequestHandle("other", 0))
        self.assertEqual(fixtures.match_prefix(consumer, tokens).host_hit_length, 0)

    def test_what_is_gone_between_look_and_load_is_a_miss(self):
        scenario.layout, self.cfg = "page_first", CacheConfig(page_size=16)
        tokens = self._make_seq(1, 4)
        self._l3_produce("unused", tokens, marker=5)
        consumer, _, _ = self._l3_consumer("unused")
        backend, found = consumer.cache_controller.storage_backend, []

        def exists(keys, extra_info=None):
            found.append(type(backend).batch_exists(backend, keys, extra_info))
            backend.clear()
            return found[-1]

        backend.batch_exists = exists
        self._consume_prefetch(consumer, tokens, CacheRequestHandle("gone", 0))
        self.assertEqual((found, fixtures.match_prefix(consumer, tokens).host_hit_length), ([4], 0))

    def test_a_cleared_store_finds_nothing_and_stores_anew(self):
        backend = self.comes_back(CacheConfig(page_size=16), 4, "page_first")
        keys = [f"{number:064x}" for number in range(2)]
        indices = torch.arange(2 * 16)
        self.assertEqual(backend.batch_set_v1(keys, indices), [True, True])
        self.assertEqual((backend.batch_exists(keys), backend.batch_get_v1(keys, indices)), (2, [True, True]))
        backend.clear()
        self.assertEqual((backend.batch_exists(keys), backend.batch_get_v1(keys, indices)), (0, [False, False]))
        self.assertEqual(backend.batch_set_v1(keys, indices), [True, True])
        self.assertEqual(backend.batch_exists(keys), 2)

    def test_pages_of_a_sliding_window_come_from_elsewhere(self):
        # Pages of a window are no chain, which objects of several blocks want.
        scenario.store["object_tier"]["run"] = "1"
        components = (ComponentType.FULL, ComponentType.SWA)
        self.comes_back(CacheConfig(page_size=4, components=components, sliding_window_size=8), 6, "page_first")

    def test_pages_of_a_sliding_window_come_back(self):
        folder = scenario.store["object_tier"]["url"].removeprefix("file://")
        disk = {"capacity": "16 MiB", "segment": "4 MiB", "path": folder}
        scenario.store = {"host_tier": HOST, "disk_tier": disk}
        components = (ComponentType.FULL, ComponentType.SWA)
        config = CacheConfig(page_size=4, components=components, sliding_window_size=4)
        self.comes_back(config, 6, "page_first", between=lambda: opened[0].close())

    def test_new_weights_find_nothing_of_the_old_ones(self):
        backend = self.comes_back(CacheConfig(page_size=16), 4, "page_first")
        keys, indices = [f"{number:064x}" for number in range(2)], torch.arange(2 * 16)
        self.assertEqual(backend.batch_set_v1(keys, indices), [True, True])
        with mock.patch("kvasir_kv.sglang._weight_version", lambda: "after an update"):
            self.assertEqual(backend.batch_exists(keys), 0)
            self.assertEqual(backend.batch_set_v1(keys, indices), [True, True])
            self.assertEqual(backend.batch_exists(keys), 2)

    def test_calls_after_the_end_fail_at_once(self):
        backend = self.comes_back(CacheConfig(page_size=16), 4, "page_first")
        backend.close()
        with self.assertRaises(StoreError):
            backend.batch_get_v1(["0" * 64], torch.arange(16))

    def test_what_cannot_be_kept_right_is_refused(self):
        def config(**more):
            given = {"interface_v1": 1, "store": {"host_tier": HOST}} | more.pop("extra", {})
            return HiCacheStorageConfig(tp_rank=0, tp_size=more.pop("tp_size", 1), pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
                                        is_mla_model=more.pop("is_mla_model", False), enable_storage_metrics=True,
                                        is_page_first_layout=True, model_name=None, extra_config=given)

        self.comes_back(CacheConfig(page_size=16), 4, "page_first")
        for said, words in [
            (config(extra={"interface_v1": 0}), "interface_v1"),
            (config(extra={"capacity": 1}), "has no capacity"),
            (config(extra={"store": {"transfer": {}}}), "section transfer"),
            (config(is_mla_model=True, tp_size=2), "only one rank writes"),
        ]:
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                KvasirHiCache(said)
        with mock.patch("kvasir_kv.sglang._is_adapted", lambda: True), self.assertRaisesRegex(ValueError, "LoRA"):
            KvasirHiCache(config())


if __name__ == "__main__":
    unittest.main()
