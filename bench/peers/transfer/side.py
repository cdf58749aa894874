"""One peer over one transport: this process moves, a second one of the same program is the far side. Results are lines of
JSON on standard output. Exit code 77: the peer's wheel cannot be had or has no such transport."""

import argparse
import json
import math
import os
import sys
import time

import pingpong
from control import Far, Near
from memory import Memory, copier, places
from movers import MOVERS

ROUND_S = 0.03
LATE_S = 5.0


def emit(**result):
    sys.__stdout__.write(json.dumps(result) + "\n")
    sys.__stdout__.flush()


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def percentile(ordered, share):
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def spent_s(work, times):
    started = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - started


def bandwidth(options, mover, far, source, sink, operation, size_bytes, count):
    """Rounds of batches and rounds of memcpy in turn; the last batch moves fresh bytes, and all of them are compared."""
    pieces, total = places(size_bytes, count), size_bytes * count
    there = far.introduction["base"]
    prepared = mover.prepare(operation, source, there, pieces, size_bytes)
    copy = copier(source, sink, pieces, size_bytes)

    def move():
        mover.move(prepared)

    once = min(spent_s(move, 1) for _ in range(3))
    times = max(1, min(2000, int(ROUND_S / max(once, 1e-6))))
    once = min(spent_s(copy, 1) for _ in range(3))
    copies = max(1, min(5000, int(ROUND_S / max(once, 1e-6))))
    rates, copy_rates, ratios = [], [], []
    for _ in range(options.rounds):
        rate = total * times / spent_s(move, times) / 1e9
        copied = total * copies / spent_s(copy, copies) / 1e9
        rates.append(rate)
        copy_rates.append(copied)
        ratios.append(rate / copied)
    wrong = verify(mover, far, source, operation, pieces, size_bytes, total, move)
    mover.release(prepared)
    emit(
        test="bw", peer=options.peer, transport=options.transport, op=operation, bytes=size_bytes, batch=count,
        rounds=options.rounds, gbytes_per_s=round(median(rates), 3), best_gbytes_per_s=round(max(rates), 3), memcpy_gbytes_per_s=round(median(copy_rates), 3),
        ratio_to_memcpy=round(median(ratios), 4), us_per_descriptor=round(size_bytes / median(rates) / 1e3, 3),
        wrong_bytes=wrong, settings=mover.settings,
    )  # fmt: skip
    return wrong


def verify(mover, far, source, operation, pieces, size_bytes, total, move):
    """Wrong bytes after one batch of a pattern that was never moved before. A write may land after the library called it
    done (Mooncake's TCP does not wait for the target), so the target looks until it is there or time is up."""
    seed = size_bytes + total + (operation == "read")
    shuffled = [[near, other] for near, other in pieces]
    if operation == "write":
        source.fill(seed, total)
        move()
        return far.ask(do="compare", seed=seed, pieces=shuffled, size_bytes=size_bytes)["wrong"]
    far.ask(do="fill", seed=seed, total=total)
    source.bytes[:total] = 0
    move()
    expected = Memory(total)
    expected.fill(seed, total)
    return sum(
        int((source.bytes[near : near + size_bytes] != expected.bytes[other : other + size_bytes]).sum())
        for near, other in pieces
    )


def latency(options, mover, far, memory, size_bytes):
    ordered = pingpong.initiate(mover, far, memory, size_bytes, options.latency_rounds)
    at = {f"p{name}_us": round(percentile(ordered, share) / 1e3, 2)
          for name, share in [("50", 0.5), ("99", 0.99), ("99_9", 0.999)]}  # fmt: skip
    emit(test="lat", peer=options.peer, transport=options.transport, op="write", bytes=size_bytes, rounds=len(ordered),
         **at, settings=mover.settings)  # fmt: skip


def registration(options, mover, size_bytes):
    """What it costs to make memory known to the library, its pages present beforehand."""
    memory = Memory(size_bytes)
    spent = []
    for _ in range(3):
        spent.append((mover.register(memory), mover.unregister()))
    emit(test="register", peer=options.peer, transport=options.transport, bytes=size_bytes,
         register_ms=round(median([one for one, _ in spent]) * 1e3, 3),
         unregister_ms=round(median([two for _, two in spent]) * 1e3, 3), settings=mover.settings)  # fmt: skip


def initiate(options):
    mover = MOVERS[options.peer]("near", options.transport, "initiator")
    longest = longest_batch(options)
    source, sink = Memory(longest), Memory(longest)
    far = Far(["target", *options.forward], options.timeout)
    try:
        mover.register(source)
        far.introduction = far.answer()
        mover.meet(far.introduction)
        far.ask(do="meet", base=source.base, **mover.introduction())
        wrong = 0
        for operation in options.operations:
            for size_bytes, count in options.sizes:
                wrong += bandwidth(options, mover, far, source, sink, operation, size_bytes, count)
        for size_bytes in options.latency_sizes:
            latency(options, mover, far, source, size_bytes)
        if options.register_bytes:
            registration(options, mover, options.register_bytes)
    finally:
        far.end()
    return 1 if wrong else 0


def serve(options):
    near = Near(options.answers)
    mover = MOVERS[options.peer]("far", options.transport, "target")
    memory = Memory(longest_batch(options))
    mover.register(memory)
    near.reply(base=memory.base, **mover.introduction())
    there = None
    while True:
        # Without a thread of the library its work at the target is done here: over TCP there is much of it, else none but
        # the connection.
        for _ in range(100 if mover.needs_help else 0):
            mover.progress()
        command = near.command(0 if mover.needs_help and options.transport == "tcp" else 0.001)
        if command is None:
            continue
        match command["do"]:
            case "quit":
                return 0
            case "meet":
                there = command["base"]
                mover.meet(command)
                near.reply(met=True)
            case "fill":
                memory.fill(command["seed"], command["total"])
                near.reply(filled=True)
            case "compare":
                near.reply(wrong=wrong_bytes(mover, memory, command))
            case "echo":
                ball = pingpong.Ball(mover, memory, there, command["size_bytes"])
                near.reply(ready=True)
                pingpong.echo(ball, command["count"])
                near.reply(done=True)


def wrong_bytes(mover, memory, command):
    size_bytes, pieces = command["size_bytes"], command["pieces"]
    expected = Memory(size_bytes * len(pieces))
    expected.fill(command["seed"], expected.size_bytes)
    ends = time.perf_counter() + LATE_S
    while True:
        wrong = sum(
            int((memory.bytes[other : other + size_bytes] != expected.bytes[near : near + size_bytes]).sum())
            for near, other in pieces
        )
        if wrong == 0 or time.perf_counter() > ends:
            return wrong
        mover.progress()


def longest_batch(options):
    return max(2 * pingpong.CATCH_OFFSET, *(size * count for size, count in options.sizes))


def size_and_count(text):
    size_bytes, count = text.split("x")
    return int(size_bytes), int(count)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["initiator", "target"])
    parser.add_argument("--peer", choices=sorted(MOVERS), required=True)
    parser.add_argument("--transport", choices=["local", "tcp"], required=True)
    parser.add_argument("--sizes", type=size_and_count, nargs="+", required=True, help="BYTESxCOUNT of one batch")
    parser.add_argument("--operations", nargs="+", default=["write", "read"], choices=["write", "read"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--latency-sizes", type=int, nargs="*", default=[64, 4096])
    parser.add_argument("--latency-rounds", type=int, default=5000)
    parser.add_argument("--register-bytes", type=int, default=1 << 30)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without an answer of the target")
    parser.add_argument("--answers", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.forward = sys.argv[2:]
    return options


def main():
    options = parse()
    # Libraries print to standard output; only results belong there.
    sys.__stdout__ = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        return initiate(options) if options.role == "initiator" else serve(options)
    except ImportError as error:
        print(f"SKIPPED: {options.peer} over {options.transport}: {error}", file=sys.stderr)
        return 77
    except Exception as error:  # noqa: BLE001 - the far side must tell the near one, whatever it was
        if options.role == "target":
            Near(options.answers).reply(failed=f"{type(error).__name__}: {error}")
        print(f"{options.peer} over {options.transport}, {options.role}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # Libraries with threads of their own do not always end in order; the results are out by now.
    code = main()
    sys.__stdout__.flush()
    os._exit(code)
