"""The gateway in front of real SGLang servers: what it predicts to be cached against what they report, and kills.

    check.py [aggregated] [ranks] [hicache] [storage] [disaggregation]        without an argument all of them

run.sh has installed SGLang into $LAB and named the binary in $KVASIR. The gateway runs at default settings. Each
process that is started here is the leader of a group, and all of them end with this script. A prediction may be wrong
once in a hundred requests, and once in a run that is shorter: two requests in flight can store or evict what the other
finds.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import engines  # noqa: E402
from engines import LAB, chat, get, wait, words  # noqa: E402

PAGE = 16
FIRST, SECOND, GATEWAY, POOL = 30000, 30001, 30900, 30910
URL = f"http://127.0.0.1:{GATEWAY}"
CORES = sorted(os.sched_getaffinity(0))
CORE1, CORE2 = CORES[0], CORES[1 % len(CORES)]
READY = 300  # seconds that a server may take to start

started = {}  # by port
failures = []


def begin(port, command, **variables):
    variables = {name: str(value) for name, value in variables.items()}
    with open(LAB / f"{port}.log", "ab") as log:
        started[port] = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log,
                                         stderr=log, start_new_session=True, env=os.environ | variables)


def server(port, core, part, *options, **variables):
    """Starts a server and returns at once. All have one seed, so a server that starts again has it, too."""
    begin(port, ["bash", HERE / "serve.sh", port, core, part, "--random-seed", 7, *options], PAGE=PAGE, **variables)


def stop(port):
    """Ends a process with all its children, as a machine that fails would."""
    process = started.pop(port, None)
    if process is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    wait(f"the end of the processes of port {port}", lambda: not engines.running(process.pid), 30)


def stop_all():
    for port in list(started):
        stop(port)


def is_up(port):
    if started[port].poll() is not None:
        end = (LAB / f"{port}.log").read_text(errors="replace")[-3000:]
        raise SystemExit(f"the process of port {port} has ended; the end of {LAB}/{port}.log:\n{end}")
    get(f"http://127.0.0.1:{port}", "/health")
    return True


def up(*ports):
    for port in ports:
        seconds = wait(f"the server on {port}", lambda port=port: is_up(port), READY)
        print(f"  the server on {port} is up, {seconds:.0f} s", flush=True)


def gateway(*ports, ranks=1):
    stop(GATEWAY)
    config = LAB / "kvasir.toml"
    config.write_text(f'[gateway]\nmodel_folder = "{LAB}/tinymodel"\nmodel = "tiny"\n')
    command = [os.environ["KVASIR"], "gateway", "--config", config, "--listen", f"127.0.0.1:{GATEWAY}"]
    for port in ports:
        command += ["--worker", f"http://127.0.0.1:{port}"]
    begin(GATEWAY, command)
    wait("the gateway and its workers", lambda: is_up(GATEWAY) and ready() == len(ports) * ranks, 60)


def workers():
    return json.loads(get(URL, "/kvasir/status"))["workers"]


def ready():
    return sum(worker["ready"] for worker in workers())


def pools(port):
    """Of a worker, by tier: blocks of the pool (None if unknown), and blocks that the index knows."""
    found = next(worker for worker in workers() if worker["name"] == f"127.0.0.1:{port}")
    return {pool["tier"]: (pool["blocks"], pool["indexed"]) for pool in found.get("pools") or []}


def predictions():
    fields = ("requests", "exact", "predicted_tokens", "reported_tokens")
    return {field: sum(worker["predictions"][field] for worker in workers() if "predictions" in worker) for field in fields}


def judge(what, good, more=""):
    print(f"{'ok' if good else 'FAILED'}: {what}{more}", flush=True)
    if not good:
        failures.append(what)


class Conversation:
    def __init__(self, chance, systems):
        self.chance = random.Random(chance.random())
        self.group = chance.randrange(len(systems))
        self.messages = [{"role": "system", "content": systems[self.group]}]
        self.turns = 0
        self.ready = 0.0

    def next_body(self):
        self.messages.append({"role": "user", "content": words(self.chance, self.chance.randint(8, 80))})
        body = {"model": "tiny", "messages": list(self.messages), "max_tokens": 8, "temperature": 0}
        if self.chance.random() < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class Run:
    """Conversations of six turns over five system prompts; a turn's events have a moment before they are needed."""

    SETTLE, TURNS, TALKING = 0.3, 6, 20

    def __init__(self, requests, seed):
        self.chance = random.Random(seed)
        self.systems = [words(self.chance, count) for count in (12, 40, 90, 150, 240)]
        self.waiting = [Conversation(self.chance, self.systems) for _ in range(self.TALKING)]
        self.left, self.rows, self.lock = requests, [], threading.Lock()
        self.beginning = collections.Counter()  # first turns in flight, by system prompt
        self.begin_at = collections.defaultdict(float)

    def next_turn(self):
        """`None`: not now; `False`: no more. First turns with one system prompt do not overlap: the second would be
        helped by blocks that the first is just computing."""
        with self.lock:
            if self.left == 0:
                return False
            now = time.monotonic()
            able = [one for one in self.waiting if one.ready <= now and (
                one.turns or self.beginning[one.group] == 0 and self.begin_at[one.group] <= now)]
            if not able:
                return None
            one = self.chance.choice(able)
            self.waiting.remove(one)
            self.beginning[one.group] += one.turns == 0
            self.left -= 1
            return one

    def turn(self, one):
        answer = chat(URL, one.next_body())
        one.messages.append({"role": "assistant", "content": answer.text})
        with self.lock:
            self.rows.append(answer)
            settled = time.monotonic() + self.SETTLE
            if one.turns == 0:
                self.beginning[one.group] -= 1
                self.begin_at[one.group] = settled
            one.turns += 1
            one.ready = settled
            over = one.turns >= self.TURNS or answer.status != 200
            self.waiting.append(Conversation(self.chance, self.systems) if over else one)

    def go(self):
        while (one := self.next_turn()) is not False:
            if one is None:
                time.sleep(0.01)
            else:
                self.turn(one)


def predicted(answer):
    """The cached tokens of a prompt by the header of its answer: the last token is computed in any case."""
    overlap = re.search(r"overlap_blocks=(\d+)/", answer.headers.get("x-kvasir-route", ""))
    prompt = answer.usage.get("prompt_tokens") or 0
    return overlap and prompt and min(int(overlap[1]), (prompt - 1) // PAGE) * PAGE


def is_answered(answer):
    return answer.status == 200 and not answer.broken and not answer.error


def converse(what, requests, at_once=1, seed=1):
    """Every request is answered, and what the gateway predicted to be cached is what the server reports."""
    before, since = predictions(), time.monotonic()
    run = Run(requests, seed)
    threads = [threading.Thread(target=run.go) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = {field: count - before[field] for field, count in predictions().items()}
    seconds = time.monotonic() - since
    failed = [answer for answer in run.rows if not is_answered(answer)]
    other = [answer for answer in run.rows if is_answered(answer) and predicted(answer) != answer.cached]
    for answer in (failed + other)[:10]:
        print(f"  status {answer.status} {answer.error or answer.broken}, predicted {predicted(answer)}, reported "
              f"{answer.cached} of {answer.usage.get('prompt_tokens')}, {answer.headers.get('x-kvasir-route')}")
    allowed = max(1, requests // 100)
    judge(f"{what}: answered", not failed, f", {requests - len(failed)} of {requests} in {seconds:.0f} s")
    judge(f"{what}: predicted, by the gateway's own count",
          told["exact"] >= told["requests"] - allowed and told["requests"] >= requests - allowed,
          f", {told['exact']} of {told['requests']}; tokens {told['predicted_tokens']}, reported "
          f"{told['reported_tokens']}")
    # A request that began anew elsewhere has the first worker's overlap in its header.
    judge(f"{what}: predicted, by the headers of the answers", len(other) <= 2 * allowed,
          f", {len(run.rows) - len(failed) - len(other)} of {requests}")
    judge(f"{what}: something was cached", told["reported_tokens"] > 0)
    names = (re.search(r"\bworker=([^;]*)", answer.headers.get("x-kvasir-route", "")) for answer in run.rows)
    return collections.Counter(name[1] for name in names if name)


def aggregated():
    server(FIRST, CORE1, "alone")
    server(SECOND, CORE2, "alone")
    up(FIRST, SECOND)
    gateway(FIRST)
    converse("one server", 60)
    # What the first one holds is known to the second gateway from its replay.
    gateway(FIRST, SECOND)
    by = converse("two servers", 150, at_once=2, seed=2)
    judge("two servers: both are used", len(by) == 2, f", {dict(by)}")


def ranks():
    if CORE1 == CORE2:
        print("SKIPPED two ranks: each needs a core of its own, and there is one")
        return
    server(FIRST, f"{CORE1},{CORE2}", "alone", "--dp-size", 2, SGLANG_CPU_OMP_THREADS_BIND=f"{CORE1}|{CORE2}")
    up(FIRST)
    gateway(FIRST, ranks=2)
    by = converse("two data-parallel ranks", 80)
    judge("two data-parallel ranks: both are used", len(by) == 2, f", {dict(by)}")


def hicache():
    # A pool for a few conversations: the others' blocks go to host memory and come back.
    server(FIRST, CORE1, "hicache", TOKENS=4096)
    up(FIRST)
    gateway(FIRST)
    converse("HiCache", 100)
    known = pools(FIRST)
    judge("HiCache: blocks in host memory are known", known.get("host", (None, 0))[1] > 0, f", {known}")


def storage():
    """HiCache over Kvasir's store: what a server has computed survives its end, and is a hit of another one through a pool."""
    judge("storage: SGLang's own fixtures (kits.py)", subprocess.run([sys.executable, "-B", HERE / "kits.py"]).returncode == 0)
    folder, chance = LAB / "storage", random.Random(7)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pool = folder / "pool.toml"
    pool.write_text(f'[store]\nname = "n0"\npool = "256 MiB"\nslot = "40 KiB"\nresp = []\nlisten = "127.0.0.1:{POOL}"\n'
                    f'http = "127.0.0.1:{POOL + 1}"\n[transfer]\ntransport = "shm"\nsocket_folder = "{folder}"\n')
    begin(POOL, [os.environ["KVASIR"], "store", "--config", pool])
    wait("the pool", lambda: get(f"http://127.0.0.1:{POOL + 1}", "/health") == "ok", 30)
    nodes = {"nodes": [f"n0=shm:{folder}/kvasir-n0-pool.sock"], "deadline": "2s"}

    def store(name):
        disk = {"capacity": "256 MiB", "segment": "64 MiB", "path": str(folder / name)}
        return json.dumps({"host_tier": {"capacity": "32 MiB"}, "disk_tier": disk, "remote_tier": nodes})

    def ask(port, what, bodies, owns=None):
        answers = [chat(f"http://127.0.0.1:{port}", body) for body in bodies]
        cached = sum(answer.cached or 0 for answer in answers)
        whole = sum((answer.usage["prompt_tokens"] - 1) // PAGE * PAGE for answer in answers)
        seconds = statistics.median(answer.seconds for answer in answers)
        judge(f"storage: {what}: answered", all(map(is_answered, answers)), f", {seconds * 1000:.0f} ms")
        if owns is not None:
            judge(f"storage: {what}: all whole pages were cached", cached == whole, f", {cached} of {whole} tokens")
            same = sum(answer.text == own.text for answer, own in zip(answers, owns))
            judge(f"storage: {what}: equal answers", same == len(owns), f", {same} of {len(owns)}")
        return answers

    def prompt():
        message = {"role": "user", "content": f"{chance.getrandbits(40):x} {words(chance, 1500)}"}
        return {"model": "tiny", "messages": [message], "max_tokens": 16, "temperature": 0}

    server(FIRST, CORE1, "storage", TOKENS=8192, STORE=store("first"))
    server(SECOND, CORE2, "storage", TOKENS=8192, STORE=store("second"))
    up(FIRST, SECOND)
    for port in (FIRST, SECOND):
        ask(port, "warm-up", [prompt()])
    bodies = [prompt() for _ in range(7)]
    owns = ask(FIRST, "computed", bodies)
    ask(SECOND, "by another server", bodies, owns)
    stop(FIRST)
    server(FIRST, CORE1, "storage", TOKENS=8192, STORE=store("first"))
    up(FIRST)
    ask(FIRST, "warm-up", [prompt()])
    stop(POOL)
    ask(FIRST, "after SIGKILL, from the disk", bodies, owns)
    log = (LAB / f"{FIRST}.log").read_text(errors="replace")
    judge("storage: no thread of SGLang's has met an error", "HiCache prefetch failed" not in log and "HiCache backup failed" not in log)


def crosses():
    message = {"role": "user", "content": f"{time.monotonic()} to and fro"}
    body = {"model": "tiny", "messages": [message], "max_tokens": 2}
    return is_answered(chat(URL, body, timeout=60))


def killed(part, port, core, tokens, size):
    """A server is gone while requests are in flight, and comes back with its seed and a pool of another size. Each
    request is answered or is told that it failed; none is refused as wrong."""
    chance = random.Random(part)
    killer = threading.Timer(1.5, stop, [port])
    killer.start()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        running = []
        for number in range(12):
            text = f"{chance.getrandbits(40):x} " + words(chance, chance.randint(5, 300))
            message = {"role": "user", "content": text}
            body = {"model": "tiny", "messages": [message], "max_tokens": tokens, "temperature": 0}
            running.append(pool.submit(chat, URL, body | ({"stream": True} if number % 2 else {})))
            time.sleep(0.25)
        answers = [one.result() for one in running]
    killer.join()

    def outcome(answer):
        if is_answered(answer):
            return "answered"
        if answer.status >= 500 or answer.status == 200 and answer.error:
            return "told that it failed"
        return f"{answer.status} {answer.error or answer.broken}"

    counts = collections.Counter(outcome(answer) for answer in answers)
    slowest = max(answer.seconds for answer in answers)
    judge(f"{part} killed: answered or told so", not set(counts) - {"answered", "told that it failed"},
          f", {dict(counts)}, slowest {slowest:.1f} s")
    server(port, core, part, TOKENS=size)
    up(port)
    wait(f"the gateway to see that {part} has begun another run",
         lambda: pools(port).get("device", (None, 0))[0] == size // PAGE, 60)
    wait("a hand-off between the servers", crosses, 180)


def disaggregation():
    server(FIRST, CORE1, "prefill")
    server(SECOND, CORE2, "decode")
    up(FIRST, SECOND)
    gateway(FIRST, SECOND)
    wait("a hand-off between the servers", crosses, 60)
    converse("prefill and decode", 200)
    killed("prefill", FIRST, CORE1, 8, 8192)
    # The same conversations: an index that remembers the run before would promise all of them.
    converse("prefill started again with its seed", 50)
    killed("decode", SECOND, CORE2, 120, 12288)
    converse("decode started again with its seed", 50, seed=3)


SCENARIOS = {"aggregated": aggregated, "ranks": ranks, "hicache": hicache, "storage": storage, "disaggregation": disaggregation}


def main():
    names = sys.argv[1:] or list(SCENARIOS)
    if set(names) - set(SCENARIOS):
        raise SystemExit(f"check.py [{'|'.join(SCENARIOS)} ...]")
    # As an exception, so that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name in names:
            print(f"=== {name} ({time.strftime('%T')})", flush=True)
            since = time.monotonic()
            SCENARIOS[name]()
            stop_all()
            print(f"=== {name}: {time.monotonic() - since:.0f} s", flush=True)
    finally:
        stop_all()
    if failures:
        raise SystemExit(f"FAILED: {len(failures)} of the above; logs in {LAB}")
    print("ok: all of it")


main()
