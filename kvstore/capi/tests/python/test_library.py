"""The binding against the real library: saves, loads, misses, and what is refused."""

import os
import socket
import tempfile
import time
import unittest

from kvasir_kv.library import Completion, Library, Memory, Operation, Plane, Status, Store, StoreError
from kvasir_kv.planes import layout
from memory import Tensor

BLOCKS = 8
CONFIGURATION = '[store]\nslot = "64 KiB"\n[host_tier]\ncapacity = "4 MiB"\n'


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


def wait(store: Store) -> Completion:
    (completion,) = store.poll(timeout_ms=10_000)
    return completion


class Transfers(unittest.TestCase):
    def setUp(self) -> None:
        self.library = Library()
        self.store = Store.open(self.library, CONFIGURATION)
        self.addCleanup(self.store.close)
        self.tensors = {name: Tensor((BLOCKS, 2, 16, 64)) for name in ("layer.0", "layer.1")}
        self.number = self.store.register(layout(self.tensors, BLOCKS).planes, BLOCKS, Memory.HOST)

    def transfer(self, operation: Operation, identities: bytes, blocks: list[int]) -> Completion:
        self.assertTrue(self.store.submit(7, operation, self.number, identities, blocks))
        completion = wait(self.store)
        self.assertEqual(completion.user, 7)
        return completion

    def test_what_was_saved_is_loaded_into_other_blocks(self) -> None:
        layers = enumerate(self.tensors.values())
        wanted = [[tensor.fill(block, seed) for block in (0, 1, 2)] for seed, tensor in layers]
        saved = self.transfer(Operation.SAVE, names(1, 2, 3), [0, 1, 2])
        self.assertEqual((saved.status, saved.blocks), (Status.OK, 3))
        self.assertEqual(self.store.match(names(1, 2, 3, 4)), 3)
        loaded = self.transfer(Operation.LOAD, names(1, 2, 3), [7, 5, 6])
        self.assertEqual((loaded.status, loaded.blocks), (Status.OK, 3))
        found = [[tensor.read(block) for block in (7, 5, 6)] for tensor in self.tensors.values()]
        self.assertEqual(found, wanted)

    def test_a_load_ends_at_the_first_block_that_is_not_there(self) -> None:
        self.transfer(Operation.SAVE, names(1, 3), [0, 2])
        loaded = self.transfer(Operation.LOAD, names(1, 2, 3), [4, 5, 6])
        self.assertEqual((loaded.status, loaded.blocks, loaded.failure), (Status.MISS, 1, ""))

    def test_a_block_that_is_there_counts_as_saved(self) -> None:
        self.transfer(Operation.SAVE, names(1), [0])
        again = self.transfer(Operation.SAVE, names(1, 2), [0, 1])
        self.assertEqual((again.status, again.blocks), (Status.OK, 2))
        self.assertEqual(self.store.statistics()["blocks"], 2)

    def test_wrong_arguments_are_refused_with_a_text(self) -> None:
        with self.assertRaisesRegex(StoreError, "kvasir_kv_submit_transfer: .*block"):
            self.store.submit(1, Operation.SAVE, self.number, names(1), [BLOCKS])
        with self.assertRaisesRegex(StoreError, "tensors"):
            self.store.submit(1, Operation.SAVE, self.number + 1, names(1), [0])
        with self.assertRaisesRegex(ValueError, "1 identities for 2 blocks"):
            self.store.submit(1, Operation.SAVE, self.number, names(1), [0, 1])
        with self.assertRaisesRegex(ValueError, "17 bytes"):
            self.store.match(b"x" * 17)
        with self.assertRaisesRegex(StoreError, "kvasir_kv_register"):
            self.store.register([Plane(0, 4096, 4096)], BLOCKS, Memory.HOST)
        with self.assertRaises(StoreError) as large:
            self.store.register([Plane(self.tensors["layer.0"].data_ptr(), 1 << 20, 1 << 20)], 1, Memory.HOST)
        self.assertEqual(large.exception.status, -4)
        self.assertEqual(self.store.poll(), [])

    def test_after_unregister_the_number_is_unknown(self) -> None:
        self.store.unregister(self.number)
        with self.assertRaises(StoreError):
            self.store.submit(1, Operation.SAVE, self.number, names(1), [0])


class Opening(unittest.TestCase):
    def test_what_is_wrong_with_a_configuration_is_told(self) -> None:
        with self.assertRaisesRegex(StoreError, "expected a size like"):
            Store.open(Library(), '[host_tier]\ncapacity = "1 GB"\n')

    def test_a_file_that_is_no_library_is_told(self) -> None:
        with self.assertRaisesRegex(StoreError, "no library"):
            Library(__file__)

    def test_a_node_that_cannot_be_reached_is_told_by_its_name(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        nodes = f'[remote_tier]\nnodes = ["lost=tcp:{address}"]\n'
        with Store.open(Library(), CONFIGURATION + nodes) as store:
            until = time.monotonic() + 20
            while not (state := store.node_statistics()["lost"])["failures"]:
                self.assertLess(time.monotonic(), until, state)
                time.sleep(0.01)
            self.assertEqual((state["usable"], state["stored_blocks"], list(store.node_statistics())), (0, 0, ["lost"]))
        with Store.open(Library(), CONFIGURATION) as store:
            self.assertEqual(store.node_statistics(), {})

    def test_a_closed_store_is_refused(self) -> None:
        store = Store.open(Library(), CONFIGURATION)
        store.close()
        with self.assertRaises(StoreError) as closed:
            store.match(names(1))
        self.assertEqual(closed.exception.status, -2)

    def test_blocks_are_found_on_the_disk_after_a_restart_and_damage_is_a_miss(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            disk = f'[disk_tier]\ncapacity = "8 MiB"\nsegment = "4 MiB"\npath = "{folder}"\n'
            tensor = Tensor((BLOCKS, 1 << 15))
            planes = layout({"layer": tensor}, BLOCKS).planes
            wanted = [tensor.fill(block, 1) for block in range(BLOCKS)]
            with Store.open(Library(), CONFIGURATION + disk) as store:
                number = store.register(planes, BLOCKS, Memory.HOST)
                self.assertTrue(store.submit(1, Operation.SAVE, number, names(*range(BLOCKS)), list(range(BLOCKS))))
                self.assertEqual(wait(store).blocks, BLOCKS)
            for block in range(BLOCKS):
                tensor.fill(block, 2)
            with Store.open(Library(), CONFIGURATION + disk) as store:
                number = store.register(planes, BLOCKS, Memory.HOST)
                self.assertTrue(store.submit(1, Operation.LOAD, number, names(*range(BLOCKS)), list(range(BLOCKS))))
                self.assertEqual(wait(store).blocks, BLOCKS)
                self.assertEqual([tensor.read(block) for block in range(BLOCKS)], wanted)
            self.damage(folder, wanted[3])
            with Store.open(Library(), CONFIGURATION + disk) as store:
                number = store.register(planes, BLOCKS, Memory.HOST)
                self.assertTrue(store.submit(1, Operation.LOAD, number, names(*range(BLOCKS)), list(range(BLOCKS))))
                loaded = wait(store)
                self.assertEqual((loaded.status, loaded.blocks), (Status.MISS, 3))

    def damage(self, folder: str, content: bytes) -> None:
        """Flips a byte of the block with this content."""
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                at = file.read().find(content[:64])
            if at >= 0:
                with open(path, "r+b") as file:
                    file.seek(at + 100)
                    byte = file.read(1)[0]
                    file.seek(at + 100)
                    file.write(bytes([byte ^ 1]))
                return
        self.fail("the block is in no file")


if __name__ == "__main__":
    unittest.main()
