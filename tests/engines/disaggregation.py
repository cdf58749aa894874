"""A prefill and a decode engine behind the gateway: right answers, and what happens when one of them dies.

    disaggregation.py http://127.0.0.1:8200 [--prefill-port 8101] [--decode-port 8102] [--cores 0,1] [--seed 1]
    disaggregation.py --direct

Every answer is judged (see judge.py) by those of the decode engine alone to the same request, under cache salts of
their own, so that neither helps the other; and the judgement must find wrong blocks, which are fetched on purpose. With
--direct there is no gateway: the script does the two legs itself, which checks the script and says what the engines
do. The engines were started by serve.sh; those that are killed here are started again.
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
import judge
from engines import Answer, chat, get, metric, words

SHORT = 110  # words of a prompt of four or five blocks, in which one wrong block is a large part of the whole
LEASE = 30  # seconds for which a prefill engine keeps blocks for a decode engine that does not come
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
       "remote_host": None, "remote_port": None}


def first_leg(prefill, body):
    short = {name: value for name, value in body.items() if name != "stream_options"}
    return chat(prefill, short | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK})


def both_legs(prefill, decode, body):
    """What a gateway does, without any of its care."""
    first = first_leg(prefill, body)
    if first.status != 200 or first.broken:
        return Answer(status=502, error=f"prefill: {first.status} {first.error or first.broken}")
    answer = chat(decode, body | {"kv_transfer_params": first.body["kv_transfer_params"]})
    if answer.broken:
        return Answer(status=502, error=f"decode: {answer.broken}")
    return answer


def with_wrong_block(params, others):
    """Where a prompt's blocks are to be fetched from, but for the one in the middle: that is another prompt's."""
    groups = [list(group) for group in params["remote_block_ids"]]
    middle = len(groups[0]) // 2
    groups[0][middle] = others["remote_block_ids"][0][middle]
    return params | {"remote_block_ids": groups}


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
                "temperature": 0, "logprobs": True, "top_logprobs": judge.TOP}
        if self.chance.random() < 0.5 if stream is None else stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def alone(self, body):
        return self.must("the decode engine alone", chat(self.decode, body))

    def must(self, what, answer):
        if answer.status != 200 or answer.broken or answer.error:
            raise SystemExit(f"{what} does not answer: {answer}")
        return answer

    def ask(self, body):
        if self.options.direct:
            return both_legs(self.prefill, self.decode, body)
        return chat(self.options.url, body)

    def outcome(self, answer, own, tally):
        """The verdict in a word, error (a clear one), or how it failed. Does it fail the check?"""
        if answer.status >= 500 and answer.error:
            return "error", False
        if answer.status == 200 and answer.error:
            # The stream had begun: what came must be the beginning of a right answer.
            verdict = judge.Tally().add(answer, own, whole=False)
            return ("error", False) if verdict not in judge.FAULTS else (f"{verdict.value}, then an error", True)
        if answer.broken:
            return f"broken: {answer.broken}", True
        if answer.status != 200:
            return f"status {answer.status}: {answer.error}", True
        verdict = tally.add(answer, own)
        return verdict.value, verdict in judge.FAULTS

    def show(self, outcome, answer, own):
        wanted = own.wanted
        difference = own.difference(answer) if answer.tops and answer.tops[0] else float("nan")
        print(f"  {outcome}: status {answer.status}, error {answer.error!r}, {answer.broken or 'not broken'}, after "
              f"{answer.seconds:.1f} s, route {answer.headers.get('x-kvasir-route')!r}, first token {difference:.2g} "
              f"from the engine's own, of which {own.allowed:.2g} is allowed\n    got    {answer.text!r} "
              f"{answer.logprobs}\n    wanted {wanted.text!r} {wanted.logprobs}", flush=True)

    def say(self, scenario, counts, allowed, more=""):
        bad = {outcome: count for outcome, count in counts.items() if outcome not in allowed}
        self.failed |= bool(bad) or not counts
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{'FAILED' if bad or not counts else 'ok'}: {scenario}: {outcomes}{more}", flush=True)

    def right(self, scenario, counts, bad, tally, more=""):
        """Says what came of a scenario whose answers were judged; `bad` are the outcomes that must not be."""
        problems = tally.problems() + ([] if counts else ["no answers"])
        self.failed |= bool(bad or problems)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        text = "; ".join([f"{scenario}: {outcomes}", tally.figures(), *problems])
        print(f"{'FAILED' if bad or problems else 'ok'}: {text}{more}", flush=True)

    def prompts(self, what, owns):
        """Fails the check if too many of its prompts are left out."""
        good, text = judge.check_prompts(what, owns)
        self.failed |= not good
        print(f"{'ok' if good else 'FAILED'}: {text}", flush=True)

    def right_answers(self):
        counts, bad, owns, tally, remote = collections.Counter(), [], [], judge.Tally(), 0
        for number in range(self.options.prompts):
            body = self.body(self.chance.randint(80, 1150))
            (own,) = judge.measure(self.alone, [body])
            owns.append(own)
            before = metric(self.decode, "vllm:external_prefix_cache_hits_total")
            answer = self.ask(body)
            outcome, is_bad = self.outcome(answer, own, tally)
            counts[outcome] += 1
            if is_bad or outcome == "error":
                bad.append(outcome)
                self.show(outcome, answer, own)
            remote += metric(self.decode, "vllm:external_prefix_cache_hits_total") > before
            if number % 10 == 9:
                print(f"  {number + 1} of {self.options.prompts} answered", flush=True)
        self.prompts("prompts", owns)
        self.right("right answers", counts, bad, tally, f"; {remote} of {self.options.prompts} were transferred")
        if remote < self.options.prompts:
            self.say("every prompt transferred", {"computed by the decode engine": self.options.prompts - remote}, {})

    def wrong_blocks(self):
        """The decode engine fetches one block of every second prompt from where its neighbour's lies."""
        bodies = [self.body(SHORT, 1, stream=False) for _ in range(2 * self.options.planted)]
        owns = judge.measure(self.alone, bodies)
        self.prompts("short prompts", owns)
        counts, bad, tally, wrong = collections.Counter(), [], judge.Tally(), []
        for number in range(0, len(bodies), 2):
            pair = bodies[number : number + 2]
            legs = [self.must("the prefill engine", first_leg(self.prefill, body)) for body in pair]
            params, others = (leg.body["kv_transfer_params"] for leg in legs)
            planted = pair[0] | {"kv_transfer_params": with_wrong_block(params, others)}
            wrong.append(self.must("the decode engine", chat(self.decode, planted)))
            answer = chat(self.decode, pair[1] | {"kv_transfer_params": others})
            outcome, is_bad = self.outcome(answer, owns[number + 1], tally)
            counts[outcome] += 1
            if is_bad or outcome == "error":
                bad.append(outcome)
                self.show(outcome, answer, owns[number + 1])
        self.right("right blocks", counts, bad, tally)
        good, text = judge.found("planted wrong blocks", wrong, owns[::2])
        self.failed |= not good
        print(f"{'ok' if good else 'FAILED'}: {text}", flush=True)

    def killed(self, port, core, part, scenario, tokens):
        """Many requests in flight, and at a random moment the server is gone."""
        bodies = [self.body(self.chance.randint(300, 1150), tokens) for _ in range(self.options.burst)]
        owns = judge.measure(self.alone, bodies, at_once=True)
        self.prompts("prompts of a burst", owns)
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
        counts, bad, tally = collections.Counter(), [], judge.Tally()
        for answer, own in zip(answers, owns):
            outcome, is_bad = self.outcome(answer, own, tally)
            counts[outcome] += 1
            if is_bad:
                bad.append(outcome)
                self.show(outcome, answer, own)
        errors = sorted({answer.error for answer in answers if answer.error})
        slowest = max(answer.seconds for answer in answers)
        more = f"; killed after {after:.1f} s; slowest {slowest:.1f} s; {errors}"
        self.right(scenario, counts, bad, tally, more)
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
        started = time.monotonic()
        while (still := self.at_work(self.decode)) and time.monotonic() - started < 10:
            time.sleep(0.1)
        self.say("nothing left running on the decode engine", {"0" if still == 0 else f"{still:.0f}": 1}, {"0"})

    def at_work(self, engine):
        """Requests that an engine computes, or that wait in it."""
        return metric(engine, "vllm:num_requests_running") + metric(engine, "vllm:num_requests_waiting")

    def go(self):
        cores = self.options.cores
        self.whole_again()
        prefill, decode = self.options.parts
        self.right_answers()
        if prefill == "prefill":
            # With KvasirConnector nobody can ask for another prompt's block: transfers are named by their content.
            self.wrong_blocks()
        for _ in range(self.options.rounds):
            self.killed(self.options.decode_port, cores[1], decode, "decode engine killed", 200)
            self.killed(self.options.prefill_port, cores[0], prefill, "prefill engine killed", 12)
        self.client_gone()
        if not self.options.direct:
            for line in get(self.options.url, "/metrics").splitlines():
                if re.match(r"kvasir_gateway_(cache_prediction|retries|prefill)", line):
                    print(line)
        sys.exit(1 if self.failed else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", nargs="?", help="the gateway")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--prefill-port", type=int, default=8101)
    parser.add_argument("--decode-port", type=int, default=8102)
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], default=[0, 1])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["prefill", "decode"],
                        help="of serve.sh: NIXL's, or kvasir-prefill,kvasir-decode")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--planted", type=int, default=8, help="wrong blocks that are fetched on purpose")
    parser.add_argument("--burst", type=int, default=12, help="requests in flight when a server is killed")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is killed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if bool(options.url) == options.direct:
        parser.error("give the gateway's URL, or --direct")
    Check(options).go()


if __name__ == "__main__":
    main()
