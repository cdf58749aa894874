"""A small write that goes to and fro: each side waits for the last byte of the other's write in its own memory, as
ib_write_lat does. Half a round trip counts. The calls come from Python, a microsecond or two each."""

import os
import time

CATCH_OFFSET = 64 << 10


class Ball:
    """Thrown from a place of its own and caught at another, so that what comes is never mixed up with what goes."""

    def __init__(self, mover, memory, there, size_bytes):
        self.mover = mover
        self.prepared = mover.prepare("write", memory, there, [(0, CATCH_OFFSET)], size_bytes)
        self.sent = memory.bytes[size_bytes - 1 : size_bytes].data
        self.caught = memory.bytes[CATCH_OFFSET + size_bytes - 1 : CATCH_OFFSET + size_bytes].data
        self.caught[0] = 0

    def throw(self, number):
        self.sent[0] = number % 255 + 1
        self.mover.move(self.prepared)

    def catch(self, number, timeout_s=10.0):
        mark, ends = number % 255 + 1, time.perf_counter() + timeout_s
        while self.caught[0] != mark:
            self.mover.progress()
            # Threads of the library, and other work of this machine, need the core that a spinning loop would take.
            os.sched_yield()
            if time.perf_counter() > ends:
                raise TimeoutError(f"write {number} of the other side did not come within {timeout_s} s")

    def end(self):
        self.mover.release(self.prepared)


def initiate(mover, far, memory, size_bytes, count):
    """Nanoseconds of so many throws, in order of size."""
    ball = Ball(mover, memory, far.introduction["base"], size_bytes)
    warm = count // 10 + 10
    far.ask(do="echo", size_bytes=size_bytes, count=count + warm)
    spent_ns = []
    for number in range(count + warm):
        started = time.perf_counter_ns()
        ball.throw(number)
        ball.catch(number)
        spent_ns.append((time.perf_counter_ns() - started) / 2)
    # The last throw of the other side may need us to end.
    far.answer(mover.progress)
    ball.end()
    return sorted(spent_ns[warm:])


def echo(ball, count):
    for number in range(count):
        ball.catch(number)
        ball.throw(number)
    ball.end()
