"""Hand-offs between engines: what a request says of one, where an engine is reached, and what both sides must share.

A gateway asks both engines of a prompt at once and tells each its leg in `kv_transfer_params`:

    to the engine that computes the prompt:  {"kvasir": "prefill", "transfer_id": N, "receivers": R}
    to the one that generates from it:       {"kvasir": "decode", "transfer_id": N, "from": ADDRESS, "first_process": P}

`ADDRESS` is where the first one's library listens: `host`, and `cuda_ipc`, `shm`, `tcp` and `rdma` as far as they are on, and `processes`,
its workers for each data-parallel rank. Process `n` of an engine, counted over all ranks, listens on the ports of process 0
plus `n` (of RDMA plus `n` times as many as process 0 has), and so is its socket named. The prompt's blocks are with the processes from `P` on.

Processes share out a model's heads. Where the two engines do so differently (`R` processes receive), each pair of processes
with heads in common has a transfer of its own, whose number follows from `N` and their two ranks.

Beside a leg, or alone, the gateway may say how many blocks of the prompt are in stores that engines share (`kvasir_shared_blocks`), and
for how long the request's blocks are to be retained (`kvasir_retain_seconds`).
"""

import hashlib
import ipaddress
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SOCKET = re.compile(r"^(.*/kvasir-vllm-)([0-9]{1,5})((?:-device)?\.sock)$")
_ADDRESS_MAX = 255
"""Longest address that is read."""
SECRET_VARIABLE = "KVASIR_TRANSFER_SECRET"
"""The environment variable that the library takes the secret from when `transfer.secret_file` names none."""
RECEIVERS_MAX = 64
"""Most processes of one engine: the library sends a push to so many."""


@dataclass(frozen=True)
class DataPlaneAddress:
    """Where an engine's library listens. `host` is the same for processes that share memory.

    `processes` share each block.
    """

    host: str
    shm: str | None = None
    tcp: str | None = None
    rdma: tuple[str, ...] = ()
    processes: int = 1
    cuda_ipc: str | None = None

    @classmethod
    def parse(cls, given: Any) -> "DataPlaneAddress | None":
        """From `from` of a leg; none when it is not understood."""
        if not isinstance(given, Mapping):
            return None
        host, cuda_ipc, shm, tcp, rdma = (given.get(name) for name in ("host", "cuda_ipc", "shm", "tcp", "rdma"))
        rails = tuple(rdma) if isinstance(rdma, (list, tuple)) else ()
        sockets = [path for path in (cuda_ipc, shm) if path is not None]
        ports = [address for address in (tcp, *rails) if address is not None]
        if not isinstance(host, str) or not all(
            isinstance(text, str) and len(text) <= _ADDRESS_MAX for text in sockets + ports
        ):
            return None
        if not all(0 < port_of(address) < 1 << 16 for address in ports):
            return None
        processes = given.get("processes", 1)
        if not _is_number(processes, RECEIVERS_MAX + 1) or processes == 0:
            return None
        return cls(host, shm, tcp, rails, processes, cuda_ipc)

    def of_process(self, number: int) -> "DataPlaneAddress":
        """That of another process of the engine whose process 0 this is."""
        if number == 0:
            return self
        return DataPlaneAddress(
            self.host,
            _socket_of(self.shm, number),
            _with_port_offset(self.tcp, number) if self.tcp else None,
            # Each process has as many addresses of RDMA as process 0.
            tuple(_with_port_offset(address, number * len(self.rdma)) for address in self.rdma),
            self.processes,
            _socket_of(self.cuda_ipc, number),
        )

    def address_from(self, here: str) -> str:
        """How the library is to connect from a process of the host `here`; empty when nothing leads there.

        Loopback addresses lead nowhere from another host.
        """
        local = [(kind, path) for kind, path in (("cuda_ipc", self.cuda_ipc), ("shm", self.shm)) if path and self.host == here]
        if local and self.cuda_ipc is None:
            return f"shm:{self.shm}"
        # The others for memory that the driver does not share, for other heads, and for engines on the CPU.
        ways = local + [("rdma", address) for address in self.rdma] + ([("tcp", self.tcp)] if self.tcp else [])
        if _boot(self.host) and _boot(here) and _boot(self.host) != _boot(here):
            ways = [(kind, address) for kind, address in ways if not _is_loopback(address)]
        return ",".join(f"{kind}:{address}" for kind, address in ways)


@dataclass(frozen=True)
class HeadPartition:
    """How the processes of an engine share out a model's heads: `heads` in all, over `processes`."""

    heads: int
    processes: int

    def of(self, rank: int) -> range:
        """Heads of a process. With more processes than heads, neighbours have the same one."""
        if self.processes <= self.heads:
            count = self.heads // self.processes
            return range(rank * count, (rank + 1) * count)
        head = rank // (self.processes // self.heads)
        return range(head, head + 1)

    def senders(self, wanted: range) -> list[int]:
        """The ranks that a process with these heads asks: as few as there can be."""
        ranks = [rank for rank in range(self.processes) if _overlap(self.of(rank), wanted)]
        return [rank for rank in ranks if rank == 0 or self.of(rank) != self.of(rank - 1)]


@dataclass(frozen=True)
class Leg:
    """What a request says of its hand-off; `source` is the engine that computes its prompt, none for that engine itself.

    `receivers` are the processes of the other engine that take a share.
    """

    transfer: int
    source: DataPlaneAddress | None
    receivers: int = 1

    def pushed(self, own: HeadPartition, rank: int) -> list[int]:
        """The transfers of a process that sends: those to the processes that ask it."""
        theirs = HeadPartition(own.heads, self.receivers)
        asking = (at for at in range(self.receivers) if rank in own.senders(theirs.of(at)))
        return [self._number(rank, at) for at in asking]

    def expected(self, own: HeadPartition, rank: int, here: str) -> dict[int, str]:
        """The transfers of a process that receives, each with the way to its sender, which is empty when there is none."""
        assert self.source is not None
        theirs = HeadPartition(own.heads, self.source.processes)
        senders = theirs.senders(own.of(rank))
        return {self._number(at, rank): self.source.of_process(at).address_from(here) for at in senders}

    def _number(self, sender: int, receiver: int) -> int:
        # Odd factors: no two pairs of ranks have one number.
        return (self.transfer + sender * 0x9E37_79B9_7F4A_7C15 + receiver * 0xC2B2_AE3D_27D4_EB4F) % (1 << 64)

    @classmethod
    def of(cls, request: Any) -> "Leg | None":
        """The leg of a request of vLLM's; none for a request without, or with another connector's."""
        params = getattr(request, "kv_transfer_params", None)
        if not isinstance(params, Mapping):
            return None
        kind, transfer, first = params.get("kvasir"), params.get("transfer_id"), params.get("first_process", 0)
        if not _is_number(transfer, 1 << 64) or not _is_number(first, 1 << 16):
            return None
        receivers = params.get("receivers", 1)
        if kind == "prefill":
            return cls(transfer, None, receivers) if _is_number(receivers, RECEIVERS_MAX + 1) and receivers > 0 else None
        source = DataPlaneAddress.parse(params.get("from"))
        return cls(transfer, source.of_process(first)) if kind == "decode" and source is not None else None


def shared_blocks(request: Any) -> int | None:
    """How many blocks of the prompt, from its first one on, the gateway knows to be in stores that engines share; None: it did not say."""
    params = getattr(request, "kv_transfer_params", None)
    blocks = params.get("kvasir_shared_blocks") if isinstance(params, Mapping) else None
    return blocks if _is_number(blocks, 1 << 32) else None


def retain_seconds(request: Any) -> int:
    """For how many seconds the blocks of the request are to be retained; 0: as long as those of any other."""
    params = getattr(request, "kv_transfer_params", None)
    seconds = params.get("kvasir_retain_seconds") if isinstance(params, Mapping) else None
    return seconds if _is_number(seconds, 1 << 32) else 0


def host(folder: str) -> str:
    """Equal in processes that can share memory: one boot of one machine, and one folder for the sockets."""
    try:
        boot = _BOOT.read_text().strip()
        place = os.stat(folder or tempfile.gettempdir())
    except OSError:
        return f"unknown-{os.getpid()}-{os.urandom(4).hex()}/"
    return f"{boot}/{place.st_dev}:{place.st_ino}"


def place(
    transfer: Mapping[str, Any], rdma: Mapping[str, Any], processes: int, *, direct: bool = False
) -> DataPlaneAddress:
    """Where this engine's first process listens, by the sections `transfer` and `rdma` of its store's configuration.

    `direct` is `device.direct`: blocks go between devices' memory where a transport reaches it.
    """
    kind, folder = str(transfer.get("transport", "auto")), str(transfer.get("socket_folder", ""))
    listen = str(transfer.get("listen", ""))
    _, port = _split(listen)
    socket = str(Path(folder or tempfile.gettempdir()) / f"kvasir-{socket_name(port)}")
    rails = str(rdma.get("listen", ""))
    return DataPlaneAddress(
        host(folder),
        f"{socket}.sock" if kind in ("auto", "shm") else None,
        listen if kind in ("auto", "tcp") else None,
        _rails(rails, rdma) if rails and kind in ("auto", "rdma") else (),
        processes,
        f"{socket}-device.sock" if kind in ("auto", "cuda_ipc") and direct else None,
    )


def sections(
    transfer: Mapping[str, Any], rdma: Mapping[str, Any], number: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same sections with the addresses of the engine's process of this number."""
    own, rails = dict(transfer), dict(rdma)
    listen = str(own.get("listen", ""))
    _, port = _split(listen)
    # The same folder as is told to others, whatever the library would take.
    own["socket_folder"] = str(own.get("socket_folder", "")) or tempfile.gettempdir()
    if port:
        own["listen"] = _with_port_offset(listen, number)
        own["socket_name"] = socket_name(port + number)
    if rails.get("listen"):
        rails["listen"] = _with_port_offset(str(rails["listen"]), number * _connections(rdma))
    return own, rails


def _connections(rdma: Mapping[str, Any]) -> int:
    count = rdma.get("connections_per_device", 1)
    return count if _is_number(count, 9) and count > 0 else 1


def _rails(listen: str, rdma: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a process's connections over its device are made: with a port each further one takes the next."""
    if port_of(listen) == 0:
        return (listen,)
    return tuple(_with_port_offset(listen, at) for at in range(_connections(rdma)))


def _socket_of(path: str | None, number: int) -> str | None:
    """The socket of another process of the engine whose process 0 has this one."""
    found = _SOCKET.match(path or "")
    return f"{found[1]}{int(found[2]) + number}{found[3]}" if found else None


def socket_name(port: int) -> str:
    """The name of the socket for processes of this host of the engine that listens on this port."""
    return f"vllm-{port}"


def is_reachable(transfer: Mapping[str, Any]) -> bool:
    """Whether others can know where it listens: on a port that the configuration names."""
    return port_of(str(transfer.get("listen", ""))) > 0


def exposure(transfer: Mapping[str, Any], rdma: Mapping[str, Any]) -> str | None:
    """What to say of an engine that listens beyond this machine and asks its peers for no secret."""
    if transfer.get("secret_file") or os.environ.get(SECRET_VARIABLE):
        return None
    addresses = [str(section.get("listen", "")) for section in (transfer, rdma)]
    beyond = [address for address in addresses if address and not _is_loopback(address)]
    if not beyond:
        return None
    return (
        f"blocks are handed over on {' and '.join(beyond)} and there is no secret: whoever reaches it writes into the memory of "
        f"blocks; set transfer.secret_file, or {SECRET_VARIABLE}"
    )


def fingerprint(facts: Mapping[str, object]) -> str:
    """Sixteen hexadecimal digits of what decides the meaning of blocks on both sides."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kvasir-handoff-1").hexdigest()


def content(last_hash: bytes, senders: int, receivers: int) -> bytes:
    """Sixteen bytes that name what is handed over: equal on both sides, or nothing is sent.

    A whole prompt, by the engine's hash of its last block, which stands for all before it; and how many processes each
    engine has: sides that disagree on that would share out the heads differently, so that some came from nobody.
    """
    name = hashlib.blake2b(last_hash, digest_size=16, person=b"kvasir-content-1")
    name.update(senders.to_bytes(4, "little") + receivers.to_bytes(4, "little"))
    return name.digest()


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _is_number(value: Any, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _boot(of_host: str) -> str:
    """The boot in a `host`; empty when it is not known."""
    boot, slash, _ = of_host.partition("/")
    return boot if slash and not boot.startswith("unknown") else ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(_split(address)[0].strip("[]")).is_loopback
    except ValueError:
        return False


def port_of(address: str) -> int:
    """The port of an address; 0 without one."""
    return _split(address)[1]


def _split(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    return name, int(port) if len(port) <= 5 and port.isascii() and port.isdigit() else 0


def _with_port_offset(address: str, by: int) -> str:
    name, port = _split(address)
    return f"{name}:{port + by}"
