"""An engine whose disk tier becomes slow: loading must not cost more than computing does, and the disk is used again when it can.

    slow_disk.py [--port 8101] [--cores 0] [--seed 1] [--prompts 7] [--rounds 6] [--delay 0.2]

The disk tier lies behind slow_mount.py. Each prompt that the store has on its disk is asked for beside one of the same length that
nobody has seen: the ratio of both times to the first token is what a plan is worth. With --delay each read takes so many seconds more.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time

import engines
import offload
from engines import LAB

FOLDER = LAB / "slow"
DELAY = FOLDER / "delay"
MOUNT = FOLDER / "mount"
WORTH = 1.05  # a first token may take so much longer than computing alone


class Check(offload.Check):
    def mount(self):
        self.unmount()
        shutil.rmtree(FOLDER, ignore_errors=True)
        MOUNT.mkdir(parents=True)
        (FOLDER / "disk").mkdir()
        command = [sys.executable, os.path.join(os.path.dirname(__file__), "slow_mount.py"), FOLDER / "disk", MOUNT, DELAY]
        with open(FOLDER / "log", "wb") as log:
            mounting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        while not os.path.ismount(MOUNT):
            if mounting.poll() is not None:
                reason = ((FOLDER / "log").read_text().splitlines() or ["it ended"])[-1]
                print(f"SKIPPED: no file system in user space can be mounted here ({reason})")
                sys.exit(77)
            time.sleep(0.1)

    def unmount(self):
        if os.path.ismount(MOUNT):
            umount = ["fusermount3", "-u", "-z"] if shutil.which("fusermount3") else ["umount", "-l"]
            subprocess.run([*umount, str(MOUNT)], check=True)

    def set_delay(self, seconds):
        DELAY.write_text(str(seconds))

    def rounds(self, what, prompts, rounds):
        """Each prompt of each round after one that is computed: the ratios of their times, in order."""
        ratios, before = [], {name: self.counter(name) for name in ("store_disk_read", "store_recomputed", "store_late")}
        for _ in range(rounds):
            self.forget()
            for body in prompts:
                computed = self.ask(body | {"cache_salt": f"{self.chance.getrandbits(64):x}"})
                planned = self.ask(body)
                ratios.append(planned.seconds / computed.seconds)
                self.different += planned.text != computed.text
        # The counters come with a step of the engine.
        time.sleep(1.1)
        self.ask(self.prompt(3, 1))
        counts = ", ".join(f"{name.removeprefix('store_')} {self.counter(name) - value}" for name, value in before.items())
        spread = statistics.quantiles(ratios, n=10)
        print(f"  {what}: first token / computed p50 {statistics.median(ratios):.2f}, p90 {spread[8]:.2f}, most {max(ratios):.2f}; "
              f"{sum(ratios) / len(ratios):.3f} of computed altogether; blocks: {counts}", flush=True)
        return ratios

    def go(self):
        self.mount()
        try:
            self.check()
        finally:
            self.unmount()

    def check(self):
        self.different = 0
        self.set_delay(0)
        self.up("slow-disk")
        prompts = [self.prompt(offload.LONG, 1) for _ in range(self.options.prompts)]
        self.ask_all(prompts)
        self.settle()
        self.rounds("a disk that nobody has measured", prompts, 1)
        fast = self.rounds("a fast disk", prompts, 2)
        self.say(statistics.median(fast) < 0.5, f"from a fast disk the first token comes in {statistics.median(fast):.2f} of computing")
        self.set_delay(self.options.delay)
        became = self.rounds(f"the disk becomes slow, {self.options.delay} s for each read", prompts, 1)
        altogether = sum(became) / len(became)
        self.say(altogether <= 1.5, f"while it became slow first tokens took {altogether:.2f} of computing altogether")
        before = self.counter("store_recomputed")
        slow = self.rounds("a slow disk", prompts, self.options.rounds)
        middle, worst = statistics.median(slow), max(slow)
        self.say(self.counter("store_recomputed") > before, "plans leave blocks on the disk to be computed")
        self.say(middle <= WORTH, f"behind a slow disk the first token takes {middle:.3f} of computing (median of {len(slow)}), "
                                  f"{worst:.2f} at most; while it became slow {max(became):.2f} at most")
        self.set_delay(0)
        engines.wait("the disk to be used again", lambda: statistics.median(self.rounds("fast again", prompts, 1)) < 0.5, 60)
        self.say(True, "a disk that is fast again is used again")
        self.say(self.different == 0, f"{self.different} answers differ from computed ones")
        self.down()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--cores", default="0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--delay", type=float, default=0.2)
    check = Check(parser.parse_args())
    check.go()
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
