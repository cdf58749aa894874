#!/usr/bin/env bash
# Every interleaving of a reader and the writer of the prefix index, and three broken protocols that must be noticed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=${LOOM_TARGET_DIR:-$PWD/target/loom} \
    cargo test --quiet --release -p router-radix --test loom -- --nocapture 2>&1) || { printf '%s\n' "$out"; exit 1; }
grep -E '^loom:|test result' <<<"$out"
grep -q 'test result: ok. 2 passed' <<<"$out"
