"""Conversations through the gateway to two real engines: is what it predicts to be cached what they report?

    routing.py http://127.0.0.1:8200 [--requests 300] [--conversations 40] [--settle 0.3] [--seed 1] [--words 8 90] [--stores URL…]
    routing.py --direct http://127.0.0.1:8101 http://127.0.0.1:8102

With --direct there is no gateway: the script chooses the engine and predicts from its KV events, which checks the
script and the engines' rule; it needs pyzmq and msgspec, so use the Python of $LAB/venv.
Fails if fewer than 99 % of the predictions were exact (or --least).
"""

import argparse
import collections
import json
import random
import re
import statistics
import sys
import threading
import time
import urllib.parse

from engines import chat, get, metric, post, words

BLOCK = 32


class Conversation:
    def __init__(self, number, chance, systems, turn_words):
        self.number, self.words = number, turn_words
        self.group = chance.randrange(len(systems))
        self.messages = [{"role": "system", "content": systems[self.group]}]
        self.chance = random.Random(chance.random())
        self.turns = 0
        self.ready = 0.0

    def next_body(self):
        self.messages.append({"role": "user", "content": words(self.chance, self.chance.randint(*self.words))})
        body = {"model": "tiny", "messages": list(self.messages), "max_tokens": 8, "temperature": 0}
        if self.chance.random() < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class Events:
    """What one engine holds, by its KV events; for --direct. Emptied first, because only new events are heard."""

    def __init__(self, engine):
        import msgspec
        import zmq

        self.decode = msgspec.msgpack.decode
        self.again = zmq.Again
        self.engine = engine
        self.prefixes = {}  # the engine's hash of a block: all tokens up to its end
        self.held = collections.Counter()
        source = json.loads(get(engine, "/kv_event_sources"))["0"]["endpoint"]
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(source.replace("*", urllib.parse.urlsplit(engine).hostname))
        time.sleep(0.5)
        post(engine, "/reset_prefix_cache", {})

    def catch_up(self):
        try:
            while True:
                for event in self.decode(self.socket.recv_multipart(flags=1)[2])[1]:
                    self.take(event)
        except self.again:
            pass

    def take(self, event):
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif event["type"] == "BlockRemoved":
            self.held.subtract(self.prefixes[name] for name in event["block_hashes"] if name in self.prefixes)
        else:
            prefix = self.prefixes.get(event["parent_block_hash"], ())
            for at, name in enumerate(event["block_hashes"]):
                prefix += tuple(event["token_ids"][at * BLOCK : (at + 1) * BLOCK])
                self.prefixes[name] = prefix
                self.held[prefix] += 1

    def overlap(self, messages):
        tokens = post(self.engine, "/tokenize", {"model": "tiny", "messages": messages})["tokens"]
        self.catch_up()
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return next((end // BLOCK - 1 for end in ends if self.held[tuple(tokens[:end])] <= 0), len(ends))


class Run:
    def __init__(self, options):
        chance = random.Random(options.seed)
        self.options = options
        systems = [words(chance, count) for count in (12, 40, 90, 150, 260)]
        self.waiting = [Conversation(number, chance, systems, options.words) for number in range(options.conversations)]
        self.chance = chance
        self.left = options.requests
        self.beginning = collections.Counter()  # first turns in flight, by their system prompt
        self.begin_at = collections.defaultdict(float)
        self.rows = []
        self.events = {url: Events(url) for url in options.urls if options.direct}
        self.lock = threading.Lock()

    def next_turn(self):
        """A conversation whose last turn has settled. None: not now; False: all is done.

        Two first turns with one system prompt do not overlap: the second would be helped by blocks that the first
        is just computing, which no one can predict.
        """
        with self.lock:
            if self.left == 0:
                return False
            now = time.monotonic()
            able = [one for one in self.waiting if one.ready <= now and (one.turns or self.may_begin(one.group, now))]
            if not able:
                return None
            one = self.chance.choice(able)
            self.waiting.remove(one)
            self.beginning[one.group] += one.turns == 0
            self.left -= 1
            return one

    def may_begin(self, group, now):
        return self.beginning[group] == 0 and self.begin_at[group] <= now

    def turn(self, one):
        body = one.next_body()
        if self.options.direct:
            answer, worker, overlap = self.ask_directly(one, body)
        else:
            answer = chat(self.options.urls[0], body)
            route = answer.headers.get("x-kvasir-route", "")
            worker = re.search(r"\bworker=([^;]*)", route)
            overlap = re.search(r"overlap_blocks=(\d+)/(\d+)", route)
            worker, overlap = worker and worker[1], overlap and int(overlap[1])
        one.messages.append({"role": "assistant", "content": answer.text})
        with self.lock:
            self.rows.append(self.row(one, body, answer, worker, overlap))
            settled = time.monotonic() + self.options.settle
            if one.turns == 0:
                self.beginning[one.group] -= 1
                self.begin_at[one.group] = settled
            one.turns += 1
            one.ready = settled
            self.waiting.append(one)
            if len(self.rows) % 50 == 0:
                print(f"  {len(self.rows)} of {self.options.requests} answered", flush=True)

    def ask_directly(self, one, body):
        engine = self.options.urls[one.number % len(self.options.urls)]
        with self.lock:
            overlap = self.events[engine].overlap(body["messages"])
        return chat(engine, body), engine, overlap

    def row(self, one, body, answer, worker, overlap):
        prompt = answer.usage.get("prompt_tokens", 0)
        predicted = None if overlap is None else min(overlap, max(prompt - 1, 0) // BLOCK) * BLOCK
        reason = ""
        if answer.status != 200 or answer.broken or answer.error:
            reason = f"no answer: {answer.status} {answer.error or answer.broken}"
        elif predicted is None:
            reason = "no x-kvasir-route with overlap_blocks in the answer"
        elif answer.cached is None:
            reason = "no cached_tokens in the answer"
        elif answer.cached > predicted:
            reason = "the engine had more: stored by a request that was in flight, or an event was late"
        elif answer.cached < predicted:
            reason = "the engine had less: evicted since, or a wrong entry in the index"
        return dict(conversation=one.number, turn=one.turns, worker=worker, prompt=prompt, predicted=predicted,
                    cached=answer.cached, reason=reason, seconds=answer.seconds,
                    first=answer.first if body.get("stream") else None)

    def go(self):
        while (one := self.next_turn()) is not False:
            if one is None:
                time.sleep(0.01)
            else:
                self.turn(one)

    def report(self):
        rows = self.rows
        wrong = [row for row in rows if row["reason"]]
        for row in wrong:
            print("  not exact: conversation {conversation} turn {turn} on {worker}: {prompt} prompt tokens, "
                  "predicted {predicted}, reported {cached}; {reason}".format(**row))
        exact = len(rows) - len(wrong)
        share = exact / self.options.requests
        print(f"predicted exactly: {exact} of {len(rows)} ({share:.1%})")
        firsts = sorted(row["first"] for row in rows if row["first"])
        wholes = sorted(row["seconds"] for row in rows if row["first"] is None)
        for name, times in (("time to first token, streamed", firsts), ("time to the whole answer, others", wholes)):
            if len(times) > 1:
                tenths = statistics.quantiles(times, n=10)
                print(f"{name}: p50 {statistics.median(times):.3f} s, p90 {tenths[8]:.3f} s of {len(times)}")
        total, cached = sum(row["prompt"] for row in rows), sum(row["cached"] or 0 for row in rows)
        print(f"hit rate: {cached / max(total, 1):.1%} of {total} prompt tokens were cached")
        print("requests by worker:", dict(sorted(collections.Counter(str(row["worker"]) for row in rows).items())))
        return share >= self.options.least


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("urls", nargs="+", help="the gateway, or the engines with --direct")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--settle", type=float, default=0.3, help="seconds between turns, for events to arrive")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.99, help="the part of the predictions that must be exact")
    parser.add_argument("--words", type=int, nargs=2, default=(8, 90), help="fewest and most of a turn")
    parser.add_argument("--stores", nargs="*", default=[], help="engines with KvasirConnector: some store must have been used")
    run = Run(parser.parse_args())
    threads = [threading.Thread(target=run.go) for _ in range(run.options.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    good = run.report()
    if not run.options.direct:
        for line in get(run.options.urls[0], "/metrics").splitlines():
            if line.startswith("kvasir_gateway_cache_prediction_"):
                print(line)
    loaded = 0
    for engine in run.options.stores:
        came, disk = (int(metric(engine, f"vllm:kvasir_{name}")) for name in ("loaded_blocks_total", "store_disk_read"))
        print(f"{engine}: {came} blocks came from its store, {disk} of its blocks were read from the disk")
        loaded += came
    good &= loaded > 0 or not run.options.stores
    sys.exit(0 if good else 1)


main()
