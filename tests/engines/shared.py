"""Two engines that share KV blocks through pools of other processes (`kvasir store`): a prompt that one has computed is a hit of the
other, and whatever is killed costs no wrong answer and no hang.

    shared.py --kvasir PATH [--ports 8101,8102] [--cores 0,1] [--transport shm] [--pools 2] [--kills 8] [--seed 1] [--prompts 7]
              [--namespaces] [--disk] [--hybrid]

With `--namespaces` there are two nodes, each a network namespace with an engine and a pool, which reach each other by TCP over a bridge;
needs root. With `--disk` each pool has a disk below memory that holds a third of the prompts: what was computed is found again after
both pools were killed. With `--hybrid` the model has sliding windows: two of its three groups of layers need the last blocks only. One engine
without the connector comes first: its answers are the measure (see judge.py).
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import engines
import judge
import offload
from engines import LAB, chat

FOLDER = LAB / "shared"
NETWORK = "10.77.41"  # of --namespaces: the bridge is host 1, the nodes are 10 and 11
BRIDGE = "kvasir-shared"
DISK_POOL = "10 MiB"  # 128 slots in each of two pools, of some 350 blocks
SLOT = "80 KiB"  # of the pools; a block of an engine has 64 KiB
REST_SECONDS = 20
# vLLM's processes spin on both cores. A pool that has to wait until one of them pauses answers later than the engine could compute. Where machines
# have a core for each pool there is no such wait; here pools come first instead.
POOL_FIRST = ("chrt", "--fifo", "1")
AGAIN_MAX = 40  # prompts after the kills until blocks are shared again
ALONE_SECONDS = 15  # a client tries a pool again after at most 10
AGAIN_SECONDS = 1.2  # that each of them may take to reach the pools


def may_come_first():
    return subprocess.run([*POOL_FIRST, "true"], stderr=subprocess.DEVNULL).returncode == 0


def namespace(number):
    return f"kvasir-shared-{number}"


class Namespaces:
    """Network namespaces whose only neighbours are each other and this machine, over a bridge. They go at the end."""

    def __init__(self, count):
        self.names = [namespace(number) for number in range(count)]

    def __enter__(self):
        self.__exit__()
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def make(self):
        self.ip(f"link add {BRIDGE} type bridge", f"addr add {NETWORK}.1/24 dev {BRIDGE}", f"link set {BRIDGE} up")
        for number, name in enumerate(self.names):
            here = f"kvshared{number}"
            self.ip(f"netns add {name}", f"link add {here} type veth peer name eth0 netns {name}",
                    f"link set {here} master {BRIDGE} up", f"-n {name} addr add {address(number)}/24 dev eth0",
                    f"-n {name} link set eth0 up", f"-n {name} link set lo up")

    def __exit__(self, *problem):
        for command in [f"netns del {name}" for name in self.names] + [f"link del {BRIDGE}"]:
            subprocess.run(["ip", *command.split()], stderr=subprocess.DEVNULL)

    def ip(self, *commands):
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)


def address(number):
    return f"{NETWORK}.{10 + number}"


class Pool:
    """A node that keeps blocks for others, at an address that stays."""

    def __init__(self, options, number):
        self.kvasir, self.name, self.number = options.kvasir, f"n{number}", number
        self.prefix = ["ip", "netns", "exec", namespace(number)] if options.namespaces else []
        self.prefix += POOL_FIRST if may_come_first() else ()
        host = address(number) if options.namespaces else "127.0.0.1"
        self.listen, self.http = f"{host}:{7411 + number}", f"{host}:{7421 + number}"
        FOLDER.mkdir(exist_ok=True)
        self.configuration = FOLDER / f"{self.name}.toml"
        self.configuration.write_text(
            f'[store]\nname = "{self.name}"\npool = "512 MiB"\nslot = "{SLOT}"\nresp = []\nlisten = "{self.listen}"\n'
            f'http = "{self.http}"\n[transfer]\ntransport = "{options.transport}"\nsocket_folder = "{FOLDER}"\n')
        self.has_disk = options.disk
        if options.disk:
            disk = FOLDER / f"disk-{self.name}"
            shutil.rmtree(disk, ignore_errors=True)
            text = self.configuration.read_text().replace('pool = "512 MiB"', f'pool = "{DISK_POOL}"')
            self.configuration.write_text(text + f'[disk_tier]\npath = "{disk}"\ncapacity = "512 MiB"\nsegment = "64 MiB"\n')
        self.address = f"shm:{FOLDER}/kvasir-{self.name}-pool.sock" if options.transport == "shm" else f"tcp:{self.listen}"
        self.process = None

    def start(self):
        with open(FOLDER / f"{self.name}.log", "ab") as log:
            command = [*self.prefix, self.kvasir, "store", "--config", str(self.configuration)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        engines.wait(f"the pool {self.name}", lambda: engines.get(f"http://{self.http}", "/health") == "ok", 30)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def count(self, name):
        return self.metric(f"kvasir_pool_{name}")

    def metric(self, name):
        lines = engines.get(f"http://{self.http}", "/metrics").splitlines()
        (value,) = (line.split(" ")[1] for line in lines if line.startswith(f"{name} "))
        return int(value)

    def kept(self):
        """Blocks that it has, in memory or on its disk."""
        return self.metric("kvasir_disk_blocks") if self.has_disk else self.count("blocks")


class Check(offload.Check):
    """Both engines and the pools; what the offload check has for one engine is here for the first."""

    def __init__(self, options):
        first, second = (int(port) for port in options.ports.split(","))
        core1, core2 = options.cores.split(",")
        nodes = [{"KVASIR_NETNS": namespace(number), "KVASIR_ENGINE_HOST": address(number)} for number in range(2)]
        nodes = nodes if options.namespaces else [{}, {}]
        if options.hybrid:
            os.environ["KVASIR_TEST_MODEL"] = "hybridmodel"
        common = {"hybrid": options.hybrid}
        super().__init__(SimpleNamespace(port=first, cores=core1, seed=options.seed, prompts=options.prompts, environment=nodes[0], **common))
        self.other = offload.Check(
            SimpleNamespace(port=second, cores=core2, seed=options.seed + 1, prompts=0, environment=nodes[1], **common))
        self.settings = options
        self.part, self.other.part = "shared-small", "shared"
        self.pools = [Pool(options, number) for number in range(options.pools)]
        os.environ["KVASIR_NODES"] = json.dumps([f"{pool.name}={pool.address}" for pool in self.pools])

    def count(self, name):
        return sum(pool.count(name) for pool in self.pools)

    def blocks(self, answers):
        """Blocks that the pools get of these prompts."""
        groups = offload.HYBRID_GROUPS if self.is_hybrid else 1
        return groups * sum((answer.usage["prompt_tokens"] - 1) // offload.BLOCK for answer in answers)

    def settle(self, blocks):
        """Waits until so many blocks are in the pools, and tells how long that took."""
        return engines.wait(f"{blocks} blocks in the pools", lambda: self.kept() >= blocks, 60)

    def kept(self):
        return sum(pool.kept() for pool in self.pools)

    def at_ease(self):
        """Waits until no more blocks come to the pools: those of earlier prompts, for which nobody waits, may take their time."""
        before, since = self.kept(), time.monotonic()

        def is_still():
            nonlocal before, since
            if (now := self.kept()) != before:
                before, since = now, time.monotonic()
            return time.monotonic() - since > 2

        engines.wait("the last blocks to come to the pools", is_still, 60)

    def go(self):
        long = [self.prompt(offload.LONG) for _ in range(self.options.prompts)]
        print("without the connector:")
        self.up("alone")
        long, of_long = self.measure("long prompts", long)
        once = [body | {"max_tokens": 1} for body in long]
        self.ask_all(once, "computed, no connector")
        self.cached("the engine's own cache", self.ask_all(once, "the engine's own cache"))
        self.down()

        print(f"two engines and {len(self.pools)} pools over {self.settings.transport}:")
        for pool in self.pools:
            pool.start()
        with concurrent.futures.ThreadPoolExecutor() as both:
            list(both.map(lambda one: one.up(one.part), (self, self.other)))
        self.shares(long, of_long)
        self.at_rest()
        self.survives(long, of_long)
        self.at_rest()
        self.down()
        self.other.down()
        self.at_rest("after the engines' end")
        for pool in self.pools:
            pool.kill()
        self.report()

    def shares(self, long, owns):
        before = self.kept()
        answers = self.ask_all(long)
        self.compare("computed by the first", answers, owns)
        blocks = self.blocks(answers)
        seconds = self.settle(before + blocks)
        print(f"  {blocks} blocks were in the pools {seconds:.1f} s after the last answer", flush=True)
        if self.settings.disk:
            in_memory = self.count("blocks")
            for pool in self.pools:
                pool.kill()
                pool.start()
            self.say(self.kept() >= before + blocks, f"pools that were killed have {self.kept()} blocks on their disks; {in_memory} had room in memory")
            # The engines have to find them again.
            time.sleep(2)
        once = [body | {"max_tokens": 1} for body in long]
        came = self.other.ask_all(once, "pools")
        self.other.cached("the second, which has computed none of them", came)
        self.other.forget()
        self.other.compare("what the second took from the pools", self.other.ask_all(long), owns)
        read, wanted, most = self.far_read(), blocks, float("inf")
        if self.is_hybrid:
            # Of the groups with windows their last blocks; blocks that are read in a pool's memory count at each of two readings.
            most = blocks if self.settings.transport == "tcp" else 2 * blocks
            wanted = blocks // offload.HYBRID_GROUPS + len(long) * (offload.HYBRID_GROUPS - 1) * offload.WINDOW_BLOCKS
        self.say(wanted <= read < most, f"{read} blocks came from the pools, of {wanted}")
        self.other.forget()
        # Blocks of a pool that is reached by shared memory are read there each time.
        self.other.ask_all(once, "pools, once more" if self.settings.transport == "shm" else "its own host memory")
        self.other.forget()
        self.other.ask_all([body | {"cache_salt": "other"} for body in once], "computed")
        self.times |= self.other.times
        # And the other way: what the second has computed is a hit of the first.
        self.at_ease()
        fresh = [self.prompt(offload.LONG, 1) for _ in range(2)]
        before = self.kept()
        self.settle(before + self.blocks(self.other.ask_all(fresh)))
        self.cached("the first, of what the second computed", self.ask_all(fresh))

    def far_read(self):
        """The store's counters come with a step of the engine, at most once in a second."""
        time.sleep(1.1)
        self.other.ask(self.prompt(3, 1))
        return self.other.counter("store_far_read")

    def survives(self, long, owns):
        """Something is killed while prompts are under way: of a pool they lose hits, of an engine their connection."""
        tally, lost, slowest, victims = judge.Tally(), 0, 0.0, []
        checks = (self, self.other)
        for kill in range(self.settings.kills):
            with concurrent.futures.ThreadPoolExecutor() as threads:
                chosen = [self.chance.randrange(len(long)) for _ in range(4)]
                for check in checks:
                    check.forget()
                asked = [threads.submit(chat, checks[at % 2].url, long[one], 120) for at, one in enumerate(chosen)]
                time.sleep(self.chance.uniform(0.0, 1.0))
                # Engines take half a minute to start: every eighth victim is one.
                victim = checks[self.chance.randrange(2)] if kill % 8 == 7 else self.chance.choice(self.pools)
                victims.append(type(victim).__name__)
                victim.down() if isinstance(victim, offload.Check) else victim.kill()
                answers = [one.result() for one in asked]
            for at, (one, answer) in enumerate(zip(chosen, answers)):
                slowest = max(slowest, answer.seconds)
                if answer.broken and checks[at % 2] is victim:
                    lost += 1
                elif answer.broken or answer.status != 200:
                    self.say(False, f"an answer of an engine that was not killed: {answer.broken or answer.status}")
                else:
                    tally.add(answer, owns[one])
            victim.up(victim.part) if isinstance(victim, offload.Check) else victim.start()
        text = f"after {len(victims)} kills ({victims.count('Pool')} of pools)"
        self.say(*tally.result(text))
        self.say(slowest < 60, f"the slowest answer took {slowest:.1f} s; {lost} were asked of an engine that was killed")
        # What is computed from now on is shared again, both ways, once the engines have reached the pools, which takes a client 10 s at
        # most, and have learnt that they answer: to ask them did not pay while they were killed. What is computed before may be evicted
        # before it is sent. The smaller host tier has no room for a burst of a long prompt.
        for one, other, count in ((self, self.other, offload.SHORT), (self.other, self, offload.LONG)):
            for attempt in range(1, AGAIN_MAX + 1):
                fresh = [self.prompt(count, 1)]
                before = self.count("registered_blocks_total")
                wanted, until = before + self.blocks(one.ask_all(fresh)), time.monotonic() + AGAIN_SECONDS
                while self.count("registered_blocks_total") < wanted and time.monotonic() < until:
                    time.sleep(0.05)
                answers = other.ask_all(fresh)
                if attempt == AGAIN_MAX or any(answer.cached for answer in answers):
                    break
                time.sleep(AGAIN_SECONDS / 4)
            print(f"  after {attempt} prompt{'s' if attempt > 1 else ''}:", flush=True)
            self.cached("after the kills, of what the other engine computed", answers)
        for check in checks:
            until, usable = time.monotonic() + ALONE_SECONDS, 0
            while usable < len(self.pools) and time.monotonic() < until:
                # Told with a step of the engine, at most once in a second.
                time.sleep(1.1)
                check.ask(self.prompt(3, 1))
                usable = check.counter("node_usable")
            text = f"{usable} of {len(self.pools)} pools are usable by {check.url}, which left pools alone {check.counter('node_failures')} times"
            self.say(usable == len(self.pools), text)
        failures = sum(check.counter("node_failures") for check in checks)
        if victims.count("Pool"):
            self.say(failures > 0, f"the engines have told of {failures} times that they left a pool alone")

    def at_rest(self, when="at rest"):
        engines.wait("leases to end", lambda: self.count("leases") == 0, REST_SECONDS)
        left = {name: self.count(name) for name in ("leases", "verifying_blocks", "fenced_slots", "violations_total")}
        self.say(not any(left.values()), f"{when} the pools hold {left}")

    def report(self):
        print("time to the first token of prompts of 3,300, median of", self.options.prompts)
        computed = self.times["computed"]
        for name, seconds in self.times.items():
            print(f"  {name}: {seconds * 1000:.0f} ms, {seconds / computed:.2f} of computed")
        self.say(self.times["pools"] < computed, "the first token comes sooner from the pools")
        self.failed |= self.other.failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvasir", required=True)
    parser.add_argument("--ports", default="8101,8102")
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--transport", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--pools", type=int, default=2)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--namespaces", action="store_true", help="a network namespace for each engine with its pool")
    parser.add_argument("--hybrid", action="store_true", help="a model with sliding windows in three groups of layers")
    options = parser.parse_args()
    if options.hybrid and options.disk:
        parser.error("--hybrid has no --disk")
    if options.namespaces:
        if options.pools != 2:
            parser.error("--namespaces has two nodes with a pool each")
        options.transport = "tcp"
    with Namespaces(2) if options.namespaces else contextlib.nullcontext():
        check = Check(options)
        try:
            check.go()
        finally:
            for pool in check.pools:
                if pool.process is not None and pool.process.poll() is None:
                    pool.kill()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
