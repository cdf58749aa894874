"""Two models, each with a real engine of its own, behind one gateway: names, a 90/10 split, and a pool that is down.

    pools.py http://127.0.0.1:8200 http://127.0.0.1:8101 http://127.0.0.1:8102 [--requests 300]

The first engine serves `tiny`, the second `other` with the alias `o`; `mix` is split 90 to 10 among them; `other` falls back to `tiny`. The
second engine is killed in the end. Every request must be answered, and each by the engine that its name means.
"""

import argparse
import random
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

from engines import chat, get, kill, metric, wait, words

REQUESTS = "vllm:request_success_total"


def ask(gateway, model, number, session=None):
    text = words(random.Random(number), 20)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    return chat(gateway, body, headers={"x-session-id": session} if session else None)


class Check:
    def __init__(self, gateway, engines):
        self.gateway, self.engines, self.is_good = gateway, engines, True

    def say(self, is_good, text):
        print(f"{'ok' if is_good else 'FAILED'}: {text}", flush=True)
        self.is_good &= is_good

    def asked(self, names, session=None):
        """Asks for each name; how many were answered, and by which engine."""
        before = [metric(engine, REQUESTS) for engine in self.engines]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda job: ask(self.gateway, job[1], job[0], session), enumerate(names)))
        after = [metric(engine, REQUESTS) for engine in self.engines]
        good = sum(answer.status == 200 and bool(answer.usage) for answer in answers)
        bad = next((answer for answer in answers if answer.status != 200), None)
        return good, [int(new - old) for old, new in zip(before, after)], bad


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("gateway")
    arguments.add_argument("engines", nargs=2)
    arguments.add_argument("--requests", type=int, default=300)
    arguments = arguments.parse_args()
    check, count = Check(arguments.gateway, arguments.engines), arguments.requests
    listed = get(arguments.gateway, "/v1/models")
    check.say(all(f'"{name}"' in listed for name in ("tiny", "other", "o", "mix")), "all names are listed")
    for names, expected in ((["tiny"], [20, 0]), (["other"], [0, 20]), (["o"], [0, 20]), (["tiny", "o"], [10, 10])):
        good, served, bad = check.asked((names * 20)[:20])
        check.say((good, served) == (20, expected), f"{names}: {good} of 20 answered, by engine {served} {bad or ''}")
    good, served, bad = check.asked(["mix"] * count)
    # Three standard deviations about a tenth.
    spread = 3 * (count * 0.1 * 0.9) ** 0.5
    is_split = abs(served[1] - count / 10) <= spread and sum(served) == count
    check.say(good == count and is_split, f"mix: {good} of {count} answered, by engine {served}, expected 90 to 10 {bad or ''}")
    good, served, bad = check.asked(["mix"] * 20, session="one conversation")
    check.say(good == 20 and 20 in served, f"a conversation stays at one side: {served} {bad or ''}")
    answer = ask(arguments.gateway, "nobody", 1)
    check.say(answer.status == 404, f"an unknown name: {answer.status} {answer.error}")
    kill(urllib.parse.urlsplit(arguments.engines[1]).port)
    check.engines = arguments.engines[:1]
    wait("the fallback", lambda: ask(arguments.gateway, "other", 2).status == 200, 60)
    for name in ("other", "o", "mix"):
        good, served, bad = check.asked([name] * 20)
        check.say((good, served) == (20, [20]), f"{name} without its engine: {good} of 20 answered, by the other {served} {bad or ''}")
    return 0 if check.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
