#!/usr/bin/env python3
"""What hostile bodies and clients that stop reading do to a gateway, and to the clients beside them.

Starts `kvasir mock` and `kvasir gateway` at defaults, then:

bodies   24 bodies of 15 MiB of nested lists at once on each of three surfaces, several times, while other clients
         stream. Shown: the peak of the gateway's resident memory, the answers, and the token gaps of the streams.
readers  with `requests_max = 32`, 32 clients that stop reading long streams. Shown: when a further client is served.

    tests/hostile/bodies.py [--kvasir target/release/kvasir] [--rounds 3] [bodies|readers|all]

Exit code 1 when a figure is beyond its limit: 1 GiB, a p99 gap of 50 ms, 75 s. Python's standard library only; Linux.
"""

import argparse
import collections
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
SURFACES = [("/v1/messages", "messages"), ("/v1/responses", "input"), ("/v1/chat/completions", "messages")]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def request(path, body):
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def status_of(port, path="/health"):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
            return int(client.recv(64).split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class Site:
    """A mock engine and a gateway in front of it."""

    def __init__(self, kvasir, config, step_ms):
        mock, self.port = free_port(), free_port()
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "kvasir.toml")
        with open(path, "w", encoding="ascii") as file:
            file.write(config)
        self.mock = subprocess.Popen(
            [kvasir, "mock", "--listen", f"127.0.0.1:{mock}", "--step-ms", str(step_ms)], stdout=subprocess.DEVNULL
        )
        self.gateway = subprocess.Popen(
            [kvasir, "gateway", "--config", path, "--listen", f"127.0.0.1:{self.port}",
             "--worker", f"http://127.0.0.1:{mock}"]
        )
        for _ in range(600):
            if status_of(self.port) == 200:
                return
            time.sleep(0.1)
        sys.exit("the gateway is not ready")

    def memory(self, name):
        with open(f"/proc/{self.gateway.pid}/status", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[name].split()[0]) * 1024

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.gateway, self.mock):
            process.send_signal(signal.SIGINT)
        for process in (self.gateway, self.mock):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self.folder.cleanup()


def chat(tokens, seed=0):
    return json.dumps({
        "model": "tiny", "stream": True, "max_tokens": tokens, "ignore_eos": True,
        "messages": [{"role": "user", "content": f"Hello {seed}"}],
    }).encode()


def measure(port, stop, gaps, seed):
    """Streams again and again; puts the gaps between tokens, in seconds, into the queue."""
    own = []
    while not stop.is_set():
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(request("/v1/chat/completions", chat(400, seed)))
            last = None
            while True:
                data = client.recv(65536)
                if not data:
                    break
                now = time.perf_counter()
                if b"data: " in data:
                    if last is not None:
                        own.append(now - last)
                    last = now
    gaps.put(own)


def send(port, path, body, answers):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
            client.sendall(request(path, body))
            answers[f"{path} {client.recv(64).split()[1].decode()}"] += 1
    except (OSError, IndexError) as error:
        answers[f"{path} {type(error).__name__}"] += 1


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("inf")


def bodies(kvasir, rounds):
    with Site(kvasir, "", step_ms=10) as site:
        before = site.memory("VmRSS")
        stop, queue = multiprocessing.Event(), multiprocessing.Queue()
        streams = [
            multiprocessing.Process(target=measure, args=(site.port, stop, queue, seed)) for seed in range(8)
        ]
        for stream in streams:
            stream.start()
        time.sleep(2)
        answers = collections.Counter()
        for _ in range(rounds):
            senders = []
            for path, field in SURFACES:
                head = b'{"model":"tiny","max_tokens":1,"%s":[' % field.encode()
                body = head + b"[]," * ((15 * MIB - len(head) - 4) // 3) + b"[]]}"
                senders += [
                    threading.Thread(target=send, args=(site.port, path, body, answers)) for _ in range(24)
                ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
        stop.set()
        gaps = [gap for _ in streams for gap in queue.get(timeout=60)]
        for stream in streams:
            stream.join()
        peak, p99 = site.memory("VmHWM"), quantile(gaps, 0.99)
        alive = site.gateway.poll() is None and status_of(site.port) == 200
        print(f"bodies: resident {before / MIB:.0f} MiB before, {peak / MIB:.0f} MiB at most, "
              f"{site.memory('VmRSS') / MIB:.0f} MiB after")
        print(f"bodies: {len(gaps)} gaps, p50 {quantile(gaps, .5) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, "
              f"longest {max(gaps, default=0) * 1e3:.0f} ms")
        print(f"bodies: answers {dict(answers)}")
        return alive and peak <= 1024 * MIB and p99 <= 0.050


def readers(kvasir):
    config = '[gateway]\nrequests_max = 32\n[access]\nwait_max = "200ms"\n'
    with Site(kvasir, config, step_ms=2) as site:
        stopped = []
        for seed in range(32):
            client = socket.create_connection(("127.0.0.1", site.port))
            client.sendall(request("/v1/chat/completions", chat(120_000, seed)))
            client.recv(64)
            stopped.append(client)
        began = time.monotonic()
        served = None
        while served is None and time.monotonic() - began < 120:
            answers = collections.Counter()
            send(site.port, "/v1/chat/completions", chat(1), answers)
            if answers["/v1/chat/completions 200"]:
                served = time.monotonic() - began
            time.sleep(0.5)
        for client in stopped:
            client.close()
        print("readers: no place in 120 s" if served is None else f"readers: a place after {served:.0f} s")
        return served is not None and served <= 75


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", default="target/release/kvasir")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("what", nargs="?", choices=["bodies", "readers", "all"], default="all")
    args = parser.parse_args()
    fine = True
    if args.what in ("bodies", "all"):
        fine &= bodies(args.kvasir, args.rounds)
    if args.what in ("readers", "all"):
        fine &= readers(args.kvasir)
    print("ok" if fine else "FAILED")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
