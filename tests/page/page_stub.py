"""A fake gateway: answers what the page asks, with made-up numbers that move.

    page_stub.py --page FOLDER [--port 8900] [--workers 6] [--load 20] [--key KEY] [--hostile] [--sparse]
    page_stub.py --page FOLDER --gateway http://127.0.0.1:8000      serves the page and passes the rest to a real gateway

page_test.py --stub uses it; chat completions sent to it are counted as a gateway would count them.
"""

import argparse
import http.server
import json
import math
import pathlib
import random
import threading
import time
import urllib.error
import urllib.request
import zlib

SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
ROUTING = [us / 1e6 for us in [0.5, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 50, 100, 500, 2000, 20_000]]
HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {"": ("index.html", "text/html"), "page.js": ("page.js", "text/javascript"), "page.css": ("page.css", "text/css")}
BLOCK = 16


class Histogram:
    def __init__(self, le):
        self.le = le
        self.counts = [0] * (len(le) + 1)
        self.sum = 0.0

    def observe(self, value):
        self.counts[next((i for i, bound in enumerate(self.le) if value <= bound), len(self.le))] += 1
        self.sum += value

    def shown(self):
        return {"le": self.le, "counts": self.counts, "sum": self.sum, "count": sum(self.counts)}


class Fleet:
    """The state that is told; `lock` is held around each call."""

    def __init__(self, workers, load, is_hostile, is_sparse):
        self.chance = random.Random(7)
        self.load, self.is_sparse = load, is_sparse
        self.lock = threading.Lock()
        self.started = self.advanced = time.time()
        self.total = {
            name: 0
            for name in "requests failed shed migrations disaggregated hedged broken_streams prompt_tokens cached_tokens generated_tokens".split()
        }
        self.histograms = {"time_to_first_token": Histogram(SECONDS), "inter_token": Histogram(SECONDS), "routing": Histogram(ROUTING)}
        self.decisions, self.last = [], 0
        self.seen = {}
        name = HOSTILE if is_hostile else "both"
        self.plan = {
            "mode": "act", "unix_ms": int(time.time() * 1000),
            "pools": [{"pool": name, "wanted": 4, "ready": 3, "starting": 1, "draining": 0, "stuck": 1, "reason": "demand", "trials": [[0.5, 1.0, 5.2], [0.7, 0.995, 4.1], [0.9, 0.93, 3.4]], "text": f"{name}: 4 workers, by demand",
                       "rate": 5.25, "capacity": None, "need": 3.5, "utilisation": 0.7, "horizon_seconds": 90.0}],
            "changes": [{"unix_ms": int(time.time() * 1000), "pool": name, "from": 3, "to": 4, "text": f"{name}: 4 workers, by demand"}],
        }  # fmt: skip
        if is_hostile:
            self.plan["pools"] += [None, 7, {"wanted": "many"}]
            self.plan["changes"] += [HOSTILE, {"from": -1}]
        self.workers = [self.worker(number, workers) for number in range(workers)]
        if is_hostile:
            self.workers.append(self.worker(0, 2) | {"name": HOSTILE, "engine": HOSTILE, "version": None, "role": HOSTILE, "kv_usage": None})
            self.workers.append({"name": "__proto__", "ready": True, "pools": [None, 3, {"tier": HOSTILE, "blocks": "x", "indexed": -1}],
                                 "transfers": {"bytes_sent": 1, "completed": -3, "rails": [None, 4, {"name": HOSTILE, "bytes": "x", "is_slow": True}],
                                               "stages": [None, 5, {"stage": HOSTILE, "le": [1], "counts": [1, 2], "sum": None}, {"stage": "x", "le": ["a"], "counts": [1]}]}})
            self.workers += [None, {"name": "constructor", "ready": False}, {"ready": True, "kv_usage": "NaN", "predictions": [], "pools": {}}]

    def worker(self, number, of):
        name = f"10.0.{number // 250}.{number % 250 + 11}:8000"
        if of > 4 and number == 4:
            return {"name": name, "ready": False}
        host = 4096 if number % 3 else None
        pools = [{"tier": "device", "blocks": 1024, "indexed": 0}, {"tier": "host", "blocks": host, "indexed": 0}]
        pools += [{"tier": "disk", "blocks": 65536, "indexed": 0}] if number % 2 else []
        return {
            "name": name, "ready": True, "engine": ["vllm", "sglang", "trtllm"][number % 3], "version": ["0.32.0", "0.5.9", "1.3.0"][number % 3],
            "role": "both", "events": number % 3 != 2, "is_out": of > 3 and number % 50 == 2, "ejections": int(number % 50 == 2) * 2, "requests": 0,
            "peers_requests": number % 2, "engine_running": 0, "engine_waiting": 0, "kv_usage": 0.05, "slowness": 1.0 + 0.7 * (number % 7 == 3),
            "pools": pools, "predictions": {"requests": 0, "exact": 0, "predicted_tokens": 0, "reported_tokens": 0},
            "transfers": None if number % 3 else {
                "bytes_sent": 3 << 20, "blocks_received": 48, "completed": 7, "incomplete": 1, "cancelled": 0, "leases_expired": 0, "checksum_failures": 0, "peers_lost": 0,
                "rails": [{"name": "rdma mlx5_0", "bytes": 2 << 20, "retries": 0, "failures": 0, "nanoseconds_per_kib": 41, "is_slow": False},
                          {"name": "rdma mlx5_1", "bytes": 1 << 20, "retries": 2, "failures": 1, "nanoseconds_per_kib": 977, "is_slow": True}],
                "stages": [{"stage": "verify", "le": [0.001, 0.002], "counts": [8, 2, 0], "sum": 0.006}],
            },
        }  # fmt: skip

    def serve(self, prompt, cached, generated):
        """One request, from its decision to its end; returns what was cached."""
        able = [worker for worker in self.workers if worker and worker.get("engine") and not worker["is_out"]]
        worker = able[zlib.crc32(str(prompt[:64]).encode()) % len(able)]
        chance, total = self.chance, self.total
        blocks, held = len(prompt) // BLOCK, cached // BLOCK
        ttft = 0.004 + (len(prompt) - held * BLOCK) * 9e-5 * worker["slowness"] * chance.lognormvariate(0, 0.5)
        total["requests"] += 1
        total["prompt_tokens"] += len(prompt)
        total["cached_tokens"] += held * BLOCK
        total["generated_tokens"] += generated
        self.histograms["time_to_first_token"].observe(ttft)
        for _ in range(generated - 1):
            self.histograms["inter_token"].observe(0.011 * chance.lognormvariate(0, 0.45))
        decided = 2.4 * chance.lognormvariate(0, 0.5)
        self.histograms["routing"].observe(decided / 1e6)
        other = chance.choice(able)
        next_ms = len(prompt) * 0.09
        runner_up = None if other is worker else {"worker": other["name"], "overlap_blocks": 0, "predicted_ms": next_ms}
        why = f"{held} of {blocks} blocks are here; the next best has 0 and would take {next_ms:.1f} ms"
        self.last += 1
        self.decisions.append({
            "sequence": self.last, "unix_ms": int(time.time() * 1000), "worker": worker["name"],
            "prefill": other["name"] if self.last % 9 == 0 and runner_up else None, "prompt_tokens": len(prompt), "blocks": blocks,
            "overlap_blocks": held, "uncached_tokens": len(prompt) - held * BLOCK, "predicted_ms": ttft * 1000, "decided_us": decided,
            "candidates": len(able), "runner_up": runner_up, "reason": why if held and runner_up else "no worker holds any of its blocks; this one is the least loaded",
        })  # fmt: skip
        del self.decisions[:-256]
        worker["predictions"]["requests"] += 1
        worker["predictions"]["exact"] += int(chance.random() < 0.985)
        worker["predictions"]["predicted_tokens"] += held * BLOCK
        worker["predictions"]["reported_tokens"] += held * BLOCK
        for pool, share in zip(worker["pools"], (0.6, 0.9, 0.2)):
            pool["indexed"] = min(pool["blocks"] or 3000, pool["indexed"] + int((blocks - held) * share) + 1)
        return held * BLOCK

    def advance(self):
        """What happened by itself since it was last asked."""
        now = time.time()
        amount = self.load * (now - self.advanced)
        swing = 0.75 + 0.25 * math.sin((now - self.started) / 17)
        for _ in range(int(amount * swing + self.chance.random())):
            long = self.chance.randrange(64, 1400)
            warm = self.chance.random() < 0.7
            self.serve([self.chance.randrange(40)] * long, int(long * 0.9) * warm, self.chance.randrange(5, 60))
            self.total["failed"] += self.chance.random() < 0.001
            self.total["migrations"] += self.chance.random() < 0.002
        self.advanced = now
        for worker in self.workers if self.load else ():
            if worker and worker.get("engine") and not worker["is_out"]:
                worker["requests"] = worker["engine_running"] = max(0, round(self.load / 8 + self.chance.gauss(0, 1.5)))
                worker["engine_waiting"] = int(self.chance.random() < 0.2)
                worker["kv_usage"] = min(0.97, max(0.03, (worker["kv_usage"] or 0.4) + self.chance.gauss(0.002, 0.02)))

    def status(self):
        blocks = sum(pool["indexed"] for worker in self.workers if worker for pool in worker.get("pools", []) if isinstance(pool, dict))
        if self.is_sparse:
            few = [{"name": worker["name"], "ready": True, "kv_usage": None} for worker in self.workers]
            return {"active": 1, "prompt_tokens": 0, "cached_tokens": None, "workers": few, "histograms": {"inter_token": {"le": [1], "counts": [1]}}}
        return {
            "version": "0.1.0", "model": "Qwen3-32B", "strategy": "predicted-time", "started_unix": int(self.started), "now_unix_ms": int(time.time() * 1000),
            "active": int(self.load / 3 + self.chance.random() * 3) if self.load else 0, "waiting": 0, **self.total,
            "index": {"blocks": blocks, "bytes": blocks * 32, "nodes": blocks // 13},
            "histograms": {name: histogram.shown() for name, histogram in self.histograms.items()}, "workers": self.workers,
            "plan": self.plan,
        }  # fmt: skip

    def complete(self, body):
        """A chat completion: what it shares with prompts that came before counts as cached."""
        prompt = [word for message in body["messages"] for word in (message["role"] + " " + message["content"]).split()] * 4
        prompt += ["end"]
        held = 0
        for long in range(len(prompt) // BLOCK * BLOCK, 0, -BLOCK):
            if hash(tuple(prompt[:long])) in self.seen:
                held = long
                break
        for long in range(BLOCK, len(prompt), BLOCK):
            self.seen[hash(tuple(prompt[:long]))] = True
        generated = body.get("max_tokens", 8)
        cached = self.serve(prompt, held, generated)
        return {"prompt_tokens": len(prompt), "completion_tokens": generated, "total_tokens": len(prompt) + generated, "prompt_tokens_details": {"cached_tokens": cached}}


class Stub(http.server.ThreadingHTTPServer):
    """Serves the page from a folder; `is_broken` makes it answer 503, `delay` (seconds) late."""

    daemon_threads = True

    def __init__(self, page, port=0, workers=6, load=0.0, key=None, hostile=False, sparse=False, gateway=None):
        super().__init__(("127.0.0.1", port), Answer)
        self.page, self.key, self.gateway = pathlib.Path(page), key, gateway
        self.fleet = Fleet(workers, load, hostile, sparse)
        self.is_broken = False
        self.delay = 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def start(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self):
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, status, body, kind="application/json", more=()):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in [("content-type", kind), ("content-length", str(len(body))), *more]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refused(self):
        key = self.server.key
        given = self.headers.get("authorization", "")
        if key is None or given == f"Bearer {key}":
            return False
        status = 403 if given == "Bearer user" else 401
        self.send(status, {"error": {"message": HOSTILE}})
        return True

    def do_GET(self):
        path, _, query = self.path.partition("?")
        name = path.removeprefix("/kvasir/") if path.startswith("/kvasir/") else None
        if name in FILES:
            file, kind = FILES[name]
            return self.send(200, (self.server.page / file).read_bytes(), f"{kind}; charset=utf-8", [("content-security-policy", POLICY), ("cache-control", "no-cache")])
        if self.server.gateway:
            return self.passed_on(None)
        if self.refused():
            return None
        if self.server.is_broken:
            return self.send(503, {"error": {"message": "down"}})
        time.sleep(self.server.delay)
        fleet = self.server.fleet
        with fleet.lock:
            if path == "/v1/models":
                return self.send(200, {"data": [{"id": "Qwen3-32B"}]})
            if name == "status":
                fleet.advance()
                return self.send(200, fleet.status())
            if name == "history":
                return self.send(200, {"started_unix": 0, "period_s": 10, "samples": []})
            if name == "decisions" and not fleet.is_sparse:
                after = int(query.removeprefix("after=") or 0)
                return self.send(200, {"last": fleet.last, "decisions": [one for one in fleet.decisions if one["sequence"] > after]})
        return self.send(404, {"error": {"message": "There is no such path."}})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.gateway:
            return self.passed_on(body)
        if self.refused():
            return None
        body = json.loads(body)
        with self.server.fleet.lock:
            usage = self.server.fleet.complete(body)
        message = {"role": "assistant", "content": "so it is said"}
        if not body.get("stream"):
            return self.send(200, {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})
        chunks = [{"choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return self.send(200, "".join(lines).encode(), "text/event-stream")

    def passed_on(self, body):
        headers = {name: self.headers[name] for name in ("authorization", "content-type") if name in self.headers}
        request = urllib.request.Request(self.server.gateway + self.path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return self.send(answer.status, answer.read(), answer.headers.get("content-type", ""))
        except urllib.error.HTTPError as error:
            return self.send(error.code, error.read())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", required=True)
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--load", type=float, default=20)
    parser.add_argument("--key")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--gateway")
    given = vars(parser.parse_args())
    stub = Stub(**given)
    print(stub.url + "/kvasir/", flush=True)
    stub.serve_forever()
