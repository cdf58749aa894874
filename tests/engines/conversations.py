"""Conversations with pauses, behind a host memory that has no room for all of them: first tokens with and without prefetching.

    conversations.py [--port 8101] [--cores 0] [--seed 1] [--conversations 28] [--turns 7] [--pace 20] [--delay 0.02]

Each conversation asks, waits for a user who thinks, and asks again. The engine's own cache holds one or two of them, host memory less
than half, and the disk all; reads of the disk take --delay seconds each (slow_mount.py). Think times are drawn from those of the
Mooncake trace (see GAPS), divided by --pace. The same conversations run twice: without `host_tier.prefetch` and with it.
"""

import argparse
import random
import statistics
import sys
import threading
import time

import engines
import offload
import slow_disk
from engines import words

# Seconds between two turns of a conversation: each twentieth of 3,931 gaps in Mooncake's conversation_trace.jsonl (a request whose
# blocks begin with all whole blocks of an earlier one goes on with that). The last is cut down from 3,030.
GAPS = (6, 27, 42, 51, 57, 66, 75, 84, 96, 108, 123, 141, 162, 189, 225, 267, 318, 387, 474, 606, 900)
FIRST_WORDS = (1100, 2000)  # of a conversation: 1,200 to 2,200 tokens
NEXT_WORDS = (40, 120)
# The first turns teach when conversations go on.
WARM_UP_TURNS = 3
PREFETCH = {False: '"prefetch":false', True: '"prefetch":true,"prefetch_lead":"LEAD"'}


def think(chance):
    at = chance.uniform(0, len(GAPS) - 1)
    low = int(at)
    return GAPS[low] + (at - low) * (GAPS[min(low + 1, len(GAPS) - 1)] - GAPS[low])


class Check(slow_disk.Check):
    def run(self, prefetches):
        """Seconds to the first token of each turn behind the warm-up, and the store's counters."""
        self.mount()
        self.set_delay(self.options.delay)
        lead = 60 / self.options.pace
        self.environment = {"KVASIR_PREFETCH": PREFETCH[prefetches].replace("LEAD", f"{lead * 1000:.0f}ms")}
        engines.start(self.options.port, self.options.cores, "conversations", environment=self.environment)
        waited = engines.wait("vLLM (conversations)", lambda: engines.get(self.url, "/health") == "", 300)
        print(f"  vLLM (conversations) is up after {waited:.0f} s", flush=True)
        engines.warm_up(self.url)
        for _ in range(2):
            self.ask(self.prompt(offload.LONG, 1))
        names = ("disk_read", "prefetched", "prefetch_used", "prefetch_wasted", "recomputed", "late")
        seconds, failures, done = [], [], []
        threads = [
            threading.Thread(target=self.converse, args=(number, seconds, failures, done))
            for number in range(self.options.conversations)
        ]
        for thread in threads:
            thread.start()
        total, started = self.options.conversations * self.options.turns, time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(10)
            print(f"  {len(done)} of {total} turns after {time.monotonic() - started:.0f} s", flush=True)
        # The counters come with a step of the engine.
        self.ask(self.prompt(3, 1))
        time.sleep(1.1)
        self.ask(self.prompt(3, 1))
        counts = {name: self.counter(f"store_{name}") for name in names}
        self.down()
        self.say(not failures, f"{len(failures)} of {total} turns failed{': ' + failures[0] if failures else ''}")
        return seconds, counts

    def converse(self, number, seconds, failures, done):
        chance = random.Random(f"{self.options.seed} {number}")
        messages = []
        time.sleep(chance.uniform(0, 2 * GAPS[10] / self.options.pace))
        for turn in range(self.options.turns):
            count = chance.randint(*(NEXT_WORDS if turn else FIRST_WORDS))
            messages.append({"role": "user", "content": f"{number} {turn} " + words(chance, count)})
            body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
            answer = engines.chat(self.url, body)
            done.append(turn)
            if answer.status != 200 or answer.broken or answer.error or not answer.first:
                failures.append(f"{answer.status} {answer.error or answer.broken or 'no text'}")
                return
            if turn >= WARM_UP_TURNS:
                seconds.append(answer.first)
            messages.append({"role": "assistant", "content": answer.text})
            time.sleep(think(chance) / self.options.pace)

    def check(self):
        results = {}
        for prefetches in (False, True):
            print("with prefetching:" if prefetches else "without prefetching:", flush=True)
            seconds, counts = self.run(prefetches)
            results[prefetches] = seconds, counts
            p50, p90 = (statistics.quantiles(seconds, n=10)[at] for at in (4, 8))
            text = ", ".join(f"{name} {value}" for name, value in counts.items())
            print(f"  first token of {len(seconds)} turns: p50 {p50 * 1000:.0f} ms, p90 {p90 * 1000:.0f} ms; blocks: {text}", flush=True)
        (without, _), (with_it, counts) = results[False], results[True]
        ratios = [statistics.quantiles(with_it, n=10)[at] / statistics.quantiles(without, n=10)[at] for at in (4, 8)]
        self.say(counts["prefetch_used"] > 0, f"{counts['prefetch_used']} of {counts['prefetched']} blocks fetched ahead were used")
        # The median is of turns that find their blocks in memory either way.
        self.say(ratios[0] <= 1.05 and ratios[1] < 1.0, f"with prefetching the first token comes in {ratios[0]:.2f} (p50) and {ratios[1]:.2f} (p90) of the time without")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--cores", default="0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=28)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--pace", type=float, default=20)
    parser.add_argument("--delay", type=float, default=0.02)
    check = Check(parser.parse_args())
    check.go()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
