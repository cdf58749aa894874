"""A model with multi-head latent attention under two tensor-parallel ranks: each rank has the latents whole, and a pool keeps them once.

    mla.py --kvasir PATH [--port 8101] [--cores 0,1] [--seed 1] [--prompts 8]

vLLM's MLA on a CPU cannot compute a prompt behind blocks that are there already, but for a single token, which is a decode. Prompts are
therefore one token longer than whole blocks, and that token is the first of the engine's own answer to the blocks alone: the rest of that
answer is what must come again. Whole prompts are no measure: this backend's decodes (vLLM 0.32.0) are far from its prefills.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace

import engines
import judge
import shared
from engines import LAB, Answer

BLOCK = 16  # tokens; vLLM's kernel for MLA on a CPU has no other size
BLOCKS = 120  # of a prompt
SHORT = 5  # blocks of a prompt of which one is wrong: a large part of the whole
RANKS = 2
TOKENS = 8  # of an answer
VOCABULARY = range(300, 4000)  # of the tiny model, without special tokens and single bytes
WRONG_BLOCKS = LAB / "wrong-blocks"


class Check:
    def __init__(self, options):
        self.options, self.failed = options, False
        self.chance = random.Random(options.seed)
        self.url = f"http://127.0.0.1:{options.port}"
        os.environ["KVASIR_TEST_MODEL"] = "mlamodel"
        pool = SimpleNamespace(kvasir=options.kvasir, namespaces=False, transport="shm", disk=False)
        self.pool = shared.Pool(pool, 0)
        os.environ["KVASIR_NODES"] = json.dumps([f"{self.pool.name}={self.pool.address}"])

    def say(self, good, text):
        self.failed |= not good
        print(f"  {'ok' if good else 'FAILED'}: {text}", flush=True)

    def up(self, part):
        cores = self.options.cores.replace(",", "|")
        # On processors with AMX vLLM would choose another backend, with other blocks.
        options = ("--tensor-parallel-size", str(RANKS), "--num-gpu-blocks-override", "2048", "--attention-backend", "CPU_MLA")
        engines.start(self.options.port, cores, part, *options)
        waited = engines.wait(f"vLLM ({part})", lambda: engines.get(self.url, "/health") == "", 300)
        print(f"  vLLM ({part}, {RANKS} ranks) is up after {waited:.0f} s", flush=True)
        # Kernels are compiled at first use.
        for _ in range(2):
            self.ask(self.tokens(1))

    def down(self):
        engines.kill(self.options.port)

    def tokens(self, blocks):
        return [self.chance.choice(VOCABULARY) for _ in range(blocks * BLOCK)]

    def ask(self, tokens, count=TOKENS):
        """Completes a prompt of token ids; the answer has the ids as its tokens."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": count, "temperature": 0, "logprobs": judge.TOP,
                "return_token_ids": True, "ignore_eos": True}
        engines.wait_for_idle_workers()
        started = time.monotonic()
        told = engines.post(self.url, "/v1/completions", body, 120)
        (choice,) = told["choices"]
        return Answer(status=200, text=choice["text"], tokens=choice["token_ids"], tops=choice["logprobs"]["top_logprobs"],
                      usage=told["usage"], seconds=time.monotonic() - started)

    def ask_all(self, prompts):
        answers = [self.ask(prompt) for prompt in prompts]
        return answers, statistics.median(self.ask(prompt, 1).seconds for prompt in prompts)

    def own(self, blocks):
        """Whole blocks and a token, and what the engine alone answers to them, twice."""
        blocks = self.tokens(blocks)
        answers = [self.ask(blocks, TOKENS + 1) for _ in range(2)]
        prompt = [*blocks, answers[0].tokens[0]]
        first, second = (Answer(text=answer.text, tokens=answer.tokens[1:], tops=answer.tops[1:]) for answer in answers)
        return prompt, judge.Own(first, [second])

    def compare(self, what, answers, owns):
        """Tokens must be equal, and the first ones' distributions within judge.FLOOR; how many are equal to the last bit is printed."""
        tokens = sum(answer.tokens == own.wanted.tokens for answer, own in zip(answers, owns))
        differences = [own.difference(answer) for answer, own in zip(answers, owns)]
        self.say(tokens == len(owns) and max(differences) <= judge.FLOOR,
                 f"{what}: {tokens} of {len(owns)} answers have the engine's own tokens; first tokens within {max(differences):.2g} of its own, "
                 f"{differences.count(0.0)} to the last bit")

    def cached(self, what, answers, blocks=BLOCKS):
        cached = [answer.cached or 0 for answer in answers]
        wanted = blocks * BLOCK
        self.say(cached == [wanted] * len(answers), f"{what}: {sum(cached)} of {wanted * len(answers)} tokens were cached")

    def registered(self):
        """Blocks that the pool has taken, once no more come."""
        count, before = self.pool.count("registered_blocks_total"), -1
        while count != before:
            time.sleep(2)
            count, before = self.pool.count("registered_blocks_total"), count
        return count

    def go(self):
        WRONG_BLOCKS.unlink(missing_ok=True)
        print("without the connector:")
        self.up("alone")
        prompts, owns = zip(*(self.own(BLOCKS) for _ in range(self.options.prompts)))
        short, of_short = zip(*(self.own(SHORT) for _ in range(self.options.prompts)))
        spreads = [own.spread for own in (*owns, *of_short)]
        self.say(max(spreads) <= judge.FLOOR, f"the engine alone differs by {max(spreads):.2g} at most from itself in {len(spreads)} prompts")
        _, computed = self.ask_all(prompts)
        self.down()

        print("with a pool:")
        self.pool.start()
        self.up("mla")
        before = self.registered()
        for prompt in (*prompts, *short):
            self.ask(prompt[:-1], 1)
        wanted = len(prompts) * (BLOCKS + SHORT)
        engines.wait(f"{wanted} blocks in the pool", lambda: self.pool.count("registered_blocks_total") >= before + wanted, 60)
        registered = self.registered() - before
        self.say(registered == wanted, f"each of {RANKS} ranks has computed {wanted} blocks: the pool has taken {registered}")
        again, nearby = self.ask_all(prompts)
        self.cached("loaded", again)
        self.compare("loaded", again, owns)
        self.down()

        print("an engine that was killed and started again:")
        self.up("mla")
        came, far = self.ask_all(prompts)
        self.cached("from the pool", came)
        self.compare("from the pool", came, owns)
        WRONG_BLOCKS.touch()
        wrong, _ = self.ask_all(short)
        WRONG_BLOCKS.unlink()
        self.cached("planted wrong blocks", wrong, SHORT)
        self.say(*judge.found("planted wrong blocks", wrong, of_short))
        time.sleep(1.1)
        self.ask(self.tokens(1), 1)
        read = int(engines.metric(self.url, "vllm:kvasir_store_far_read"))
        self.say(read >= RANKS * wanted, f"the ranks have read {read} blocks of the pool, of {wanted} for each")
        self.down()
        engines.wait("leases to end", lambda: self.pool.count("leases") == 0, shared.REST_SECONDS)
        self.pool.kill()
        for name, seconds in (("computed", computed), ("loaded", nearby), ("from the pool", far)):
            print(f"  time of one token behind {BLOCKS * BLOCK}: {name} {seconds * 1000:.0f} ms, {seconds / computed:.2f} of computed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvasir", required=True)
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8)
    check = Check(parser.parse_args())
    try:
        check.go()
    finally:
        if check.pool.process is not None and check.pool.process.poll() is None:
            check.pool.kill()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
