"""What an engine is started with, and names of blocks."""

import json
import os
import pathlib
import tempfile
import unittest

from kvasir_kv import handoff, identity
from kvasir_kv.library import Library, Store
from kvasir_kv.settings import Settings, SettingsError


class Configuration(unittest.TestCase):
    def test_slot_and_folder_are_filled_in(self) -> None:
        disk = {"path": "/kv", "capacity": "1 GiB"}
        settings = Settings.parse({"store": {"disk_tier": disk, "queue": {"threads": 4}}})
        self.assertEqual(
            settings.toml(65537, "rank-3"),
            '[disk_tier]\npath = "/kv/rank-3"\ncapacity = "1 GiB"\n[queue]\nthreads = 4\n[store]\nslot = "69632 B"\n',
        )
        self.assertEqual(Settings.parse({"store": '[store]\nslot = "1 MiB"'}).toml(1, "x"), '[store]\nslot = "1 MiB"\n')

    def test_each_of_several_folders_gets_one_for_the_worker(self) -> None:
        settings = Settings.parse({"store": {"disk_tier": {"path": ["/a", "/b"]}}})
        self.assertIn('path = ["/a/rank-3", "/b/rank-3"]\n', settings.toml(4096, "rank-3"))
        for paths in ["", "/b"], ["/a", 3]:
            with self.assertRaisesRegex(SettingsError, "no folder"):
                Settings.parse({"store": {"disk_tier": {"path": paths}}}).toml(4096, "rank-3")

    def test_of_several_devices_each_process_takes_its_own(self) -> None:
        disk = {"engine": "spdk", "path": ["0000:01:00.0", "0000:02:00.0"]}
        settings = Settings.parse({"store": {"disk_tier": disk}})
        self.assertIn('path = "0000:02:00.0"\n', settings.toml(4096, "rank-1", process=1))
        with self.assertRaisesRegex(SettingsError, "no device for process 2"):
            settings.toml(4096, "rank-2", process=2)
        one = Settings.parse({"store": {"disk_tier": {"engine": "nvme-passthrough", "path": "/dev/ng0n1"}}})
        self.assertIn('path = "/dev/ng0n1"\n', one.toml(4096, "rank-0"))
        with self.assertRaisesRegex(SettingsError, "no device for process 0"):
            Settings.parse({"store": {"disk_tier": {"engine": "nvme-user"}}}).toml(4096, "rank-0")

    def test_each_process_listens_on_a_port_of_its_own(self) -> None:
        transfer = {"listen": "10.0.0.1:7400", "socket_folder": "/run"}
        rdma = {"listen": "10.0.1.1:8000", "devices": ["mlx5_0"]}
        settings = Settings.parse({"store": {"transfer": transfer, "rdma": rdma}, "offload": False, "handoff_deadline": 2})
        self.assertEqual((settings.offload, settings.handoff_deadline), (False, 2.0))
        text = settings.toml(4096, "x", process=3, pieces={"layers": 32})
        for line in (
            'listen = "10.0.0.1:7403"',
            'socket_name = "vllm-7403"',
            "layers = 32",
            'listen = "10.0.1.1:8003"',
            'devices = ["mlx5_0"]',
            "[queue]\ndepth = 4096",
        ):
            self.assertIn(line, text)

    def test_several_connections_over_a_card_take_ports_of_their_own(self) -> None:
        transfer = {"listen": "10.0.0.1:7400", "transport": "rdma"}
        rdma = {"listen": "10.0.1.1:8000", "devices": ["mlx5_0"], "connections_per_device": 3}
        first = handoff.place(transfer, rdma, 4)
        self.assertEqual(first.rdma, ("10.0.1.1:8000", "10.0.1.1:8001", "10.0.1.1:8002"))
        settings = Settings.parse({"store": {"transfer": transfer, "rdma": rdma}})
        for process in (0, 1, 3):
            ports = [8000 + 3 * process + at for at in range(3)]
            self.assertEqual(first.of_process(process).rdma, tuple(f"10.0.1.1:{port}" for port in ports))
            # The library takes the following ones by itself.
            self.assertIn(f'listen = "10.0.1.1:{ports[0]}"', settings.toml(4096, "x", process=process))

    def test_an_engine_with_direct_hand_offs_is_told_by_every_transport(self) -> None:
        transfer, rdma = {"listen": "10.0.0.1:7400", "socket_folder": "/tmp"}, {"listen": "10.0.1.1:8000"}
        device, shm, tcp = "/tmp/kvasir-vllm-7400-device.sock", "/tmp/kvasir-vllm-7400.sock", "10.0.0.1:7400"
        for kind, local, rails in [
            ("auto", (device, shm, tcp), ("10.0.1.1:8000",)),
            ("cuda_ipc", (device, None, None), ()),
            ("rdma", (None, None, None), ("10.0.1.1:8000",)),
        ]:
            settings = Settings.parse({"store": {"device": {"direct": True}, "transfer": transfer | {"transport": kind}}})
            place = handoff.place(settings.transfer or {}, rdma, 1, direct=settings.direct)
            self.assertEqual((place.cuda_ipc, place.shm, place.tcp), local, kind)
            self.assertEqual(place.rdma, rails, kind)
        self.assertFalse(Settings.parse({"store": {"device": {}}}).direct)

    def test_the_device_of_the_tensors_is_filled_in(self) -> None:
        slot = '[store]\nslot = "4096 B"\n'
        self.assertEqual(Settings.parse({}).toml(1, "x", 3), slot + "[device]\nordinal = 3\n")
        given = Settings.parse({"store": {"device": {"staging": "1 GiB", "ordinal": 2}}})
        self.assertEqual(given.toml(1, "x", 3), '[device]\nstaging = "1 GiB"\nordinal = 2\n' + slot)

    def test_any_text_is_one_of_toml(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, '\U0001f9e0\x7f\x01"\\')
            disk = {"path": path, "capacity": "8 MiB", "segment": "4 MiB"}
            store = {"host_tier": {"capacity": "4 MiB"}, "disk_tier": disk}
            with Store.open(Library(), Settings.parse({"store": store}).toml(1, "x")):
                self.assertTrue(os.path.isdir(os.path.join(path, "x")))

    def test_a_file_of_toml_is_read(self) -> None:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write('[host_tier]\ncapacity = "2 GiB"\n')
            file.flush()
            self.assertEqual(Settings.parse({"store_file": file.name}).store, {"host_tier": {"capacity": "2 GiB"}})

    def test_what_is_wrong_is_refused_and_named(self) -> None:
        for given, text in [
            ({"capacity": 1}, "has no capacity; it has library"),
            ({"store": {}, "store_file": "x"}, "both store and store_file"),
            ({"store_file": "/nowhere/x.toml"}, "store_file: .*nowhere"),
            ({"store": "[host_tier"}, "store: "),
            ({"store": {"host_tier": 1}}, "not an object of sections"),
            ({"saving_blocks_max": -1}, "saving_blocks_max is no number"),
            ({"load_blocks_min": True}, "load_blocks_min is no number"),
            ({"library": 1}, "library is no text"),
            ({"offload": 1}, "offload is neither true nor false"),
            ({"handoff_deadline": 0}, "handoff_deadline is not a number of seconds"),
        ]:
            with self.subTest(given), self.assertRaisesRegex(SettingsError, text):
                Settings.parse(given)
        with self.assertRaisesRegex(SettingsError, "host_tier.capacity is no text"):
            Settings.parse({"store": {"host_tier": {"capacity": 1.5}}}).toml(1, "x")
        with self.assertRaisesRegex(SettingsError, "store has a section device, and the KV caches are in host memory"):
            Settings.parse({"store": {"device": {}}}).toml(1, "x")


    def test_stores_that_are_shared_are_told_by_their_names(self) -> None:
        nodes = ["b=tcp:10.0.0.2:7400", "a = shm:/tmp/a.sock", "b=rdma:10.0.1.2:1"]
        self.assertEqual(Settings.parse({"store": {"remote_tier": {"nodes": nodes}}}).shared_stores, ["a", "b"])
        self.assertEqual(Settings.parse({"store": {}}).shared_stores, [])


class Names(unittest.TestCase):
    def test_every_fact_and_salt_gives_other_names(self) -> None:
        hashes = [b"a" * 32, b"b" * 32]
        key = identity.key({"model": "x", "shape": [1, 2]})
        names = identity.identities(key, hashes)
        self.assertEqual(len(names), 32)
        self.assertEqual(names, identity.identities(identity.key({"shape": (1, 2), "model": "x"}), hashes))
        for other in (
            identity.identities(identity.key({"model": "y", "shape": [1, 2]}), hashes),
            identity.identities(key, identity.salted(b"s", hashes)),
            identity.identities(key, hashes[::-1]),
        ):
            self.assertNotEqual(names[:16], other[:16])
            self.assertNotEqual(names[16:], other[16:])
        self.assertEqual(identity.salted(b"", hashes), hashes)
        # A gateway goes by the beginning and the end.
        self.assertEqual([names[at : at + 2].hex() for at in (0, 16)], [identity.tag(key)] * 2)
        self.assertEqual(identity.engine_hash(names[16:]), identity.engine_hash(hashes[1]))

    def test_weights_that_differ_in_one_small_tensor_are_told_apart(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "model.safetensors")

            def write(scale: bytes, layer: int) -> object:
                layers = [bytes([7]) * (1 << 20) for _ in range(20)]
                layers[3] = bytes([layer]) * (1 << 20)
                tensors = {"k_scale": scale, **{f"layer {at}": data for at, data in enumerate(layers)}}
                header, end = {}, 0
                for name, data in tensors.items():
                    header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
                    end += len(data)
                text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
                file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
                return identity.portable(folder, None)

            first = write(b"\x01\x02\x03\x04", 7)
            self.assertEqual(write(b"\x01\x02\x03\x04", 7), first)
            self.assertNotEqual(write(b"\x01\x02\x03\x05", 7), first)
            self.assertNotEqual(write(b"\x01\x02\x03\x04", 8), first)
            # A file that only looks like one is sampled as any other.
            file.write_bytes((1 << 40).to_bytes(8, "little") + b"x" * 100)
            self.assertNotEqual(identity.portable(folder, None), first)

    def test_new_weights_in_the_same_place_are_noticed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            with open(path, "wb") as file:
                file.write(b"weights")
            before = identity.weights(folder), identity.adapter(b"p", "n", 1, folder)
            self.assertEqual(before, (identity.weights(folder), identity.adapter(b"p", "n", 1, folder)))
            os.utime(path, ns=(1, 1))
            self.assertNotEqual(before[0], identity.weights(folder))
            self.assertNotEqual(before[1], identity.adapter(b"p", "n", 1, folder))
            self.assertNotEqual(identity.adapter(b"p", "n", 1, folder), identity.adapter(b"q", "n", 1, folder))
        self.assertIsNone(identity.weights(folder))

    def test_weights_that_nobody_can_tell_apart_have_names_of_this_process_only(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertLogs("vllm.kvasir_kv", "WARNING") as lines:
                unknown = [identity.source(place, None) for place in ("someone/model", "s3://models/one", folder) * 2]
            self.assertEqual((len(set(map(str, unknown))), len(lines.output)), (6, 6))
            with open(os.path.join(folder, "model.safetensors"), "wb") as file:
                file.write(b"weights")
            with self.assertNoLogs("vllm.kvasir_kv"):
                for place, commit, other in [("someone/model", "1" * 40, "2" * 40), (folder, None, "2" * 40)]:
                    self.assertEqual(identity.source(place, commit), identity.source(place, commit))
                    self.assertNotEqual(identity.source(place, commit), identity.source(place, other))


if __name__ == "__main__":
    unittest.main()
