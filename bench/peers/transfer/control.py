"""The far process, and lines of JSON to and from it. It is killed with us, and nothing else is ever killed."""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Far:
    """The target's process, from the initiator's side."""

    def __init__(self, arguments, timeout_s):
        self.timeout_s = timeout_s
        # Libraries write to standard output, so answers have a pipe of their own.
        answers, far_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], *arguments, "--answers", str(far_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[far_end],
            preexec_fn=die_with_parent,
        )
        os.close(far_end)
        self.answers = answers
        self.rest = b""

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, meanwhile=lambda: None):
        """The next answer. `meanwhile` is called again and again until it is there."""
        ends = time.monotonic() + self.timeout_s
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], 0.001)
            if not ready:
                meanwhile()
                if time.monotonic() > ends:
                    raise TimeoutError(f"the target said nothing for {self.timeout_s} s")
                continue
            some = os.read(self.answers, 1 << 20)
            if not some:
                raise ConnectionError("the target's process ended")
            self.rest += some
        line, self.rest = self.rest.split(b"\n", 1)
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"target: {answer['failed']}")
        return answer

    def ask(self, **command):
        self.tell(**command)
        return self.answer()

    def end(self):
        """Ends the far process, by its id."""
        try:
            self.tell(do="quit")
            self.process.wait(timeout=3)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


class Near:
    """The initiator, from the target's side."""

    def __init__(self, answers):
        self.answers = answers
        self.rest = b""

    def command(self, wait_s):
        """The next command, or `None` when there is none yet."""
        if b"\n" not in self.rest:
            ready, _, _ = select.select([0], [], [], wait_s)
            if not ready:
                return None
            some = os.read(0, 1 << 20)
            if not some:
                return {"do": "quit"}
            self.rest += some
            if b"\n" not in self.rest:
                return None
        line, self.rest = self.rest.split(b"\n", 1)
        return json.loads(line)

    def reply(self, **answer):
        os.write(self.answers, json.dumps(answer).encode() + b"\n")
