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
from kvasir_kv.sglang import KvasirHiCache  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402
from sglang.test.test_utils import CustomTestCase  # noqa: E402

HOST = {"capacity": "64 MiB"}
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
setup = types.SimpleNamespace(layout="page_first", store={})


def rows(pool, reference, indices):
    """Places of these tokens in a buffer of the host's pool."""
    if pool.layout == "page_first_direct":
        return reference, (indices // pool.page_size, indices % pool.page_size)
    return reference, (indices,)


def backup(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.layer_num):
        for device, host in ((self.device_k_buffers, self.k_data_refs), (self.device_v_buffers, self.v_data_refs)):
            place, at = rows(self, host[layer], host_indices.cpu())
            place[at] = device[layer][device_indices.cpu()]


def load(self, device_pool, host_indices, device_indices, layer, io_backend, *, is_draft=False):
    if not 0 <= layer < self.layer_num:
        return
    for device, host in ((self.device_k_buffers, self.k_data_refs), (self.device_v_buffers, self.v_data_refs)):
        place, at = rows(self, host[layer], host_indices.cpu())
        device[layer][device_indices.cpu()] = place[at]


def unpinned(original):
    return lambda self, **more: original(self, **{**more, "pin_memory": False})


def over_kvasir(original):
    """Where a fixture names the file backend it gets Kvasir's."""

    def arguments(**more):
        if more.get("hicache_storage_backend") == "file":
            extra = json.loads(more.get("hicache_storage_backend_extra_config") or "{}")
            extra |= {"backend_name": "kvasir", "module_path": "kvasir_kv.sglang", "class_name": "KvasirHiCache", "interface_v1": 1,
                      "hicache_storage_pass_prefix_keys": True, "namespace": "kits", "store": setup.store}
            more |= {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(extra),
                     "hicache_mem_layout": setup.layout,
                     "hicache_io_backend": "direct" if setup.layout == "page_first_direct" else "kernel"}
        return original(**more)

    return arguments


def noted(original):
    def register(self):
        original(self)
        opened.append(self)

    return register


opened = []
KvasirHiCache.on_host_pools_registered = noted(KvasirHiCache.on_host_pools_registered)
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
        setup.store = {"host_tier": HOST, "object_tier": {"url": f"file://{folder}", "run": "2"}}

    def comes_back(self, config, pages, layout):
        """What one cache has stored another one loads, to the last bit."""
        setup.layout, self.cfg = layout, config
        tokens = self._make_seq(1, pages)
        stored = self._l3_produce("unused", tokens, marker=7)
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
        setup.layout = "page_first_direct"
        tokens = self._make_seq(1, 4)
        consumer, _, _ = self._l3_consumer("unused")
        self._consume_prefetch(consumer, tokens, CacheRequestHandle("other", 0))
        self.assertEqual(fixtures.match_prefix(consumer, tokens).host_hit_length, 0)

    def test_what_is_gone_between_look_and_load_is_a_miss(self):
        setup.layout, self.cfg = "page_first", CacheConfig(page_size=16)
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

    def test_pages_of_a_sliding_window_come_back(self):
        # A store of one process: pages of other pools than the first are not fetched from elsewhere.
        folder = setup.store["object_tier"]["url"].removeprefix("file://")
        disk = {"capacity": "16 MiB", "segment": "4 MiB", "path": folder}
        setup.store, setup.layout = {"host_tier": HOST, "disk_tier": disk}, "page_first"
        components = (ComponentType.FULL, ComponentType.SWA)
        self.cfg = CacheConfig(page_size=4, components=components, sliding_window_size=4)
        tokens = self._make_seq(1, 6)
        self._l3_produce("unused", tokens, marker=7)
        opened[0].close()
        consumer, _, _ = self._l3_consumer("unused")
        self._consume_prefetch(consumer, tokens, CacheRequestHandle("window", 0))
        self.assertEqual(fixtures.match_prefix(consumer, tokens).host_hit_length, len(tokens))


if __name__ == "__main__":
    unittest.main()
