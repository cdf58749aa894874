"""A prefill and a decode engine behind the gateway: equal answers, and what happens when one of them dies.

    disaggregation.py http://127.0.0.1:8200 [--prefill-port 8101] [--decode-port 8102] [--cores 0,1] [--seed 1]
    disaggregation.py --direct

Every answer is compared, text and log-probabilities, with that of the decode engine alone to the same request
(under a cache salt of its own, so that neither helps the other). With --direct there is no gateway: the script
does the two legs itself, which checks the script and says what the engines do. The engines were started by
serve.sh; those that are killed here are started again.
"""

import argparse
import collections
import concurrent.futures
import json
import random
import re
import socket
import sys
import threading
import time
import urllib.parse

import engines
from engines import Answer, chat, get, metric, words

# An engine that computes several prompts in one batch rounds differently than with one alone: 7 of 72 answers of vLLM
# without any gateway differed, by up to 0.05 in a log-probability. One prompt at a time, all are equal to the last bit.
ALONE, IN_A_BATCH = 1e-6, 0.2
LEASE = 30  # seconds for which a prefill engine keeps blocks for a decode engine that does not come
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
       "remote_host": None, "remote_port": None}


def both_legs(prefill, decode, body):
    """What a gateway does, without any of its care."""
    short = {name: value for name, value in body.items() if name != "stream_options"}
    first = chat(prefill, short | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK})
    if first.status != 200 or first.broken:
        return Answer(status=502, error=f"prefill: {first.status} {first.error or first.broken}")
    answer = chat(decode, body | {"kv_transfer_params": first.body["kv_transfer_params"]})
    if answer.broken:
        return Answer(status=502, error=f"decode: {answer.broken}")
    return answer


class Check:
    def __init__(self, options):
        self.options = options
        self.chance = random.Random(options.seed)
        self.prefill = f"http://127.0.0.1:{options.prefill_port}"
        self.decode = f"http://127.0.0.1:{options.decode_port}"
        self.failed = False

    def body(self, count, tokens=12, stream=None):
        """A prompt of about so many tokens that no cache has seen."""
        text = f"{self.chance.getrandbits(40):x} " + words(self.chance, count)
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
                "temperature": 0, "logprobs": True}
        if self.chance.random() < 0.5 if stream is None else stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def expected(self, body):
        answer = chat(self.decode, body | {"cache_salt": "alone"})
        if answer.status != 200 or answer.broken or answer.error:
            raise SystemExit(f"the decode engine alone does not answer: {answer}")
        return answer

    def ask(self, body):
        if self.options.direct:
            return both_legs(self.prefill, self.decode, body)
        return chat(self.options.url, body)

    def judge(self, answer, wanted, tolerance):
        """equal, error (a clear one), or what is wrong with it."""
        near = [abs(a - b) <= tolerance for a, b in zip(answer.logprobs, wanted.logprobs)]
        if answer.status >= 500 and answer.error:
            return "error"
        if answer.status == 200 and answer.error:
            # The stream had begun: what came must be the beginning of the right answer.
            return "error" if wanted.text.startswith(answer.text.rstrip("\ufffd")) else "wrong text, then an error"
        if answer.broken:
            return f"broken: {answer.broken}"
        if answer.status != 200:
            return f"status {answer.status}: {answer.error}"
        if answer.text != wanted.text:
            return "wrong text"
        if len(answer.logprobs) != len(wanted.logprobs):
            return f"{len(answer.logprobs)} log-probabilities instead of {len(wanted.logprobs)}"
        return "equal" if all(near) else "wrong log-probabilities"

    def show(self, outcome, answer, wanted):
        print(f"  {outcome}: status {answer.status}, error {answer.error!r}, {answer.broken or 'not broken'}, after "
              f"{answer.seconds:.1f} s, route {answer.headers.get('x-kvasir-route')!r}\n    got    {answer.text!r} "
              f"{answer.logprobs}\n    wanted {wanted.text!r} {wanted.logprobs}", flush=True)

    def say(self, scenario, counts, allowed, more=""):
        bad = {outcome: count for outcome, count in counts.items() if outcome not in allowed}
        self.failed |= bool(bad) or not counts
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{'FAILED' if bad or not counts else 'ok'}: {scenario}: {outcomes}{more}", flush=True)

    def equal_answers(self):
        counts, remote, most = collections.Counter(), 0, 0.0
        for number in range(self.options.prompts):
            body = self.body(self.chance.randint(80, 1150))
            wanted = self.expected(body)
            before = metric(self.decode, "vllm:external_prefix_cache_hits_total")
            answer = self.ask(body)
            outcome = self.judge(answer, wanted, ALONE)
            counts[outcome] += 1
            if outcome != "equal":
                self.show(outcome, answer, wanted)
            remote += metric(self.decode, "vllm:external_prefix_cache_hits_total") > before
            most = max([most] + [abs(a - b) for a, b in zip(answer.logprobs, wanted.logprobs)])
            if number % 10 == 9:
                print(f"  {number + 1} of {self.options.prompts} answered", flush=True)
        self.say("equal answers", counts, {"equal"},
                 f"; {remote} of {self.options.prompts} were transferred; largest difference {most:.1e}")
        if remote < self.options.prompts:
            self.say("every prompt transferred", {"computed by the decode engine": self.options.prompts - remote}, {})

    def killed(self, port, core, part, scenario, tokens):
        """Many requests in flight, and at a random moment the server is gone."""
        bodies = [self.body(self.chance.randint(300, 1150), tokens) for _ in range(self.options.burst)]
        wanted = [self.expected(body) for body in bodies]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            running = []
            after = self.chance.uniform(0.5, 3.5)
            killer = threading.Timer(after, engines.kill, [port])
            killer.start()
            for body in bodies:
                running.append(pool.submit(self.ask, body))
                time.sleep(0.3)
            answers = [one.result() for one in running]
        killer.join()
        counts = collections.Counter()
        for answer, one in zip(answers, wanted):
            outcome = self.judge(answer, one, IN_A_BATCH)
            counts[outcome] += 1
            if outcome not in ("equal", "error"):
                self.show(outcome, answer, one)
        errors = sorted({answer.error for answer in answers if answer.error})
        slowest = max(answer.seconds for answer in answers)
        more = f"; killed after {after:.1f} s; slowest {slowest:.1f} s; {errors}"
        self.say(scenario, counts, {"equal", "error"}, more)
        engines.start(port, core, part)
        self.whole_again()

    def whole_again(self):
        """Both engines are up and a prompt crosses from one to the other."""
        for url in (self.prefill, self.decode):
            engines.wait(f"the server on {url}", lambda: get(url, "/health") == "", 300)
            engines.warm_up(url)

        def crosses():
            before = metric(self.decode, "vllm:external_prefix_cache_hits_total")
            answer = self.ask(self.body(200))
            return answer.status == 200 and metric(self.decode, "vllm:external_prefix_cache_hits_total") > before

        engines.wait("a transfer between the engines", crosses, 60)

    def client_gone(self):
        """Clients that hang up at every moment of a request, also between its two legs."""
        name = "vllm:kv_cache_usage_perc"
        engines.wait("an idle prefill engine", lambda: metric(self.prefill, name) == 0, LEASE + 15)
        place = urllib.parse.urlsplit(self.prefill if self.options.direct else self.options.url)
        most = 0.0
        for number in range(self.options.burst * 2):
            body = self.body(1100, 64, stream=number % 2 == 0)
            if self.options.direct:
                # The first leg alone: its client never asks the decode engine.
                body |= {"stream": False, "stream_options": None, "max_tokens": 1, "kv_transfer_params": ASK}
            data = json.dumps(body).encode()
            with socket.create_connection((place.hostname, place.port)) as client:
                head = "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                time.sleep(self.chance.uniform(0.0, 0.8))
            most = max(most, metric(self.prefill, name))
        started = time.monotonic()
        while metric(self.prefill, name) > 0 and time.monotonic() - started < LEASE + 5:
            most = max(most, metric(self.prefill, name))
            time.sleep(0.1)
        left, seconds = metric(self.prefill, name), time.monotonic() - started
        self.say("clients gone, also between the legs", {"with blocks left" if left else "all blocks free": 1},
                 {"all blocks free"}, f"; at most {most:.1%} of P's blocks were held, none after {seconds:.1f} s")
        still = metric(self.decode, "vllm:num_requests_running") + metric(self.decode, "vllm:num_requests_waiting")
        self.say("nothing left running on the decode engine", {"0" if still == 0 else f"{still:.0f}": 1}, {"0"})

    def go(self):
        cores = self.options.cores
        self.whole_again()
        self.equal_answers()
        for _ in range(self.options.rounds):
            self.killed(self.options.decode_port, cores[1], "decode", "decode engine killed", 200)
            self.killed(self.options.prefill_port, cores[0], "prefill", "prefill engine killed", 12)
        self.client_gone()
        if not self.options.direct:
            for line in get(self.options.url, "/metrics").splitlines():
                if re.match(r"kvasir_gateway_(audit|retries|prefill)", line):
                    print(line)
        sys.exit(1 if self.failed else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", nargs="?", help="the gateway")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--prefill-port", type=int, default=8101)
    parser.add_argument("--decode-port", type=int, default=8102)
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], default=[0, 1])
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--burst", type=int, default=12, help="requests in flight when a server is killed")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is killed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if bool(options.url) == options.direct:
        parser.error("give the gateway's URL, or --direct")
    Check(options).go()


main()
