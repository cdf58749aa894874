"""Two real engines under load that are restarted, killed, and put to sleep, by the gateway and by somebody else.

    control.py http://127.0.0.1:8200 --kvasir BINARY [--ports 8101,8102] [--cores 0,1] [--seed 1] [rolling] [sleep] [relayed]

Clients ask for greedy answers all the time, half of them as streams. No request may fail, and every answer must be right: it is
judged (see judge.py) by what the engine alone answers to the same prompt. The engines were started by serve.sh, which gives them
VLLM_SERVER_DEV_MODE=1; those that end here are started again. On a CPU vLLM has no memory to give back: its scheduler stands still,
its cache is emptied, and it says that it sleeps, which is all that a gateway sees of one that sleeps.
Without vLLM in $LAB: `SKIPPED: reason` and 77.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

import engines
import judge
from engines import LAB, chat, get, metric, post, wait, words

PACE = (0.0, 0.1)  # seconds between two requests of a client
SLOW_PACE = (2.0, 6.0)  # while an engine starts, which takes minutes on a busy processor
READY = 300  # seconds that an engine may take to start
NOTICED = 2.0  # seconds after which the gateway knows of an engine that sleeps: its health interval is one
MODES = ("abort", "wait", "keep")  # what an engine that is put to sleep does with its requests; the first is vLLM's default
ROUNDS = 5  # times that an engine is put to sleep at most until it had requests then
FIRST_SAFE = (0, 17)  # the first release that the gateway puts to sleep
MOVED = ("kvasir_gateway_retries_total", "kvasir_gateway_migrations_total")


class Load:
    """Clients that ask one thing after the other until `end`."""

    def __init__(self, url, bodies, clients, seed):
        self.url, self.bodies, self.seed = url, bodies, seed
        self.rows = []  # number of the prompt, whether streamed, when it was asked, the answer
        self.pace = PACE
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=self.go, args=[number], daemon=True) for number in range(clients)]
        for thread in self.threads:
            thread.start()

    def go(self, client):
        chance = random.Random(f"{self.seed} {client}")
        while not self.is_over.is_set():
            number, streams = chance.randrange(len(self.bodies)), chance.random() < 0.5
            more = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            asked = time.monotonic()
            answer = chat(self.url, self.bodies[number] | more)
            self.rows.append((number, streams, asked, answer))
            self.is_over.wait(chance.uniform(*self.pace))

    def end(self):
        self.is_over.set()
        for thread in self.threads:
            thread.join()
        return self.rows

    def answered(self, worker, since):
        """Requests that were asked since then and answered, in the beginning at least, by this worker."""
        return sum(asked >= since and served_by(answer) == worker for _, _, asked, answer in list(self.rows))


def served_by(answer):
    found = re.search(r"\bworker=([^;]*)", answer.headers.get("x-kvasir-route", ""))
    return found and found[1]


def failure(answer):
    """Why a client would not take this for an answer, if it would not."""
    if answer.status != 200 or answer.error or answer.broken:
        return f"status {answer.status}, {answer.error or answer.broken or 'no word'}"
    return ""


class Check:
    def __init__(self, options):
        self.options, self.is_good = options, True
        self.urls = {port: f"http://127.0.0.1:{port}" for port in options.ports}
        chance = random.Random(options.seed)
        self.bodies = [self.body(chance) for _ in range(options.prompts)]
        self.owns = []

    def body(self, chance):
        text = f"{chance.getrandbits(40):x} " + words(chance, chance.randint(20, 150))
        return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": self.options.tokens,
                "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": judge.TOP}

    def say(self, is_good, text):
        print(f"{'ok' if is_good else 'FAILED'}: {text}", flush=True)
        self.is_good &= bool(is_good)

    def kvasir(self, *arguments):
        """Runs the command at the gateway; whether it succeeded, and what it said."""
        place = self.options.url.removeprefix("http://")
        command = [self.options.kvasir, *arguments[:1], "--gateway", place, *arguments[1:]]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
        said = " / ".join((ran.stdout + ran.stderr).strip().splitlines())
        return ran.returncode == 0, said

    def must(self, *arguments):
        began = time.monotonic()
        is_good, said = self.kvasir(*arguments)
        self.say(is_good, f"kvasir {' '.join(arguments)}: {said} ({time.monotonic() - began:.1f} s)")
        return is_good

    def worker(self, port):
        return json.loads(get(self.options.url, f"/kvasir/workers/127.0.0.1:{port}"))

    def state(self, port):
        return self.worker(port)["state"]

    def until(self, port, state, seconds):
        return wait(f"the state {state} of {port}", lambda: self.state(port) == state, seconds)

    def busy(self, port):
        """Waits for a moment at which the worker has requests; how many."""
        had = []
        wait(f"requests at {port}", lambda: had.append(self.worker(port)["requests"]) or had[-1] >= 2, 60)
        return had[-1]

    def serves_again(self, load, port):
        since = time.monotonic()
        wait(f"answers of {port}", lambda: load.answered(f"127.0.0.1:{port}", since) >= 3, 60)

    def moved(self):
        return [int(metric(self.options.url, name)) for name in MOVED]

    def record(self):
        """What one engine answers to each prompt in every way in which it may be computed here, over the gateway: in texts that
        it makes itself tokens that are no whole characters have other names than in the engine's."""
        for url in self.urls.values():
            engines.warm_up(url)
        other = f"127.0.0.1:{self.options.ports[1]}"

        def ask(body):
            answer = chat(self.options.url, body)
            if failure(answer) or served_by(answer) == other:
                raise SystemExit(f"the one engine does not answer: {answer}")
            return answer

        self.must("drain", other, "--wait")
        self.owns = judge.measure(ask, self.bodies, at_once=True)
        self.must("drain", other, "--undo")
        self.say(*judge.check_prompts("prompts", self.owns))
        alone = [chat(url, body).text for url in self.urls.values() for body in self.bodies]
        same = sum(text == own.wanted.text for text, own in zip(alone, self.owns * len(self.urls)))
        # Where an engine alone rounds in several ways, its texts may part.
        self.say(same == len(alone) or any(own.spread for own in self.owns),
                 f"{same} of {len(alone)} answers of the engines alone are the same to the last character")

    def judged(self, what, load, before, must_move):
        """Ends the load and says what came of it."""
        rows, tally, failed = load.end(), judge.Tally(), []
        for number, streams, asked, answer in rows:
            why = failure(answer)
            if not why and tally.add(answer, self.owns[number]) in judge.FAULTS:
                why = f"a wrong answer: {answer.text!r}, not {self.owns[number].wanted.text!r}"
            if why:
                failed.append((number, streams, why, answer))
        for number, streams, why, answer in failed[:5]:
            print(f"  prompt {number}, {'streamed' if streams else 'whole'}, after {answer.seconds:.1f} s, "
                  f"{answer.headers.get('x-kvasir-route')}: {why}", flush=True)
        retried, went_on = (new - old for old, new in zip(before, self.moved()))
        problems = tally.problems()
        if must_move and retried + went_on == 0:
            problems.append("nothing was lost, so nothing was shown")
        streamed = sum(streams for _, streams, _, _ in rows)
        slowest = max(answer.seconds for *_, answer in rows)
        servers = dict(sorted(collections.Counter(str(served_by(answer)) for *_, answer in rows).items()))
        text = (f"{what}: {len(rows)} requests ({streamed} streamed), {len(failed)} failed, {tally}; {retried} started over, "
                f"{went_on} streams went on elsewhere, the slowest took {slowest:.1f} s; by worker {servers}")
        self.say(rows and not failed and not problems, "; ".join([text, *problems]))

    def load(self):
        return Load(self.options.url, self.bodies, self.options.clients, self.options.seed), self.moved()

    def start_again(self, load, port):
        load.pace = SLOW_PACE
        core = self.options.cores[self.options.ports.index(port)]
        engines.start(port, core, "alone")
        seconds = wait(f"the engine on {port}", lambda: get(self.urls[port], "/health") == "", READY)
        load.pace = PACE
        return seconds

    def rolling(self):
        load, before = self.load()
        for port in self.options.ports:
            name = f"127.0.0.1:{port}"
            self.busy(port)
            self.must("drain", name, "--wait")
            drained = time.monotonic()
            left = metric(self.urls[port], "vllm:num_requests_running") + metric(self.urls[port], "vllm:num_requests_waiting")
            ended = terminate(port)
            self.until(port, "down", 10)
            started = self.start_again(load, port)
            known = self.until(port, "draining", 60)
            stray = load.answered(name, drained)
            self.must("drain", name, "--undo")
            ready = self.until(port, "ready", 60)
            self.serves_again(load, port)
            self.say(left == 0 and stray == 0,
                     f"{name} drained ({left:.0f} requests left in the engine), ended {ended:.1f} s after SIGTERM, up "
                     f"{started:.0f} s later, known to the gateway after {known:.1f} s more; {stray} requests until the undo, "
                     f"ready {ready:.1f} s after it, and it serves")
        self.judged("drained and restarted one after the other", load, before, must_move=False)

    def killed(self):
        load, before = self.load()
        for port in self.options.ports:
            name = f"127.0.0.1:{port}"
            had = self.busy(port)
            engines.kill(port)
            down = self.until(port, "down", 10)
            started = self.start_again(load, port)
            ready = self.until(port, "ready", 60)
            self.serves_again(load, port)
            self.say(True, f"{name} killed with {had} requests, down {down:.1f} s later, up again {started:.0f} s later, ready "
                           f"{ready:.1f} s after that, and it serves")
        self.judged("killed and restarted one after the other, without a drain", load, before, must_move=True)

    def is_asleep(self, port):
        return json.loads(get(self.urls[port], "/is_sleeping"))["is_sleeping"]

    def stays_asleep(self, load, port):
        """Looks for three seconds; whether nothing was sent there."""
        since, done = time.monotonic(), metric(self.urls[port], "vllm:request_success_total")
        states = set()
        while time.monotonic() < since + 3:
            states.add(self.state(port))
            time.sleep(0.1)
        sent = load.answered(f"127.0.0.1:{port}", since)
        sent += metric(self.urls[port], "vllm:request_success_total") - done
        return states == {"sleeping"} and sent == 0, f"state {', '.join(sorted(states))}, {sent:.0f} requests in 3 s"

    def put_to_sleep(self):
        port = self.options.ports[0]
        name = f"127.0.0.1:{port}"
        version = json.loads(get(self.urls[port], "/version"))["version"]
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < FIRST_SAFE:
            is_good, said = self.kvasir("workers", "sleep", name)
            self.say(not is_good and "0.17" in said, f"vLLM {version} is not put to sleep, and the reason is told: {said}")
            return
        load, before = self.load()
        for port in self.options.ports:
            name = f"127.0.0.1:{port}"
            self.busy(port)
            if not self.must("workers", "sleep", name):
                continue
            seen = self.until(port, "sleeping", 10)
            is_good, told = self.stays_asleep(load, port)
            self.say(is_good and self.is_asleep(port),
                     f"{name} (vLLM {version}) says that it sleeps: {self.is_asleep(port)}; seen {seen:.1f} s later; {told}")
            self.must("workers", "wake", name)
            self.serves_again(load, port)
            awake, said = self.kvasir("workers", "wake", name)
            self.say(not self.is_asleep(port) and not awake, f"{name} is awake and serves; a second wake is refused: {said}")
        self.judged("put to sleep and woken by the gateway", load, before, must_move=False)

    def sleeps_by_hand(self, load, port, mode):
        """Somebody else puts an engine to sleep that has requests, and wakes it when the gateway has noticed."""
        name, had = f"127.0.0.1:{port}", self.busy(port)
        sleeper = threading.Thread(target=post, args=[self.urls[port], f"/sleep?level=1&mode={mode}", {}, 60])
        sleeper.start()
        wait(f"{port} to sleep", lambda: self.is_asleep(port), 30)
        seen = self.until(port, "sleeping", 30)
        sleeper.join()
        is_good, told = self.stays_asleep(load, port)
        post(self.urls[port], "/wake_up", {}, 60)
        ready = self.until(port, "ready", 30)
        self.serves_again(load, port)
        self.say(seen <= NOTICED and is_good,
                 f"{name} put to sleep by hand (mode={mode}) with {had} requests: noticed after {seen:.1f} s; {told}; woken by "
                 f"hand: ready after {ready:.1f} s, and it serves")

    def foreign_sleep(self, mode):
        load, before = self.load()
        for _ in range(ROUNDS):
            self.sleeps_by_hand(load, self.options.ports[1], mode)
            if self.moved() != before:
                break
        self.judged(f"put to sleep by hand (mode={mode})", load, before, must_move=True)

    def relayed(self):
        """The same behind a gateway at its default settings, which passes on what engines write: an answer that its engine gave
        up is none. Streams may go on from their texts, whose tokens may be cut differently, or end with an error that says so."""
        place = urllib.parse.urlsplit(self.options.url)
        address = f"{place.hostname}:{place.port + 1}"
        config = LAB / "relay.toml"
        config.write_text(f'[gateway]\nmodel_folder = "{LAB}/tinymodel"\nmodel = "tiny"\n')
        command = [self.options.kvasir, "gateway", "--config", config, "--listen", address]
        for url in self.urls.values():
            command += ["--worker", url]
        with open(LAB / "relay.log", "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        url, self.options.url = self.options.url, f"http://{address}"
        try:
            wait("both workers", lambda: all(self.state(port) == "ready" for port in self.options.ports), 60)
            port = self.options.ports[1]
            before = given_up(self.urls[port])
            load, _ = self.load()
            for _ in range(ROUNDS):
                self.sleeps_by_hand(load, port, "abort")
                if given_up(self.urls[port]) > before:
                    break
            self.relayed_well(load.end(), given_up(self.urls[port]) - before)
        finally:
            self.options.url = url
            process.kill()
            process.wait()

    def relayed_well(self, rows, aborted):
        counts = collections.Counter()
        for number, streams, _, answer in rows:
            why, own = failure(answer), self.owns[number]
            if not why and len(answer.tokens) < self.options.tokens:
                counts["cut short without a word"] += 1
                print(f"  prompt {number}, {'streamed' if streams else 'whole'}, {answer.headers.get('x-kvasir-route')}: status "
                      f"{answer.status}, {len(answer.tokens)} of {self.options.tokens} tokens, "
                      f"{(answer.body.get('choices') or [{}])[0].get('finish_reason') or 'a stream'}", flush=True)
            elif streams and answer.status == 200 and answer.error:
                counts["streams ended with an error"] += 1
            elif why:
                counts["failed"] += 1
                print(f"  prompt {number}: {why}", flush=True)
            elif not streams:
                # Tokens have other names here: where an engine alone rounds in one way only, the text says it all.
                is_same = answer.text == own.wanted.text
                counts["whole answers equal" if is_same else "whole answers parted" if own.spread else "wrong"] += 1
        streamed = sum(streams for _, streams, _, _ in rows)
        bad = counts["failed"] + counts["cut short without a word"] + counts["wrong"]
        problems = [] if aborted else ["the engine gave no request up, so nothing was shown"]
        told = "".join(f", {count} {what}" for what, count in counts.items())
        self.say(not bad and not problems, "; ".join(
            [f"relayed, put to sleep by hand (mode=abort): {len(rows)} requests ({streamed} streamed), {aborted:.0f} given "
             f"up by the engine, {bad} bad{told}", *problems]))

    def go(self):
        wait("both workers", lambda: all(self.state(port) == "ready" for port in self.options.ports), 60)
        self.record()
        if "rolling" in self.options.parts:
            self.rolling()
            self.killed()
        if "sleep" in self.options.parts:
            self.put_to_sleep()
            for mode in MODES:
                self.foreign_sleep(mode)
        if "relayed" in self.options.parts:
            self.relayed()
        return self.is_good


def given_up(url):
    """Requests that an engine has ended before their end."""
    lines = get(url, "/metrics").splitlines()
    lines = [line for line in lines if line.startswith("vllm:request_success_total{") and 'reason="abort"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def terminate(port):
    """Ends a server as its operator would; the seconds until its processes were gone."""
    group = int((LAB / f"{port}.pid").read_text())
    os.kill(group, signal.SIGTERM)
    return wait(f"the end of the server on {port}", lambda: not engines.running(group), 60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    pair = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("url", help="the gateway")
    parser.add_argument("parts", nargs="*", help="rolling, sleep, relayed; without one, all")
    parser.add_argument("--kvasir", required=True, help="the binary, for its commands")
    parser.add_argument("--ports", type=pair, default=[8101, 8102])
    parser.add_argument("--cores", type=pair, default=[0, 1])
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.parts = options.parts or ["rolling", "sleep", "relayed"]
    if not (LAB / "installed").exists():
        print(f"SKIPPED: vLLM is not installed in {LAB} (tests/engines/install.sh)")
        return 77
    began = time.monotonic()
    is_good = Check(options).go()
    print(f"control: {time.monotonic() - began:.0f} s", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
