#!/usr/bin/env python3
"""Plants the bugs of canaries.toml in a copy of the tree, all in one build, and has the simulator find each of them.

Each canary is switched on by itself (KVASIR_CANARY). The plan that is saved for it, plans/NAME.json, must fail then by the oracle that
canaries.toml names, with its own seed or, since any change of the product changes the times of packets and the order of threads, with another one: up to --variants
are tried. What fails must pass without the bug. Where there is no plan, seeds are tried in turn. --record saves the variant, or the
plan of the first seed that fails, shrunk. Each oracle must have a canary.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

# Runs of one call of the simulator, of which all failures are taken.
BATCH = 50
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIST = HERE / "canaries.toml"
PLANS = HERE / "plans"
# The oracles of src/oracle.rs, without `simulator`.
ORACLES = (
    "tokens", "one end", "service", "drain", "tenants", "scaling", "progress", "rest", "index", "bounds", "alive"
)


def planted(text, canary):
    """The text with the bug in it."""
    count = text.count(canary["find"])
    if count != 1:
        sys.exit(f"canaries.toml: {canary['name']}: its `find` must occur once in {canary['file']}, and occurs {count} times")
    switch = f'std::env::var_os("KVASIR_CANARY").is_some_and(|name| name == "{canary["name"]}")'
    return text.replace(canary["find"], canary["replace"].replace("CANARY", f"({switch})"))


def copy_tree(tree, changed):
    """Makes the copy equal to the tree as git knows it, with what is new in it and what is changed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    wanted = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        target, content = tree / name, changed.get(name) or (ROOT / name).read_bytes()
        # What is equal keeps its time, and need not be built again.
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    for file in tree.rglob("*"):
        if file.is_file() and str(file.relative_to(tree)) not in wanted:
            file.unlink()


def take_built(usual, debug):
    """Takes over what is built already. Libraries are linked, since rustc replaces them as files of a new inode; records of cargo and
    of build scripts are written in place, so that a link would change those of the usual folder as well: they are copied."""
    (debug / "deps").mkdir(parents=True)
    take = os.link if usual.stat().st_dev == debug.stat().st_dev else shutil.copy2
    for part in ("build", ".fingerprint"):
        subprocess.run(["cp", "-a", usual / part, debug / part], check=False)
    for file in (usual / "deps").iterdir():
        if file.suffix in (".rlib", ".rmeta", ".so"):
            take(file, debug / "deps" / file.name)
        elif file.suffix == ".d":
            shutil.copy2(file, debug / "deps" / file.name)


def build(canaries, folder):
    """Builds the simulator with all bugs, each switched off."""
    tree, target = folder / "tree", folder / "target"
    if not target.exists():
        # The planted sources must be newer than the records of cargo that are copied.
        shutil.rmtree(tree, ignore_errors=True)
    changed = {}
    for canary in canaries:
        text = changed.get(canary["file"]) or (ROOT / canary["file"]).read_text()
        changed[canary["file"]] = planted(text, canary)
    copy_tree(tree, {name: text.encode() for name, text in changed.items()})
    usual = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"
    if not target.exists() and usual.exists():
        take_built(usual, target / "debug")
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target), CARGO_INCREMENTAL="0")
    environment.pop("RUSTC_WORKSPACE_WRAPPER", None)
    command = ["cargo", "build", "--quiet", "--locked", "--all-features", "-p", "tests-simulation"]
    built = subprocess.run(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.stderr)
    return target / "debug" / "kvasir-simulation"


def run(binary, name, *arguments):
    """The failures in the order in which they were found, each with its seed, its oracle and its reason."""
    environment = dict(os.environ, KVASIR_CANARY=name)
    command = [binary, *map(str, arguments)]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = re.findall(r"^seed (\d+): \[(.*?)\] (.*)$", ran.stdout, re.MULTILINE)
    for seed, oracle, reason in found:
        if oracle in ("hung", "simulator"):
            sys.exit(f"{name or 'without a bug'}: seed {seed}: [{oracle}] {reason}")
    if not found and ran.returncode != 0:
        command = " ".join(map(str, command))
        sys.exit(f"{name or 'without a bug'}: {command} exited with {ran.returncode}:\n{ran.stdout}{ran.stderr[-4000:]}")
    return [(int(seed), oracle, reason) for seed, oracle, reason in found]


def find(binary, canary, *arguments):
    """The first failure by the canary's oracle, or None; and the first one by another oracle, or None."""
    failures = run(binary, canary["name"], *arguments, "--keep-going")
    right = [failure for failure in failures if failure[1] == canary["oracle"]]
    wrong = [failure for failure in failures if failure[1] != canary["oracle"]]
    return (right[0] if right else None), (wrong[0] if wrong else None)


def check_sound(binary, name, *arguments):
    """What fails with the bug must pass without it."""
    failures = run(binary, "", *arguments, "--keep-going")
    if failures:
        seed, oracle, reason = failures[0]
        sys.exit(f"{name}: {' '.join(map(str, arguments))} fails without the bug, too: seed {seed}: [{oracle}] {reason}")


def vary(binary, canary, variants, saves):
    """Tries the plan of a canary with other seeds: the same steps at the same times, other delays, turns and errors of disks."""
    name = canary["name"]
    plan, wrong = PLANS / f"{name}.json", None
    with tempfile.TemporaryDirectory() as folder:
        for first in range(1, variants + 1, BATCH):
            part = Path(folder) / str(first)
            part.mkdir()
            for seed in range(first, min(first + BATCH, variants + 1)):
                text = json.dumps(json.loads(plan.read_text()) | {"seed": seed})
                (part / f"{seed:05}.json").write_text(text)
            found, other = find(binary, canary, "--plans", part)
            wrong = wrong or other
            if found:
                variant = part / f"{found[0]:05}.json"
                check_sound(binary, name, "--plans", variant)
                if saves:
                    plan.write_text(json.dumps(json.loads(variant.read_text()), indent=2, ensure_ascii=False))
                return found, wrong
    return None, wrong


def search(binary, canary, seeds, saves):
    """Tries seeds in turn, from 1 on."""
    name, wrong = canary["name"], None
    for first in range(1, seeds + 1, BATCH):
        found, other = find(binary, canary, "--first", first, "--seeds", min(BATCH, seeds + 1 - first))
        wrong = wrong or other
        if not found:
            continue
        seed = ("--first", found[0], "--seeds", 1)
        check_sound(binary, name, *seed)
        if saves:
            with tempfile.TemporaryDirectory() as folder:
                shrunk = Path(folder) / "plan.json"
                run(binary, name, *seed, "--save", shrunk)
                check_sound(binary, name, "--plans", shrunk)
                if not find(binary, canary, "--plans", shrunk)[0]:
                    sys.exit(f"{name}: the shrunk plan of seed {found[0]} fails by another oracle")
                shutil.copy(shrunk, PLANS / f"{name}.json")
        return found, wrong
    return None, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds are tried at most")
    parser.add_argument("--variants", type=int, default=300, help="with how many seeds a plan is tried that finds nothing with its own")
    parser.add_argument("--record", action="store_true", help="search for those that no plan finds, and save their plans")
    parser.add_argument("--built", action="store_true", help="take the simulator that the last run has built")
    parser.add_argument("--folder", type=Path, default=ROOT / "target" / "canaries", help="where it is built")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    canaries = tomllib.loads(LIST.read_text())["canary"]
    unknown = set(options.names) - {canary["name"] for canary in canaries}
    if unknown:
        sys.exit(f"canaries.toml has no {', '.join(sorted(unknown))}")
    unwatched = set(ORACLES) - {canary["oracle"] for canary in canaries}
    if unwatched:
        sys.exit(f"canaries.toml has no canary for {', '.join(sorted(unwatched))}")
    began = time.monotonic()
    if options.built:
        binary = options.folder / "target" / "debug" / "kvasir-simulation"
    else:
        binary = build(canaries, options.folder)
        print(f"built with {len(canaries)} bugs in {time.monotonic() - began:.0f} s", flush=True)
    found, missed = 0, []
    for canary in canaries:
        name = canary["name"]
        if options.names and name not in options.names:
            continue
        began, plan = time.monotonic(), PLANS / f"{name}.json"
        failure, wrong, how = None, None, "by its plan"
        if plan.exists():
            failure, wrong = find(binary, canary, "--plans", plan)
            if failure:
                check_sound(binary, name, "--plans", plan)
        if failure is None and plan.exists():
            failure, other = vary(binary, canary, options.variants, options.record)
            wrong = wrong or other
            how = f"by its plan with seed {failure[0]}" if failure else ""
        if failure is None and (options.record or not plan.exists()):
            failure, other = search(binary, canary, options.seeds, options.record)
            wrong = wrong or other
            how = f"by seed {failure[0]}, the first that fails by its oracle" if failure else ""
        if failure is None:
            missed.append(name)
            print(f"MISSED  {name} ({time.monotonic() - began:.0f} s): {canary['what']}", flush=True)
            if wrong:
                print(f"        [{canary['oracle']}] did not find it; [{wrong[1]}] did: {wrong[2][:120]}", flush=True)
            else:
                print("        try --record; if that finds nothing either, its oracle is lost", flush=True)
        else:
            found += 1
            print(f"found   {name} {how}: [{failure[1]}] {failure[2][:120]}", flush=True)
    print(f"{found} planted bugs found, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
