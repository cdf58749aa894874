"""An engine that keeps its KV blocks in Kvasir's store: right answers from host memory, from the disk, after damage.

    offload.py [--port 8101] [--cores 0] [--seed 1] [--prompts 7] [--hybrid] [--pipeline 2]

Starts one engine after the other: one without the connector, whose answers are the measure (see judge.py), then one
with it, which is killed and started again. Near the end the connector loads wrong blocks on purpose, of short prompts,
in which one block is a large part of the whole: the judgement must find these. It need not find one wrong block among a
hundred, nor blocks of one prompt that have changed places: keys carry their positions, and attention sums over all.
"""

import argparse
import concurrent.futures
import os
import random
import shutil
import statistics
import sys
import time

import engines
import judge
from engines import LAB, chat, metric, post, words

BLOCK = 32
PAGE = 4096
FOLDER = LAB / "offload"
WRONG_BLOCKS = LAB / "wrong-blocks"  # while it exists, planted/wrong_blocks.py loads wrong blocks
SHORT = 110  # words of a prompt of four or five blocks
PLANTED = 8
LONG = 3000  # words of a long prompt, which are 3,300 tokens and 103 blocks
POOL = ("--num-gpu-blocks-override", "1024")
SMALL_POOL = ("--num-gpu-blocks-override", "64", "--max-model-len", "1024")
# vLLM on a CPU allocates the tensors between stages when it warms up, which it leaves out with --enforce-eager (serve.sh): the backend `eager`
# warms up and compiles nothing.
STAGES_WARM_UP = ("--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}')
HYBRID_GROUPS = 3
WINDOW_BLOCKS = 16  # of 512 tokens
# Three groups of layers need three blocks for 32 tokens.
HYBRID_POOL = ("--num-gpu-blocks-override", "1400")
# vLLM alone answers one of the long prompts 0.19 in log-probability apart behind three of sixteen cached beginnings, and at most 0.03 behind the
# others: so many are asked for.
HYBRID_CUTS = tuple(cut / 16 for cut in range(1, 16))
HYBRID_SMALL_POOL = ("--num-gpu-blocks-override", "160", "--max-model-len", "1024")


class Check:
    def __init__(self, options):
        self.options = options
        self.is_hybrid = getattr(options, "hybrid", False)
        self.chance = random.Random(options.seed)
        self.environment = getattr(options, "environment", {})
        self.url = f"http://{self.environment.get('KVASIR_ENGINE_HOST', '127.0.0.1')}:{options.port}"
        self.stages = getattr(options, "pipeline", 1)
        self.failed = False
        self.times = {}

    def say(self, good, text):
        self.failed |= not good
        print(f"  {'ok' if good else 'FAILED'}: {text}", flush=True)

    def prompt(self, count, tokens=8):
        """A body with about so many words that no cache has seen."""
        text = f"{self.chance.getrandbits(40):x} " + words(self.chance, count)
        return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
                "temperature": 0, "logprobs": True, "top_logprobs": judge.TOP}

    def up(self, part, is_small=False):
        pools = (HYBRID_POOL, HYBRID_SMALL_POOL) if self.is_hybrid else (POOL, SMALL_POOL)
        stages = ("--pipeline-parallel-size", str(self.stages), *STAGES_WARM_UP) if self.stages > 1 else ()
        engines.start(self.options.port, self.options.cores.replace(",", "|"), part, *pools[is_small], *stages, environment=self.environment)
        waited = engines.wait(f"vLLM ({part})", lambda: engines.get(self.url, "/health") == "", 300)
        print(f"  vLLM ({part}) is up after {waited:.0f} s", flush=True)
        engines.warm_up(self.url)
        # Kernels for longer prompts, too; what these leave behind is in no one's way.
        for _ in range(2):
            self.ask(self.prompt(200 if is_small else LONG, 1))

    def down(self):
        engines.kill(self.options.port)

    def ask(self, body):
        answer = chat(self.url, body)
        if answer.status != 200 or answer.broken or answer.error:
            reason = f"{answer.status} {answer.error or answer.broken}"
            raise SystemExit(f"no answer: {reason}; see {LAB}/{self.options.port}.log")
        return answer

    def ask_all(self, bodies, name=None):
        answers = []
        for body in bodies:
            if name and self.stages > 1:
                engines.wait_for_idle_workers()
            answers.append(self.ask(body))
        if name:
            self.times[name] = statistics.median(answer.seconds for answer in answers)
        return answers

    def counter(self, name):
        return int(metric(self.url, f"vllm:kvasir_{name}"))

    def forget(self):
        """Empties the engine's own cache, and not the connector's."""
        engines.wait("the reset of the prefix cache", lambda: post(self.url, "/reset_prefix_cache", {})["success"], 30)

    def settle(self):
        """Waits until all that was saved is on the disk. The store's counters come with a step of the engine."""

        def is_written():
            self.ask(self.prompt(3, 1))
            time.sleep(1.1)
            self.ask(self.prompt(3, 1))
            return self.counter("store_disk_written") >= self.counter("store_stored")

        engines.wait("the disk", is_written, 60)

    def measure(self, what, bodies, at_once=False):
        """The bodies with the engine's own answers to each, the prompts with the least spread first."""
        cuts = HYBRID_CUTS if self.is_hybrid and not at_once else judge.CUTS
        owns = judge.measure(self.ask, bodies, at_once, cuts)
        self.say(*judge.check_prompts(what, owns))
        return list(zip(*sorted(zip(bodies, owns), key=lambda pair: pair[1].spread)))

    def compare(self, what, answers, owns):
        tally = judge.Tally()
        for answer, own in zip(answers, owns):
            tally.add(answer, own)
        self.say(*tally.result(what))

    def cached(self, what, answers):
        """All but the last blocks of each prompt must have been cached."""
        tokens = [(answer.cached or 0, answer.usage["prompt_tokens"]) for answer in answers]
        good = all(cached >= (prompt - 1) // BLOCK * BLOCK for cached, prompt in tokens)
        cached, prompts = (sum(column) for column in zip(*tokens))
        self.say(good, f"{what}: {cached} of {prompts} tokens were cached")

    def go(self):
        shutil.rmtree(FOLDER, ignore_errors=True)
        WRONG_BLOCKS.unlink(missing_ok=True)
        long = [self.prompt(LONG) for _ in range(self.options.prompts)]
        short = [self.prompt(self.chance.randint(30, 200), 60) for _ in range(24)]
        planted = [self.prompt(SHORT, 1) for _ in range(PLANTED)]
        print("without the connector:")
        self.up("alone")
        short, of_short = self.measure("short prompts", short, at_once=True)
        planted, of_planted = self.measure("prompts for wrong blocks", planted)
        # The best-conditioned prompts come first: some steps ask for the first two only.
        long, of_long = self.measure("long prompts", long)
        once = [body | {"max_tokens": 1} for body in long]
        self.ask_all(once, "computed, no connector")
        self.cached("the engine's own cache", self.ask_all(once, "the engine's own cache"))
        self.down()

        print("with the connector:")
        self.up("offload")
        self.compare("computed", self.ask_all(long), of_long)
        self.from_host(long, of_long)
        self.overflown(long, of_long)
        self.settle()
        self.reset(long, of_long)
        self.down()

        print("after SIGKILL:")
        self.up("offload")
        self.from_disk(long, of_long)
        self.down()

        print("after damage:")
        self.damage()
        self.up("planted")
        self.damaged(long, of_long)
        self.wrong_blocks(planted, of_planted)
        self.down()

        print("with a pool that is too small:")
        self.up("offload", is_small=True)
        self.crowded(short, of_short)
        self.down()
        self.report()

    def from_host(self, long, owns):
        self.forget()
        before = self.counter("loaded_blocks_total")
        answers = self.ask_all(long)
        self.cached("from host memory", answers)
        self.compare("from host memory", answers, owns)
        loaded, cached = self.counter("loaded_blocks_total") - before, sum(answer.cached for answer in answers)
        wanted = cached // BLOCK
        if self.is_hybrid:
            # Of the two groups with windows their last blocks, too.
            wanted += len(answers) * (HYBRID_GROUPS - 1) * WINDOW_BLOCKS
        good = loaded == wanted if self.is_hybrid else loaded >= wanted
        self.say(good, f"the connector has loaded {loaded} blocks, of {wanted}")
        once = [body | {"max_tokens": 1} for body in long]
        self.forget()
        self.ask_all([body | {"cache_salt": "again"} for body in once], "computed")
        self.forget()
        self.ask_all(once, "host memory")

    def overflown(self, long, owns):
        """Other prompts fill the engine's pool of 1,024 blocks; the first ones are asked for again."""
        before = self.counter("loaded_blocks_total")
        self.ask_all([self.prompt(LONG, 1) for _ in range(10)])
        answers = self.ask_all(long[:2])
        self.cached("after other prompts", answers)
        self.compare("after other prompts", answers, owns[:2])
        self.say(self.counter("loaded_blocks_total") > before, "what the engine had lost was loaded")

    def reset(self, long, owns):
        """After new weights an engine forgets all that was stored; what starts later has the old ones and finds it."""
        path = "/reset_prefix_cache?reset_external=true"
        engines.wait("the reset of the store", lambda: post(self.url, path, {})["success"], 30)
        answers = self.ask_all(long[:2])
        self.say(not any(answer.cached for answer in answers), "after a reset of the store nothing is found")
        self.compare("after a reset of the store", answers, owns[:2])

    def from_disk(self, long, owns):
        before = self.counter("store_disk_read")
        # Plans take few blocks at a time from a disk that they have not measured.
        self.ask_all([body | {"max_tokens": 1} for body in long[:3]])
        self.forget()
        answers = self.ask_all([body | {"max_tokens": 1} for body in long], "disk")
        self.cached("from the disk", answers)
        self.forget()
        self.compare("from the disk", self.ask_all(long), owns)
        self.settle()
        read = self.counter("store_disk_read") - before
        self.say(read >= sum(answer.cached for answer in answers) // BLOCK, f"{read} blocks were read from the disk")

    def damage(self):
        """Flips a byte in one of fifty blocks' slots, somewhere."""
        flipped, slot = 0, 17 * PAGE
        for path in sorted(FOLDER.rglob("*")):
            if not path.is_file():
                continue
            with open(path, "r+b", buffering=0) as file:
                for start in range(0, os.fstat(file.fileno()).st_size - slot, slot):
                    if self.chance.random() < 0.02:
                        at = start + self.chance.randrange(slot)
                        byte = os.pread(file.fileno(), 1, at)
                        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), at)
                        flipped += 1
        print(f"  {flipped} bytes were flipped", flush=True)

    def damaged(self, long, owns):
        before = self.counter("loaded_blocks_total")
        self.compare("from a damaged disk", self.ask_all(long), owns)
        loaded = self.counter("loaded_blocks_total") - before
        self.settle()
        found, missing = self.counter("store_damaged"), self.counter("missing_blocks_total")
        self.say(found > 0 and missing > 0 and loaded > 0,
                 f"{loaded} blocks came, {found} were found damaged, {missing} behind those were computed")
        self.forget()
        if self.is_hybrid:
            self.rest_of_damage(long)
        answers = self.ask_all(long)
        self.cached("what was computed again", answers)
        self.compare("what was computed again", answers, owns)

    def rest_of_damage(self, long):
        """A load of several groups fails at its first damaged block: the next one is found by the next load."""
        for round in range(1, 9):
            before = self.counter("store_damaged")
            self.ask_all(long)
            self.settle()
            self.forget()
            if self.counter("store_damaged") == before:
                return self.say(True, f"all damaged blocks were found in {round} rounds")
        self.say(False, "damaged blocks without end")

    def wrong_blocks(self, prompts, owns):
        """One block of each prompt is another's, with a good checksum: the judgement must see it in the answers."""
        self.ask_all(prompts)
        self.forget()
        answers = self.ask_all(prompts)
        self.cached("short prompts", answers)
        self.compare("short prompts from host memory", answers, owns)
        self.forget()
        WRONG_BLOCKS.touch()
        answers = self.ask_all(prompts)
        WRONG_BLOCKS.unlink()
        self.cached("with planted wrong blocks", answers)
        self.say(*judge.found("planted wrong blocks", answers, owns))

    def crowded(self, short, owns):
        before = metric(self.url, "vllm:num_preemptions_total")
        for round in ("at once", "at once, again"):
            began = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(len(short)) as threads:
                answers = list(threads.map(self.ask, short))
            seconds = time.monotonic() - began
            self.compare(round, answers, owns)
            self.forget()
        self.hang_up(short, owns, seconds)
        preempted = metric(self.url, "vllm:num_preemptions_total") - before
        self.say(preempted > 0, f"{preempted:.0f} requests were preempted")
        self.say(self.counter("loaded_blocks_total") > 0, f"{self.counter('loaded_blocks_total')} blocks were loaded")

    def hang_up(self, short, owns, seconds):
        """Clients leave while their prompts are loaded, computed and saved, which takes so many seconds; all blocks must be free afterwards."""
        self.forget()
        # Processes that spin on all cores let clients notice late that their time is up.
        patience = [self.chance.uniform(0.005, 0.25 * seconds) for _ in short]
        with concurrent.futures.ThreadPoolExecutor(len(short)) as threads:
            left = list(threads.map(lambda body, seconds: chat(self.url, body, seconds).broken != "", short, patience))
        self.forget()
        self.say(any(left), f"all blocks are free after {sum(left)} of {len(left)} clients hung up")
        self.compare("afterwards", self.ask_all(short), owns)

    def report(self):
        print("time to the first token of prompts of 3,300, median of", self.options.prompts)
        computed = self.times["computed"]
        for name, seconds in self.times.items():
            print(f"  {name}: {seconds * 1000:.0f} ms, {seconds / computed:.2f} of computed")
        for name in ("host memory", "disk"):
            self.say(self.times[name] < computed, f"the first token comes sooner from {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--cores", default="0", help="one for each process of the engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--pipeline", type=int, default=1, help="stages of the engine, each a process with a part of the layers")
    parser.add_argument("--hybrid", action="store_true", help="a model with sliding windows, $KVASIR_TEST_MODEL, in three groups of layers")
    check = Check(parser.parse_args())
    check.go()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
