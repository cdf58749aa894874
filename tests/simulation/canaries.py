#!/usr/bin/env python3
"""Plants the bugs of canaries.toml in a copy of the tree, all in one build, and has the simulator find each of them.

usage: canaries.py [--seeds N] [--record] [NAME ...]

Each canary is switched on by itself (KVASIR_CANARY). The seed that is recorded for it must fail; where none is recorded, or with
--record, seeds are tried in turn, N at most. With none switched on all recorded seeds must pass. --record writes what was found
into canaries.toml.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIST = HERE / "canaries.toml"


def planted(text, canary):
    """The text with the bug in it."""
    count = text.count(canary["find"])
    if count != 1:
        sys.exit(f"canaries.toml: {canary['name']}: its `find` is {count} times in {canary['file']}")
    switch = f'std::env::var_os("KVASIR_CANARY").is_some_and(|name| name == "{canary["name"]}")'
    return text.replace(canary["find"], canary["replace"].replace("CANARY", f"({switch})"))


def copy_tree(tree):
    """The tree as git knows it, and what is new in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    wanted = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        source, target = ROOT / name, tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return wanted


def build(canaries, folder):
    """Builds the simulator with all bugs, each switched off."""
    tree, target = folder / "tree", folder / "target"
    changed = {}
    for canary in canaries:
        text = changed.get(canary["file"]) or (ROOT / canary["file"]).read_text()
        changed[canary["file"]] = planted(text, canary)
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    copy_tree(tree)
    for name, text in changed.items():
        (tree / name).write_text(text)
    usual = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"
    if not target.exists() and usual.exists():
        # What others wrote is built already; files are linked, and cargo replaces those that differ.
        (target / "debug").mkdir(parents=True)
        for part in ("deps", "build", ".fingerprint"):
            subprocess.run(["cp", "-al", usual / part, target / "debug" / part], check=False)
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target), CARGO_INCREMENTAL="0")
    environment.pop("RUSTC_WORKSPACE_WRAPPER", None)
    command = ["cargo", "build", "--quiet", "--locked", "--all-features", "-p", "tests-simulation"]
    built = subprocess.run(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.stderr)
    return target / "debug" / "kvasir-simulation"


def run(binary, name, *arguments):
    """The first failing seed with its reason, or None; and the output."""
    environment = dict(os.environ)
    environment.pop("KVASIR_CANARY", None)
    if name:
        environment["KVASIR_CANARY"] = name
    ran = subprocess.run(
        [binary, *map(str, arguments), "--no-shrink"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    found = re.search(r"^seed (\d+): (.*)$", ran.stdout, re.MULTILINE)
    if not found and ran.returncode != 0:
        sys.exit(f"{binary} has failed:\n{ran.stdout}")
    return (int(found[1]), found[2]) if found else None


def record(seeds):
    text = LIST.read_text()
    for name, seed in seeds.items():
        text = re.sub(rf'(\nname = "{re.escape(name)}"\n)(?:seed = \d+\n)?', rf"\g<1>seed = {seed}\n", text)
    LIST.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--built", action="store_true", help="take the simulator that the last run has built")
    parser.add_argument("--folder", type=Path, default=ROOT / "target" / "canaries")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    canaries = tomllib.loads(LIST.read_text())["canary"]
    unknown = set(options.names) - {canary["name"] for canary in canaries}
    if unknown:
        sys.exit(f"canaries.toml has no {', '.join(sorted(unknown))}")
    began = time.monotonic()
    if options.built:
        binary = options.folder / "target" / "debug" / "kvasir-simulation"
    else:
        binary = build(canaries, options.folder)
        print(f"built with {len(canaries)} bugs in {time.monotonic() - began:.0f} s", flush=True)
    missed, found_at = [], {}
    for canary in canaries:
        name, seed = canary["name"], canary.get("seed")
        if options.names and name not in options.names:
            continue
        found = None
        if seed is not None and not options.record:
            found = run(binary, name, "--first", seed, "--seeds", 1)
        began = time.monotonic()
        if found is None:
            found = run(binary, name, "--first", 1, "--seeds", options.seeds)
        if found is None:
            missed.append(name)
            print(f"MISSED  {name}: {options.seeds} seeds in {time.monotonic() - began:.0f} s", flush=True)
        else:
            found_at[name] = found[0]
            print(f"found   {name}: seed {found[0]}, {found[1][:150]}", flush=True)
    for name, seed in found_at.items():
        if run(binary, None, "--first", seed, "--seeds", 1):
            sys.exit(f"seed {seed}, by which {name} is found, fails without it")
    if options.record:
        record(found_at)
    print(f"{len(found_at)} bugs found, {len(missed)} missed; without them all their seeds pass")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
