#!/usr/bin/env bash
# Every interleaving of the lock-free protocols: the prefix index, the doorbell of shared memory, the
# catalog of blocks; beside each, broken versions that must be noticed.
set -euo pipefail
cd "$(dirname "$0")/.."
for crate in router-radix:2 dataplane-shm:2 kvstore-catalog:5; do
    name=${crate%:*} tests=${crate#*:}
    out=$(RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=${LOOM_TARGET_DIR:-$PWD/target/loom} \
        cargo test --quiet --release -p "$name" --test loom -- --nocapture 2>&1) || { printf '%s\n' "$out"; exit 1; }
    grep -E '^loom:' <<<"$out" || true
    grep -q "test result: ok. $tests passed" <<<"$out" || { printf '%s\n' "$out"; exit 1; }
    echo "loom: $name: $tests models, as expected"
done
