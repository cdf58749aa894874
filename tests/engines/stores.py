"""A gateway in front of two engines that share KV blocks through stores of other processes (`kvasir store`): it knows what lies there.

    stores.py --kvasir PATH [--ports 8101,8102] [--gateway 127.0.0.1:8200] [--cores 0,1] [--transport shm] [--requests 400] [--seed 1]

First the gateway deals the turns of conversations out to both engines in turn, whose own memory has room for few of them: what one has
computed the other finds in the stores, and the gateway's prediction of cached tokens is compared with what the engine reports. Then the
gateway starts again, and knows the blocks from its snapshot. The same comparison while one of the stores is dead. Then one engine has the stores and the other has not: requests for prompts that lie in the stores
alone must go to the first. At last prompts that ask for it (`prompt_cache_retention`) outlast others in stores that are too small for all.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import engines
import shared
from engines import LAB, chat, words

BLOCK = 32  # tokens
SMALL = ("--num-gpu-blocks-override", "192")
KNOWN_SECONDS = 20  # until the gateway knows what engines share and stores hold, and what they hold no more
# Turns of so many words, in so many conversations: what the other engine has computed since is worth fetching, and no conversation
# becomes longer than the model takes.
WORDS, CONVERSATIONS = ("150", "250"), "120"
SETTLE = "1.0"  # seconds between the turns of a conversation: blocks go to the stores behind the answer
COUNTERS = ("loaded_blocks_total", "missing_blocks_total", "store_far_read", "store_late", "store_recomputed",
            "store_far_searches", "store_far_unanswered", "store_far_cut", "store_far_not_asked")
EXACT_MIN, EXACT_MIN_DEAD, FOLLOWED_MIN = 0.99, 0.95, 10
# Where stores may not come first (see shared.py), 2 to 6 % of the prompts are computed.
EXACT_MIN_LATE, EXACT_MIN_DEAD_LATE = 0.9, 0.5
REMEMBERED_MIN = 0.95  # of the blocks that were known before a restart
SNAPSHOT = LAB / "stores.snapshot"
FOLLOWING = 12  # prompts that lie in the stores alone
FOLLOWING_WORDS = 500
KEPT, KEPT_WORDS = 3, 500  # prompts that are to be retained, and as many that are not
KEPT_MIN = 0.6  # of their tokens: one of the prompts may be computed, when a store answers late
SMALL_POOL = "24 MiB"  # 307 blocks in each of two stores
FLOOD = 120  # prompts that come between: some 2600 blocks


class Gateway:
    def __init__(self, options, stores, engine_ports):
        self.options, self.url = options, f"http://{options.gateway}"
        self.stores, self.workers = stores, [f"http://127.0.0.1:{port}" for port in engine_ports]
        self.process = None

    def start(self, strategy):
        stores = json.dumps([f"http://{store.http}" for store in self.stores])
        configuration = LAB / "stores.toml"
        configuration.write_text(f'[gateway]\nmodel_folder = "{LAB}/tinymodel"\nmodel = "tiny"\nstores = {stores}\n'
                                 f'snapshot_file = "{SNAPSHOT}"\n'
                                 f'[router]\nstrategy = "{strategy}"\n')
        command = [self.options.kvasir, "gateway", "--config", str(configuration), "--listen", self.options.gateway]
        for worker in self.workers:
            command += ["--worker", worker]
        with open(LAB / "gateway.log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        engines.wait("the gateway", lambda: self.ready() == len(self.workers), 60)

    def status(self):
        return json.loads(engines.get(self.url, "/kvasir/status"))

    def ready(self):
        return sum(worker["ready"] for worker in self.status()["workers"])

    def shared(self):
        """Workers that share the stores, blocks of theirs that it knows, and blocks in all stores."""
        told = self.status()["shared_stores"]
        groups = [group for group in told["groups"] if group["workers"]]
        held = sum(store["blocks"] for store in told["stores"])
        return sum(group["workers"] for group in groups), sum(group["indexed"] for group in groups), held

    def stop(self, how=signal.SIGKILL):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(30)


class Check:
    def __init__(self, options):
        self.options, self.failed = options, False
        self.ports = [int(port) for port in options.ports.split(",")]
        self.cores = options.cores.split(",")
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        settings = SimpleNamespace(kvasir=options.kvasir, namespaces=False, transport=options.transport, disk=False)
        self.stores = [shared.Pool(settings, number) for number in range(2)]
        self.exact_min, self.exact_min_dead = EXACT_MIN, EXACT_MIN_DEAD
        if not shared.may_come_first():
            self.exact_min, self.exact_min_dead = EXACT_MIN_LATE, EXACT_MIN_DEAD_LATE
            print(f"  stores may not run before vLLM's processes here (chrt --fifo), so that some answers come too late: at least {EXACT_MIN_LATE:.0%} of "
                  f"the predictions are to be exact, and {EXACT_MIN_DEAD_LATE:.0%} while a store is dead", flush=True)
        os.environ["KVASIR_NODES"] = json.dumps([f"{store.name}={store.address}" for store in self.stores])
        self.chance = random.Random(options.seed)
        self.gateway = Gateway(options, self.stores, self.ports)

    def say(self, good, text):
        print(f"  {'ok' if good else 'FAILED'}: {text}", flush=True)
        self.failed |= not good

    def up(self, parts):
        for port, core, part in zip(self.ports, self.cores, parts):
            if part is not None:
                engines.start(port, core, part, *SMALL)
        for url, part in zip(self.urls, parts):
            if part is not None:
                engines.wait("vLLM", lambda url=url: engines.get(url, "/health") == "", 300)
                engines.warm_up(url)
                # Its first prompts compile kernels.
                for _ in range(2):
                    self.ask(url, 400)
        print("  vLLM is up", flush=True)

    def ask(self, url, count, prompt=None, **more):
        text = prompt or words(self.chance, count)
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0} | more
        answer = chat(url, body)
        if answer.status != 200 or answer.broken:
            raise SystemExit(f"{url}: {answer.status} {answer.error or answer.broken}")
        return answer

    def read(self):
        """Blocks that came from the stores; the engines' counters come with a step, at most once in a second."""
        time.sleep(1.1)
        for url in self.urls:
            self.ask(url, 5)
        return sum(int(engines.metric(url, "vllm:kvasir_store_far_read")) for url in self.urls)

    def predicted(self, what, requests, seed, least):
        before = self.read()
        routing = pathlib.Path(__file__).with_name("routing.py")
        command = [sys.executable, str(routing), self.gateway.url, "--requests", str(requests), "--conversations", CONVERSATIONS,
                   "--words", *WORDS, "--settle", SETTLE, "--seed", str(seed), "--least", str(least)]
        good = subprocess.run(command).returncode == 0
        read = self.read() - before
        for url in self.urls:
            counts = {name: int(engines.metric(url, f"vllm:kvasir_{name}")) for name in COUNTERS}
            print(f"  {url} since its start: {counts}")
        self.say(good, f"{what}: at least {least:.0%} of {requests} predictions are exact")
        return read

    def go(self):
        print("two engines and two stores, requests in turn:")
        SNAPSHOT.unlink(missing_ok=True)
        for store in self.stores:
            store.start()
        self.up(["shared-small"] * 2)
        self.gateway.start("round-robin")
        waited = engines.wait("the engines' stores", lambda: self.gateway.shared()[0] == 2, KNOWN_SECONDS)
        workers, known, held = self.gateway.shared()
        print(f"  {workers} workers share stores {waited:.1f} s after the gateway's start; they hold {held} blocks, and it knows {known}")
        read = self.predicted("with both stores", self.options.requests, self.options.seed, self.exact_min)
        self.say(read > 0, f"{read} blocks came from the stores")
        self.rest()
        counted = sum(store.count("blocks") for store in self.stores)
        engines.wait("the last news of the stores", lambda: self.gateway.shared()[2] == counted, KNOWN_SECONDS)
        known = self.gateway.shared()[1]
        self.say(known > 0, f"the gateway has been told of all {counted} blocks in the stores, and knows what {known} of them are")
        self.restart(counted, known)
        self.stores[1].kill()
        waited = engines.wait("a dead store to be forgotten", lambda: self.gateway.shared()[2] == self.stores[0].count("blocks"), KNOWN_SECONDS)
        answers, blocks = (int(engines.metric(self.gateway.url, f"kvasir_gateway_shared_store_{name}")) for name in ("answers", "blocks"))
        self.say((answers, blocks) == (1, self.stores[0].count("blocks")),
                 f"one store is killed, and forgotten {waited:.1f} s later; the metrics say that {answers} of 2 answers, and {blocks} blocks")
        read = self.predicted("with one store of two", self.options.requests // 4, self.options.seed + 1, self.exact_min_dead)
        self.say(read > 0, f"{read} blocks came from the other store")
        self.gateway.stop()
        self.stores[1].start()
        self.follow()
        self.gateway.stop()
        self.keep()

    def restart(self, counted, known_before):
        """The gateway starts again: the stores tell what they hold, and the snapshot what that is."""
        self.gateway.stop(signal.SIGTERM)
        self.gateway.start("round-robin")
        engines.wait("the engines' stores", lambda: self.gateway.shared()[0] == 2, KNOWN_SECONDS)
        known, held = self.gateway.shared()[1:]
        self.say(known >= REMEMBERED_MIN * known_before and held == counted,
                 f"started again, the gateway knows {known} of the {held} blocks in the stores, after {known_before} of {counted}")

    def follow(self):
        print("one engine with the stores, and one without:")
        for port in self.ports:
            engines.kill(port)
        self.up(["shared", "alone"])
        self.gateway.start("predicted-time")
        prompts = [words(self.chance, FOLLOWING_WORDS) for _ in range(FOLLOWING)]
        engines.wait("the engine's stores", lambda: self.gateway.shared()[0] == 1, KNOWN_SECONDS)
        for prompt in prompts:
            self.ask(self.urls[0], 0, prompt)
        self.rest()
        engines.kill(self.ports[0])
        self.up(["shared", None])
        engines.wait("the engine's stores", lambda: self.gateway.shared()[0] == 1 and self.gateway.ready() == 2, KNOWN_SECONDS)
        # Enough first tokens that neither engine is new.
        for _ in range(60):
            self.ask(self.gateway.url, 60)
        workers, known, held = self.gateway.shared()
        print(f"  of {held} blocks in the stores the gateway knows what {known} are, after the engine was killed and started again")
        followed = exact = warm_up = 0
        for prompt in prompts:
            answer = self.ask(self.gateway.url, 0, prompt)
            route = answer.headers.get("x-kvasir-route", "")
            (worker,), (overlap,) = re.findall(r"\bworker=([^;]*)", route), re.findall(r"overlap_blocks=(\d+)/", route)
            followed += worker.endswith(str(self.ports[0]))
            # The last token is computed, and with it its block.
            most = (answer.usage["prompt_tokens"] - 1) // BLOCK
            is_exact = answer.cached == min(int(overlap), most) * BLOCK and answer.cached > 0
            exact += is_exact
            warm_up += "warm_up" in route
            if not is_exact:
                print(f"  {answer.cached} cached tokens; {route}")
        self.say(followed >= FOLLOWED_MIN, f"{followed} of {FOLLOWING} prompts that lie in the stores alone went to the engine that has them "
                 f"({warm_up} to warm an engine up)")
        self.say(exact >= FOLLOWED_MIN, f"{exact} of these {followed} had as many cached tokens as predicted, and some")

    def keep(self):
        print("an engine and two small stores, and prompts that are to be kept:")
        for port in self.ports:
            engines.kill(port)
        for store in self.stores:
            store.kill()
            store.configuration.write_text(store.configuration.read_text().replace('pool = "512 MiB"', f'pool = "{SMALL_POOL}"'))
            store.start()
        self.up(["shared-small", None])
        self.gateway.workers = self.gateway.workers[:1]
        self.gateway.start("predicted-time")
        kept, others = ([words(self.chance, KEPT_WORDS) for _ in range(KEPT)] for _ in range(2))
        for prompt in kept:
            self.ask(self.gateway.url, 0, prompt, prompt_cache_retention="30m")
        for prompt in others:
            self.ask(self.gateway.url, 0, prompt)
        self.rest()
        for _ in range(FLOOD):
            self.ask(self.gateway.url, KEPT_WORDS)
        self.rest()
        evicted = sum(store.count("evicted_blocks_total") for store in self.stores)
        found = []
        for prompts in (kept, others):
            answers = [self.ask(self.gateway.url, 0, prompt) for prompt in prompts]
            found.append((sum(answer.cached for answer in answers),
                          sum((answer.usage["prompt_tokens"] - 1) // BLOCK * BLOCK for answer in answers)))
        (cached, of), (cached_others, of_others) = found
        self.say(cached >= KEPT_MIN * of and cached_others < of_others / 2,
                 f"{evicted} blocks left the stores; of the prompts that were to be kept {cached} of {of} tokens were cached, of others {cached_others} of {of_others}")

    def rest(self):
        """Waits until no more blocks come to the stores."""
        before, since = -1, time.monotonic()

        def is_still():
            nonlocal before, since
            if (now := sum(store.count("registered_blocks_total") for store in self.stores)) != before:
                before, since = now, time.monotonic()
            return time.monotonic() - since > 2

        engines.wait("the last blocks to come to the stores", is_still, 60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvasir", required=True)
    parser.add_argument("--ports", default="8101,8102")
    parser.add_argument("--gateway", default="127.0.0.1:8200")
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--transport", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    check = Check(parser.parse_args())
    try:
        check.go()
    finally:
        check.gateway.stop()
        for store in check.stores:
            if store.process is not None and store.process.poll() is None:
                store.kill()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
