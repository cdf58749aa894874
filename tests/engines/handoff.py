"""Prompts from one vLLM to another over Kvasir's data plane, and over NIXL for comparison, without a gateway.

    handoff.py [--ports 8101,8102] [--cores 0,1] [--seed 1] [compare] [overlap] [prefix] [shared] [stopped] [killed]
        [--prompts 200] …

Starts the engines itself, by serve.sh, and ends them. `compare` asks the same prompts of pairs with either connector in turn.
The hand-off is the time from the prefill engine's answer to the decode engine's first token, as the client sees both. It is
below 0 when the token comes first: NIXL's decode leg needs the prefill leg's answer, Kvasir's two legs are sent at once. Answers are judged by those of the decode engine
alone (judge.py).
"""

import argparse
import collections
import concurrent.futures
import os
import random
import re
import signal
import sys
import threading
import time

import engines
import judge
from disaggregation import first_leg
from engines import LAB, chat, get, metric, words

CONNECTORS = {"nixl": ("prefill", "decode"), "kvasir": ("kvasir-prefill", "kvasir-decode")}
RATIO_MAX = 0.8
"""Largest ratio of Kvasir's hand-off time to NIXL's."""
OVERLAP_MIN = 0.7
"""Share of a long prompt's bytes that are sent before its computation ends."""
GOES_ON_SECONDS = 10.0
"""In which the decode engine computes a prompt whose blocks do not come."""


def percentile(values, part):
    ranked = sorted(values)
    return ranked[min(int(len(ranked) * part), len(ranked) - 1)]


def place(prefill):
    """Where an engine's library listens, by its metrics."""
    line = next(line for line in get(prefill, "/metrics").splitlines() if line.startswith("vllm:kvasir_data_plane{"))
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    return {"host": labels["host"], "shm": labels["shm"] or None, "tcp": labels["tcp"] or None,
            "processes": int(labels["processes"])}


class Pair:
    """A prefill and a decode engine with one connector, each with so many processes."""

    def __init__(self, connector, options, processes=(1, 1)):
        self.connector = connector
        self.parts = CONNECTORS[connector]
        self.processes = processes
        self.may_fail = False
        # Each process listens on a port of its own.
        self.ports = [options.ports[0], options.ports[1] + 8 * (max(processes) > 1)]
        both = "|".join(str(core) for core in options.cores)
        self.cores = [both if count > 1 else str(core) for count, core in zip(processes, options.cores)]
        self.place = None
        self.prefill, self.decode = (f"http://127.0.0.1:{port}" for port in self.ports)

    def start(self, side):
        parallel = ("--tensor-parallel-size", str(self.processes[side])) if self.processes[side] > 1 else ()
        engines.start(self.ports[side], self.cores[side], self.parts[side], *parallel)

    def __enter__(self):
        for side in (0, 1):
            self.start(side)
        try:
            self.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for port in self.ports:
            engines.kill(port)

    def ready(self):
        for url in (self.prefill, self.decode):
            engines.wait(f"{self.connector}: {url}", lambda: get(url, "/health") == "", 300)
            engines.warm_up(url)
        if self.connector == "kvasir":
            self.place = place(self.prefill)

    def ask(self, body, random_):
        """Both legs: the answer, seconds to the prefill engine's answer and to the first token."""
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        started = time.monotonic()
        if self.connector == "nixl":
            first = first_leg(self.prefill, body)
            if first.status != 200:
                return first, first.seconds, first.seconds
            prefilled = time.monotonic() - started
            answer = chat(self.decode, streamed | {"kv_transfer_params": first.body["kv_transfer_params"]})
            return answer, prefilled, prefilled + answer.first
        number = random_.getrandbits(63)
        leg = {"kvasir": "prefill", "transfer_id": number, "receivers": self.processes[1]}
        leg |= {"do_remote_decode": True, "do_remote_prefill": False}
        params = {"kvasir": "decode", "transfer_id": number, "from": self.place}
        params |= {"do_remote_decode": False, "do_remote_prefill": True}
        short = {name: value for name, value in body.items() if name != "stream_options"}
        short |= {"stream": False, "max_tokens": 1, "kv_transfer_params": leg}
        done = []

        def prefill():
            first = chat(self.prefill, short)
            done.append((first, time.monotonic() - started))

        started = time.monotonic()
        thread = threading.Thread(target=prefill)
        thread.start()
        answer = chat(self.decode, streamed | {"kv_transfer_params": params})
        thread.join()
        first, prefilled = done[0]
        if first.status != 200 and not self.may_fail:
            raise SystemExit(f"the prefill engine does not answer: {first}")
        return answer, prefilled, answer.first


class Check:
    def __init__(self, options):
        self.options = options
        self.chance = random.Random(options.seed)
        self.failed = False

    def say(self, good, text):
        self.failed |= not good
        print(f"{'ok' if good else 'FAILED'}: {text}", flush=True)

    def body(self, low=190, high=2700, tokens=12):
        """A prompt that no cache has seen, of a tenth more tokens than words."""
        text = f"{self.chance.getrandbits(40):x} " + words(self.chance, self.chance.randint(low, high))
        return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
                "temperature": 0, "logprobs": True, "top_logprobs": judge.TOP}

    def judged(self, pair, what, asked):
        """Judges answers, of (body, answer)."""
        tally, counts = judge.Tally(), collections.Counter()
        def alone(body):
            answer = chat(pair.decode, body)
            if answer.status != 200 or answer.broken or answer.error:
                raise SystemExit(f"the decode engine alone does not answer: {answer}")
            return answer

        owns = judge.measure(alone, [body for body, _ in asked])
        good, text = judge.check_prompts(what, owns)
        self.say(good, f"{pair.connector}: {text}")
        for (_, answer), own in zip(asked, owns):
            if answer.status != 200 or answer.error or answer.broken:
                counts[f"failed: {answer.status} {answer.error or answer.broken}"] += 1
            else:
                counts[tally.add(answer, own).value] += 1
        problems = tally.problems() + [name for name in counts if name.startswith("failed")]
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        self.say(not problems, "; ".join([f"{pair.connector}: {what}: {outcomes}", tally.figures(), *problems]))

    def compare(self):
        bodies = [self.body() for _ in range(self.options.prompts)]
        times = {name: {"first token": [], "hand-off": []} for name in CONNECTORS}
        rounds = self.options.rounds
        for round_ in range(rounds):
            part = bodies[round_::rounds]
            for name in CONNECTORS:
                with Pair(name, self.options) as pair:
                    for _ in range(3):
                        pair.ask(self.body(), self.chance)
                    asked = []
                    for number, body in enumerate(part):
                        answer, prefilled, first = pair.ask(body, self.chance)
                        asked.append((body, answer))
                        if answer.status == 200 and answer.first:
                            times[name]["first token"].append(first)
                            times[name]["hand-off"].append(first - prefilled)
                        if number % 25 == 24:
                            print(f"  {name}, round {round_ + 1} of {rounds}: {number + 1} of {len(part)}", flush=True)
                    moved = metric(pair.decode, "vllm:external_prefix_cache_hits_total")
                    self.say(moved > 0, f"{name}: {moved:.0f} tokens were transferred")
                    self.judged(pair, "right answers", asked[:: max(len(asked) // self.options.judged, 1)])
        table = {}
        for name, measured in times.items():
            figures = []
            for what, values in measured.items():
                table[name, what] = [percentile(values, part) * 1000 for part in (0.5, 0.99)]
                figures.append(f"{what} p50 {table[name, what][0]:.1f} ms, p99 {table[name, what][1]:.1f} ms")
            print(f"  {name}: {len(values)} prompts: {'; '.join(figures)}", flush=True)
        for what in ("hand-off", "first token"):
            ratios = [ours / theirs for ours, theirs in zip(table["kvasir", what], table["nixl", what])]
            most = RATIO_MAX if what == "hand-off" else 1.0
            text = f"p50 {ratios[0]:.2f}, p99 {ratios[1]:.2f}, at most {most} at p50"
            self.say(ratios[0] <= most, f"{what}, of NIXL's: {text}")

    def overlap(self):
        """One prompt of 3,000 tokens after the other: what share had left when its computation ended?"""
        with Pair("kvasir", self.options) as pair:
            pair.ask(self.body(), self.chance)
            time.sleep(2)
            names = ("vllm:kvasir_early_bytes_total", "vllm:kvasir_handed_over_bytes_total")
            before = [metric(pair.prefill, name) for name in names]
            for _ in range(self.options.long):
                pair.ask(self.body(2700, 2750, tokens=2), self.chance)
            time.sleep(2)
            early, whole = (metric(pair.prefill, name) - was for name, was in zip(names, before))
            share = early / max(whole, 1)
            text = f"{share:.3f} of {whole:.0f} bytes were sent before its computation ended"
            self.say(share >= OVERLAP_MIN, f"overlap, {self.options.long} prompts of 3,000 tokens: {text}")

    def prefix(self):
        """The decode engine has the beginning of each prompt already: only the rest moves."""
        with Pair("kvasir", self.options) as pair:
            asked, moved, wanted = [], 0, 0
            for _ in range(self.options.judged):
                whole = self.body(600, 1400)
                start = judge.beginning(whole, 0.5) | {"max_tokens": 1}
                chat(pair.decode, start)
                name = "vllm:kvasir_received_blocks_total"
                before = metric(pair.decode, name)
                answer, *_ = pair.ask(whole, self.chance)
                time.sleep(1.2)
                asked.append((whole, answer))
                moved += metric(pair.decode, name) - before
                wanted += (answer.usage.get("prompt_tokens", 0) - 1) // 32
            share = moved / max(wanted, 1)
            self.say(0.3 < share < 0.7, f"prefix hits on decode: {moved:.0f} of {wanted} blocks moved ({share:.2f})")
            self.judged(pair, "answers with half of the prompt there", asked)

    def shared(self):
        """Two processes on one side, each with half of the heads, and one on the other."""
        if len(os.sched_getaffinity(0)) < 3:
            # Processes that wait for each other spin: on fewer cores they starve the third beyond every deadline.
            print("SKIPPED shared: three processes of engines need a core each", flush=True)
            return
        for processes in ((2, 1), (1, 2)):
            with Pair("kvasir", self.options, processes) as pair:
                asked = [(body, pair.ask(body, self.chance)[0]) for body in (self.body(200, 900) for _ in range(self.options.judged))]
                time.sleep(2)
                moved, lost = (metric(pair.decode, f"vllm:kvasir_{name}_blocks_total") for name in ("received", "unreceived"))
                what = f"{processes[0]} processes to {processes[1]}"
                self.say(moved > 0 and not lost, f"{what}: {moved:.0f} blocks received, {lost:.0f} not")
                self.judged(pair, what, asked)

    def stopped(self):
        """The decode engine stands still at random moments, beyond every time-out, while prompts are under way."""
        os.environ["KVASIR_LEASE"], os.environ["KVASIR_DEADLINE"] = "500 ms", "2"
        with Pair("kvasir", self.options) as pair:
            group = int((LAB / f"{pair.ports[1]}.pid").read_text())
            ended, asked = threading.Event(), []

            def stop():
                chance = random.Random(self.options.seed)
                while not ended.wait(chance.uniform(0.2, 2.0)):
                    os.killpg(group, signal.SIGSTOP)
                    ended.wait(chance.uniform(0.1, 1.5))
                    os.killpg(group, signal.SIGCONT)

            stopper = threading.Thread(target=stop)
            stopper.start()
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                def one(body):
                    return body, pair.ask(body, random.Random(body["messages"][0]["content"]))[0]

                bodies = [self.body(100, 900, tokens=4) for _ in range(self.options.stopped)]
                for number, done in enumerate(pool.map(one, bodies)):
                    asked.append(done)
                    if number % 50 == 49:
                        print(f"  {number + 1} of {len(bodies)}", flush=True)
            ended.set()
            stopper.join()
            self.judged(pair, "decode engine stopped", asked[:: max(len(asked) // self.options.judged, 1)])
            failed = [answer for _, answer in asked if answer.status != 200 or answer.error or answer.broken]
            self.say(not failed, f"{len(asked)} hand-offs with a decode engine that stops: {len(failed)} failed")
            moved, lost = (metric(pair.decode, f"vllm:kvasir_{name}_blocks_total") for name in ("received", "unreceived"))
            self.say(moved > 0 and lost > 0, f"{moved:.0f} blocks were handed over, {lost:.0f} computed instead")
            self.at_rest(pair)
        del os.environ["KVASIR_LEASE"], os.environ["KVASIR_DEADLINE"]

    def at_rest(self, pair):
        """No slot, no block is held for long."""
        pair.ask(self.body(), self.chance)

        def free():
            # Counters come with steps.
            for url in (pair.prefill, pair.decode):
                chat(url, self.body(20, 30, tokens=1))
            used = [metric(url, "vllm:kvasir_handoff_slots_used") for url in (pair.prefill, pair.decode)]
            held = [metric(url, "vllm:kv_cache_usage_perc") for url in (pair.prefill, pair.decode)]
            return not any(used) and not any(held)

        seconds = engines.wait("every slot and block to be free", free, 60)
        self.say(True, f"all slots and blocks are free after {seconds:.1f} s")

    def killed(self):
        """Each engine is killed while prompts are under way; the other's requests go on, and none is answered wrongly."""
        pair = Pair("kvasir", self.options).__enter__()
        pair.may_fail = True
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            bodies = [self.body(600, 2700, tokens=8) for _ in range(4)]
            list(pool.map(lambda body: pair.ask(body, self.chance), bodies))
        busy = time.monotonic() - started
        interrupted = [0, 0]
        try:
            for number in range(self.options.kills):
                side = number % 2
                port = pair.ports[side]
                bodies = [self.body(600, 2700, tokens=8) for _ in range(4)]
                owns = judge.measure(lambda body: chat(pair.decode, body), bodies) if side == 0 else []
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    chance = [random.Random(body["messages"][0]["content"]) for body in bodies]
                    asked = [pool.submit(pair.ask, *one) for one in zip(bodies, chance)]
                    # At a random moment of the time in which four such prompts are under way.
                    time.sleep(self.chance.uniform(0.02, busy))
                    under_way = sum(not one.done() for one in asked)
                    engines.kill(port)
                    gone = time.monotonic()
                    answers = [one.result()[0] for one in asked]
                waited = time.monotonic() - gone
                interrupted[side] += under_way
                if side == 0:
                    tally = judge.Tally()
                    outcomes = collections.Counter(
                        tally.add(answer, own).value if answer.status == 200 and not answer.broken else "failed"
                        for answer, own in zip(answers, owns)
                    )
                    wrong = tally.problems()
                    text = f"prefill engine killed, {under_way} under way: {dict(outcomes)}, the last answer {waited:.1f} s later"
                    good = not wrong and not outcomes["failed"]
                    self.say(good and waited <= len(bodies) * GOES_ON_SECONDS, "; ".join([text, *wrong]))
                else:
                    self.at_rest_alone(pair.prefill)
                pair.start(side)
                pair.ready()
            self.say(
                all(interrupted[: self.options.kills]),
                f"prompts under way at {self.options.kills} kills: {interrupted[0]} of prefill's, {interrupted[1]} of decode's",
            )
        finally:
            pair.__exit__()

    def at_rest_alone(self, url):
        def free():
            chat(url, self.body(20, 30, tokens=1))
            return not metric(url, "vllm:kvasir_handoff_slots_used") and not metric(url, "vllm:kv_cache_usage_perc")

        seconds = engines.wait("the prefill engine to be free", free, 90)
        self.say(True, f"decode engine killed: the prefill engine holds nothing after {seconds:.1f} s")


def main():
    scenarios = ("compare", "overlap", "prefix", "shared", "stopped", "killed")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(scenarios)}; all without one")
    pair = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--ports", type=pair, default=[8101, 8102])
    parser.add_argument("--cores", type=pair, default=[0, 1])
    parser.add_argument("--prompts", type=int, default=200, help="of `compare`")
    parser.add_argument("--rounds", type=int, default=2, help="of `compare`: how often each pair is started")
    parser.add_argument("--judged", type=int, default=10, help="answers that are judged, of each pair")
    parser.add_argument("--long", type=int, default=10, help="prompts of `overlap`")
    parser.add_argument("--stopped", type=int, default=200, help="hand-offs of `stopped`")
    parser.add_argument("--kills", type=int, default=4, help="of `killed`")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    unknown = set(options.scenario) - set(scenarios)
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(scenarios)}")
    check = Check(options)
    for name in options.scenario or scenarios:
        print(f"--- {name}", flush=True)
        getattr(check, name)()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
