#!/usr/bin/env python3
"""Hostile bytes against every listening port of `kvasir serve`, `gateway`, `worker`, `store` and `mock`.

    tests/hostile/run.py [--connections N] [--seconds S] [--seed N] [--kvasir PATH]
    tests/hostile/run.py --self-test

Starts the roles on loopback, finds their listening TCP ports and unix sockets in /proc (by process id, so a port that is added
later is attacked, too), and sends to each of them: random bytes, handshakes cut at every kind of place, lengths that no message
has, HTTP, and many connections at once. A gateway that subscribes to a hostile engine's events is among them. Meanwhile real
clients ask each role. Afterwards:

* no process has ended, the children of `serve` included (same process ids);
* each process's resident memory has grown by at most 64 MiB, at its peak;
* every real client was answered, in time.

One line for each port says how much its process grew while it was attacked. `--self-test` plants processes that die, grow and
hang, and one that is sound, and must find exactly the first three.

Needs Python 3.9 and Linux, nothing else. The seed of all draws is printed. Ends with 0, or 1 with the reasons.
"""

import argparse
import json
import os
import random
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
GROWTH_MAX = 64 * MIB
# A real client waits no longer than this; a full accept queue costs it one retry of its SYN, which takes a second or three.
CLIENT_WITHIN = 10.0
# How long an attacker waits for the other side before it goes on.
ATTACKER_WITHIN = 0.3
READY_WITHIN = 120.0
REPOSITORY = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

# --- /proc ---


def resident(pid):
    """Bytes of resident memory; 0 for a process that is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def parent_and_state(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            # The name in parentheses may hold anything.
            state, parent = stat.read().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return int(parent), state


def is_alive(pid):
    found = parent_and_state(pid)
    return found is not None and found[1] not in "ZX"


def family(pid):
    """A process and all its descendants."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := parent_and_state(int(name))):
            parents.setdefault(found[0], []).append(int(name))
    members, at = [pid], 0
    while at < len(members):
        members.extend(parents.get(members[at], []))
        at += 1
    return members


def inodes(pid):
    """Inodes of a process's sockets."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if link.startswith("socket:["):
                found.add(link[8:-1])
    except OSError:
        pass
    return found


def address_of(text):
    """(host, port) of an address as /proc/net/tcp and tcp6 write it: words of the machine's byte order, in hexadecimal."""
    host, port = text.split(":")
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    family_of = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    host = socket.inet_ntop(family_of, raw)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)


def listeners():
    """Target's address by inode, for all that listens in this network namespace."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as lines:
                for line in list(lines)[1:]:
                    words = line.split()
                    if words[3] == "0A":
                        found[words[9]] = address_of(words[1])
        except OSError:
            pass
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
        for line in list(lines)[1:]:
            words = line.split(maxsplit=7)
            # Flag 0x10000 (__SO_ACCEPTCON): it listens.
            if len(words) == 8 and int(words[3], 16) & 0x10000:
                path = words[7].rstrip("\n")
                found[words[6]] = "\0" + path[1:] if path.startswith("@") else path
    return found


class Target:
    """One listening socket."""

    def __init__(self, role, pid, address):
        self.role, self.pid, self.address = role, pid, address

    def __str__(self):
        if isinstance(self.address, str):
            return "unix " + self.address.replace("\0", "@")
        return f"tcp {self.address[0]}:{self.address[1]}"

    def connect(self):
        if isinstance(self.address, str):
            kind = socket.AF_UNIX
        else:
            kind = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        connection = socket.socket(kind, socket.SOCK_STREAM)
        connection.settimeout(ATTACKER_WITHIN)
        try:
            connection.connect(self.address)
        except OSError:
            connection.close()
            return None
        return connection


def targets_of(role, pid):
    """Everything that a process and its descendants listen on; once each."""
    listening, found = listeners(), {}
    for member in family(pid):
        for inode in inodes(member):
            if inode in listening:
                found.setdefault(listening[inode], Target(role, member, listening[inode]))
    return list(found.values())


# --- What is sent ---

ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL" + bytes(48)
ZMTP_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
ZMTP_HUGE = b"\x7f" * 8
TLS_HELLO = b"\x16\x03\x01\xff\xff\x01\x00\xff\xfa\x03\x03"


def h2_frame(kind, flags, stream, payload, length=None):
    length = len(payload) if length is None else length
    return struct.pack(">I", length)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def h2_name(index, value):
    """A header with an indexed name and a literal value, outside of the table (RFC 7541, 6.2.2)."""
    prefix = bytes([index]) if index < 15 else bytes([15, index - 15])
    return prefix + bytes([len(value)]) + value


H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frame(4, 0, 0, b"")
GRPC_CALL = h2_frame(
    1,
    4,
    1,
    b"\x83\x86"
    + h2_name(4, b"/inference.GRPCInferenceService/ModelInfer")
    + h2_name(1, b"localhost")
    + h2_name(31, b"application/grpc")
    + b"\x00\x02te\x08trailers",
)


def h2_data(payload):
    return h2_frame(0, 0, 1, payload)


def http(method, path, headers, body=b""):
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n".encode() + body


CHAT = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
JSON = ("content-type", "application/json")


def tcp_hello(session, lane, version=2):
    """The hello of dataplane/tcp: magic, version, lane, index, connections, reads, session."""
    head = b"KVSRTCP\0" + struct.pack("<HBBB3x", version, lane, 0, 1)
    return head + struct.pack("<I4xQ", 256, session)


# What a port might take for a beginning; each is also sent cut off, and with lengths behind it that no message has.
HANDSHAKES = {
    "http": http("POST", "/v1/chat/completions", [JSON, ("content-length", len(CHAT))], CHAT),
    "zmtp": ZMTP_GREETING + ZMTP_READY + b"\x00\x01\x01",
    "resp": b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n",
    "h2": H2_PREFACE + GRPC_CALL + h2_data(b"\0\0\0\0\x64" + bytes(50)),
    "tcp": tcp_hello(7, 0),
    "rdma": b"KVSRRDMA" + struct.pack("<HH", 1, 1) + bytes(84),
    "shm": b"KVSRSHM2",
    "tls": TLS_HELLO + bytes(200),
}

HUGE = {
    "zmtp: a command of 2^63 bytes (73 bytes)": ZMTP_GREETING + b"\x06" + ZMTP_HUGE,
    "zmtp: a message of 2^63 bytes": ZMTP_GREETING + ZMTP_READY + b"\x02" + ZMTP_HUGE,
    "zmtp: a message of 4 GiB": ZMTP_GREETING + ZMTP_READY + b"\x02" + struct.pack(">Q", 1 << 32),
    "zmtp: 2,000 subscriptions": ZMTP_GREETING + ZMTP_READY + (b"\x00\xc8\x01" + b"t" * 199) * 2000,
    "resp: an argument of 2^63 - 1 bytes": b"*1\r\n$9223372036854775807\r\n",
    "resp: 10^9 arguments": b"*1000000000\r\n$3\r\nGET\r\n",
    "resp: an argument of 64 MiB that does not come": b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$67108864\r\nx",
    "resp: 60,000 empty arguments": b"*65536\r\n" + b"$0\r\n\r\n" * 60_000,
    "resp: commands in a POST": http("POST", "/", [("content-type", "text/plain")], b"FLUSHALL\r\n"),
    "http: a body of 1 TB": http("POST", "/v1/chat/completions", [JSON, ("content-length", 10**12)], b"{"),
    "http: a body of 15 MiB that does not come": http(
        "POST", "/v1/chat/completions", [JSON, ("content-length", 15 << 20)], b"{"
    ),
    "http: a chunk of 2^64 - 1 bytes": http(
        "POST", "/v1/chat/completions", [JSON, ("transfer-encoding", "chunked")], b"ffffffffffffffff\r\n{"
    ),
    "http: a head of 1 MB": http("GET", "/health", [("a", "x" * 1_000_000)]),
    "http: 10,000 headers": http("GET", "/health", [(f"a{at}", "x") for at in range(10_000)]),
    "h2: a frame of 16 MiB": H2_PREFACE + h2_frame(1, 4, 1, b"", 0xFFFFFF),
    "h2: 1,000 calls": H2_PREFACE + b"".join(GRPC_CALL[:5] + struct.pack(">I", at) + GRPC_CALL[9:] for at in range(1, 2001, 2)),
    "grpc: a message of 4 GiB": H2_PREFACE + GRPC_CALL + h2_data(b"\0\xff\xff\xff\xff"),
    "grpc: a message of 16 MiB that does not come": H2_PREFACE + GRPC_CALL + h2_data(b"\0\0\xff\xff\xff" + bytes(100)),
    "tcp: another version": tcp_hello(1, 0, 9),
    "rdma: all ones": b"KVSRRDMA" + b"\xff" * 88,
    "tls: a record of 64 KiB that does not come": TLS_HELLO,
}


# --- Attacks ---


def send(connection, data):
    """Sends what the other side takes; it may hang up at any byte, or stop reading."""
    try:
        connection.sendall(data)
    except OSError:
        pass


def close(connection, draw):
    try:
        if draw.random() < 0.5:
            # A reset, as a process that is killed leaves it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    except OSError:
        pass


def payloads(draw, randoms):
    """What is sent to each port, by kind."""
    for number in range(randoms):
        size = draw.choice([1, 8, 64, 500, 4096, 65_536])
        yield f"random {number}", draw.randbytes(size)
    for name, handshake in HANDSHAKES.items():
        yield f"{name}, whole", handshake
        for _ in range(3):
            yield f"{name}, cut", handshake[: draw.randrange(1, len(handshake))]
        yield f"{name}, then random bytes", handshake + draw.randbytes(2000)
        damaged = bytearray(handshake)
        for _ in range(3):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        yield f"{name}, damaged", bytes(damaged)
    yield from HUGE.items()


def join_data_plane(target, draw):
    """Both lanes of a peer of dataplane/tcp, and then a message of 4 GiB on one and random bytes on the other."""
    session = draw.getrandbits(64)
    lanes = [target.connect() for _ in range(2)]
    lanes = [lane for lane in lanes if lane]
    for number, lane in enumerate(lanes):
        send(lane, tcp_hello(session, number))
    if lanes:
        send(lanes[0], bytes([2, 63, 0, 0]) + b"\xff" * 28)
        send(lanes[-1], draw.randbytes(500))
    return lanes


def attack(target, draw, randoms, crowd, deadline):
    """Everything against one port. Connections stay open until all has been sent. Returns how many there were."""
    count, held = 0, []
    payloads_until = (time.monotonic() + deadline) / 2
    for _, payload in payloads(draw, randoms):
        if time.monotonic() > payloads_until:
            break
        connection = target.connect()
        if connection is None:
            continue
        count += 1
        send(connection, payload)
        held.append(connection)
        if len(held) > 200:
            close(held.pop(0), draw)
    lanes = join_data_plane(target, draw)
    count += len(lanes)
    held.extend(lanes)
    # Many at once, each with a few bytes; a server that has enough of them may leave the rest in its backlog or hang up.
    beginnings = [handshake[: max(1, len(handshake) // 2)] for handshake in HANDSHAKES.values()] + [b""]
    for number in range(crowd):
        if time.monotonic() > deadline:
            break
        connection = target.connect()
        if connection is None:
            # The backlog is full: what is open already is the attack.
            break
        count += 1
        send(connection, beginnings[number % len(beginnings)])
        held.append(connection)
    # Time to read and to judge it.
    time.sleep(ATTACKER_WITHIN)
    for connection in held:
        close(connection, draw)
    return count


# --- Watching ---


def ask(address, request):
    """Status and body of an answer; an error when it does not come in time."""
    with socket.create_connection(address, timeout=CLIENT_WITHIN) as connection:
        connection.settimeout(CLIENT_WITHIN)
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


def get(address, path="/health"):
    return ask(address, http("GET", path, [("connection", "close")]))


def post(address, path, body):
    return ask(address, http("POST", path, [JSON, ("connection", "close"), ("content-length", len(body))], body))


class Role:
    """A process under attack, and its real client."""

    def __init__(self, name, process, real):
        self.name, self.process, self.real = name, process, real
        self.members, self.base, self.peak = [], {}, {}
        self.served, self.failures, self.slowest = 0, [], 0.0

    def settle(self):
        """From here on growth counts."""
        for _ in range(20):
            self.real()
        time.sleep(0.5)
        self.members = family(self.process.pid)
        self.base = {pid: resident(pid) for pid in self.members}
        self.peak = dict(self.base)

    def sample(self):
        for pid in self.members:
            self.peak[pid] = max(self.peak[pid], resident(pid))

    def serve_once(self):
        started = time.monotonic()
        try:
            self.real()
            self.served += 1
        except (OSError, ValueError, IndexError, AssertionError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        self.slowest = max(self.slowest, time.monotonic() - started)

    def problems(self):
        found = [f"process {pid} has ended" for pid in self.members if not is_alive(pid)]
        for pid in self.members:
            growth = self.peak[pid] - self.base[pid]
            if growth > GROWTH_MAX:
                found.append(f"process {pid} grew by {growth / MIB:.1f} MiB")
        if set(family(self.process.pid)) - set(self.members):
            found.append("it has new processes: one was restarted")
        if self.failures:
            found.append(f"{len(self.failures)} of {self.served + len(self.failures)} real requests failed: {self.failures[0]}")
        if not self.served:
            found.append("no real client was served")
        return [f"{self.name}: {problem}" for problem in found]


def watched(roles, work):
    """Does the work while memory is looked at and real clients ask."""
    is_over = threading.Event()

    def look():
        while not is_over.wait(0.05):
            for role in roles:
                role.sample()

    def serve(role):
        while not is_over.is_set():
            role.serve_once()
            is_over.wait(0.2)
        # What the last attack does to a process shows a moment later.
        time.sleep(0.5)
        role.serve_once()

    threads = [threading.Thread(target=look)] + [threading.Thread(target=serve, args=(role,)) for role in roles]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def run(roles, arguments, seed):
    """Attacks all ports of all roles; returns the problems."""
    for role in roles:
        role.settle()
    targets = [target for role in roles for target in targets_of(role.name, role.process.pid)]
    crowd = arguments.connections // max(1, len(targets))
    total = 0
    deadline = time.monotonic() + arguments.seconds

    def work():
        nonlocal total
        for number, target in enumerate(targets):
            draw = random.Random(seed * 1_000_003 + number)
            # A port gets its share of the time that is left.
            share = time.monotonic() + max(1.0, deadline - time.monotonic()) / (len(targets) - number)
            before, role = resident(target.pid), next(role for role in roles if role.name == target.role)
            peak_before = role.peak.get(target.pid, 0)
            count = attack(target, draw, arguments.randoms, crowd, share)
            total += count
            role.sample()
            after, peak = resident(target.pid), role.peak.get(target.pid, 0)
            state = "" if is_alive(target.pid) else "  ENDED"
            print(
                f"{target.role:8} {str(target):58} {count:6} connections  {(after - before) / MIB:+7.1f} MiB"
                f"  peak {max(0, peak - peak_before) / MIB:+7.1f} MiB{state}",
                flush=True,
            )

    watched(roles, work)
    # The processes may still be handling the last attack.
    time.sleep(1.0)
    for role in roles:
        role.sample()
        growth = max((role.peak[pid] - role.base[pid] for pid in role.members), default=0)
        print(
            f"{role.name:8} {len(role.members)} processes, largest growth {growth / MIB:.1f} MiB,"
            f" {role.served} real requests, the slowest took {role.slowest:.2f} s"
        )
    print(f"{len(targets)} ports, {total} connections")
    problems = [problem for role in roles for problem in role.problems()]
    if not targets:
        problems.append("nothing listens: nothing was attacked")
    return problems


# --- The roles ---


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(what, is_done):
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        try:
            if is_done():
                return
        except (OSError, ValueError, IndexError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"FAILED: waited in vain for {what}")


class HostileEngine:
    """A publisher of KV events that greets and then announces a message of 2^63 bytes, to whoever subscribes."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.greeted = 0
        threading.Thread(target=self.publish, daemon=True).start()

    def publish(self):
        ready = ZMTP_READY.replace(b"SUB", b"PUB")
        while True:
            connection, _ = self.listener.accept()
            connection.settimeout(1.0)
            try:
                connection.sendall(ZMTP_GREETING)
                connection.recv(4096)
                connection.sendall(ready)
                connection.recv(4096)
                connection.sendall(b"\x02" + ZMTP_HUGE + b"x")
                connection.recv(4096)
            except OSError:
                pass
            self.greeted += 1
            connection.close()


class Site:
    """All roles of `kvasir` on loopback."""

    def __init__(self, binary, scratch):
        self.binary, self.scratch, self.processes, self.roles = binary, scratch, [], []

    def start(self, name, arguments):
        log = open(os.path.join(self.scratch, f"{name}.log"), "w", encoding="utf-8")
        process = subprocess.Popen(
            [self.binary, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY
        )
        log.close()
        self.processes.append(process)
        return process

    def config(self, name, text):
        path = os.path.join(self.scratch, f"{name}.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'[transfer]\nsocket_folder = "{self.scratch}"\n{text}')
        return path

    def role(self, name, process, real, ready):
        wait_for(f"{name} to be ready (see its log)", ready)
        self.roles.append(Role(name, process, real))

    def open(self):
        def chat(address, model):
            body = json.dumps({**json.loads(CHAT), "model": model, "max_tokens": 4}).encode()

            def real():
                status, answer = post(address, "/v1/chat/completions", body)
                assert status == 200, (status, answer[:200])

            return real

        def answers(address):
            return lambda: get(address)[0] in (200, 503)

        def healthy(address):
            def real():
                status, _ = get(address)
                assert status == 200, status

            return real

        def is_healthy(address):
            return lambda: get(address)[0] == 200

        def has_worker(address):
            def ready():
                status = json.loads(get(address, "/kvasir/status")[1])
                return any(worker["ready"] for worker in status["workers"])

            return ready

        def local(port):
            return ("127.0.0.1", port)

        model_folder = "tests/fixtures/golden/llama"
        mock, plain, gateway, follower, worker, store, served = (free_port() for _ in range(7))
        process = self.start("mock", ["mock", "--listen", f"127.0.0.1:{mock}", "--events", "--model-folder", model_folder])
        self.role("mock", process, chat(local(mock), "tiny"), is_healthy(local(mock)))

        config = self.config(
            "gateway",
            f'[gateway]\nmodel_folder = "{model_folder}"\ngrpc_listen = "127.0.0.1:{free_port()}"\n',
        )
        worker_flag = ["--worker", f"http://127.0.0.1:{mock}"]
        process = self.start(
            "gateway", ["gateway", "--config", config, "--listen", f"127.0.0.1:{gateway}", *worker_flag]
        )
        self.role("gateway", process, chat(local(gateway), "tiny"), has_worker(local(gateway)))

        # A gateway whose engine's events come from somebody hostile. Its mock publishes none of its own.
        self.start("plain", ["mock", "--listen", f"127.0.0.1:{plain}", "--model-folder", model_folder])
        wait_for("the second mock", is_healthy(local(plain)))
        engine = HostileEngine()
        config = self.config(
            "follower",
            f'[gateway]\nmodel_folder = "{model_folder}"\nkv_events = "tcp://127.0.0.1:{engine.port}"\n',
        )
        process = self.start(
            "follower",
            ["gateway", "--config", config, "--listen", f"127.0.0.1:{follower}", "--worker", f"http://127.0.0.1:{plain}"],
        )
        self.engine = engine
        # It may wait for a publisher that never makes sense before it is healthy; it owes an answer.
        self.role("follower", process, answers(local(follower)), answers(local(follower)))

        config = self.config("worker", "")
        process = self.start(
            "worker",
            ["worker", "--role", "both", "--threads", "1", "--config", config, "--listen", f"127.0.0.1:{worker}"],
        )
        self.role("worker", process, healthy(local(worker)), is_healthy(local(worker)))

        config = self.config(
            "store",
            f'[store]\npool = "16 MiB"\nslot = "16 KiB"\nlisten = "127.0.0.1:{free_port()}"\n'
            f'resp = ["127.0.0.1:{free_port()}", "unix:{self.scratch}/resp.sock"]\n[host_tier]\ncapacity = "2 MiB"\n',
        )
        process = self.start("store", ["store", "--config", config, "--listen", f"127.0.0.1:{store}"])
        self.role("store", process, healthy(local(store)), is_healthy(local(store)))

        config = self.config(
            "serve", f'[serve]\npin_cores = false\n[gateway]\ngrpc_listen = "127.0.0.1:{free_port()}"\n'
        )
        process = self.start("serve", ["serve", "--config", config, "--listen", f"127.0.0.1:{served}"])
        self.role("serve", process, chat(local(served), "kvasir-tiny"), has_worker(local(served)))

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# --- The self-test ---


def plant(kind, port):
    """A server for the self-test: answers `GET /health`, and is sound, or dies, grows or hangs."""
    kept = []
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    is_hanging = threading.Event()

    def serve(connection):
        connection.settimeout(0.3)
        data = b""
        try:
            while len(data) < 1 << 20 and not data.endswith(b"\r\n\r\n"):
                if not (piece := connection.recv(4096)):
                    break
                data += piece
        except OSError:
            pass
        if ZMTP_HUGE in data:
            if kind == "dies":
                os._exit(3)
            elif kind == "grows":
                # As much as was announced, within reason, and touched.
                kept.append(b"x" * (100 * MIB))
            elif kind == "hangs":
                is_hanging.set()
        try:
            if data.startswith(b"GET /health") and not is_hanging.is_set():
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            elif is_hanging.is_set():
                time.sleep(60)
        except OSError:
            pass
        connection.close()

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(0.01)
            continue
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def self_test(arguments, seed):
    global CLIENT_WITHIN
    CLIENT_WITHIN = 2.0
    wanted = {"sound": None, "dies": "has ended", "grows": "grew by", "hangs": "real requests failed"}
    failed = []
    for kind, reason in wanted.items():
        port = free_port()
        process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--plant", kind, str(port)])
        try:
            address = ("127.0.0.1", port)

            def real(address=address):
                status, _ = get(address)
                assert status == 200, status

            wait_for(f"the planted server that {kind}", lambda: get(address)[0] == 200)
            problems = run([Role(kind, process, real)], arguments, seed)
        finally:
            process.kill()
            process.wait()
        is_right = not problems if reason is None else any(reason in problem for problem in problems)
        print(f"self-test: {kind}: {problems or 'no problem'}: {'as it must be' if is_right else 'WRONG'}")
        if not is_right:
            failed.append(kind)
    return failed


def main():
    parser = argparse.ArgumentParser(description="Hostile bytes against every listening port.")
    parser.add_argument("--connections", type=int, default=10_000, help="held open at once, divided among the ports")
    parser.add_argument("--randoms", type=int, default=20, help="random payloads for each port")
    parser.add_argument("--seconds", type=float, default=900, help="time for all attacks together")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kvasir", default=None, help="the binary (default: target/debug/kvasir)")
    parser.add_argument("--self-test", action="store_true", help="plant processes that die, grow and hang")
    parser.add_argument("--plant", nargs=2, metavar=("KIND", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plant:
        plant(arguments.plant[0], int(arguments.plant[1]))
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    if arguments.self_test:
        arguments.connections, arguments.randoms, arguments.seconds = 50, 2, min(arguments.seconds, 60)
        failed = self_test(arguments, seed)
        print("FAILED: " + ", ".join(failed) if failed else "the rig finds what is planted")
        return 1 if failed else 0

    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(REPOSITORY, "target"))
    binary = os.path.abspath(arguments.kvasir or os.path.join(target, "debug", "kvasir"))
    if not os.path.exists(binary):
        raise SystemExit(f"FAILED: there is no {binary}: cargo build -p control-node")
    scratch = tempfile.mkdtemp(prefix="kvasir-hostile-")
    site, problems = Site(binary, scratch), ["it did not come to its end"]
    try:
        site.open()
        problems = run(site.roles, arguments, seed)
        if not site.engine.greeted:
            problems.append("follower: it never asked the hostile engine for events")
    finally:
        site.close()
        if problems:
            print(f"logs are in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("all processes live, none grew by more than 64 MiB, every real client was served")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
