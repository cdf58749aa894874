#!/usr/bin/env bash
# Builds a fuzz target with stable Rust and runs it a bounded number of times: run.sh [target] [runs] [seconds].
# `all` in place of a target builds and runs every one, as many at a time as there are processors.
# Needs a C++ compiler for libFuzzer. Prints how many inputs were tried; fails on a crash, keeping the input.
set -euo pipefail
cd "$(dirname "$0")"
target=${1:-kv_events} runs=${2:-1000000} seconds=${3:-120}
triple=$(rustc -vV | sed -n 's/^host: //p')
dir=${FUZZ_TARGET_DIR:-$PWD/../../target/fuzz}
mkdir -p "$dir/artifacts"
log=$dir/$target.log

sancov=-Cllvm-args=-sanitizer-coverage
export RUSTFLAGS="--cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module $sancov-level=4 \
$sancov-inline-8bit-counters $sancov-pc-table $sancov-trace-compares -Cllvm-args=-max-loads-per-memcmp=0 ${EXTRA:-}"
build() { # which binaries
    # --target keeps the flags away from build scripts, which could not link with them.
    CARGO_TARGET_DIR=$dir cargo build --quiet --locked --release --target "$triple" "$@"
}
if [ "$target" = all ]; then
    build --bins
    # A file of targets/ that Cargo.toml does not name fails here.
    printf '%s\n' targets/*.rs | sed 's/.*\///; s/\.rs$//' | xargs -P "$(nproc)" -I TARGET "./$(basename "$0")" TARGET "$runs" "$seconds"
    exit
fi
build --bin "$target"

corpus=$(mktemp -d)
trap 'rm -rf "$corpus"' EXIT
# Seeds: payloads made by each engine release's own encoder.
if [ "$target" = kv_events ]; then
    sed -n 's/.*"payload_hex": *"\([0-9a-f]*\)".*/\1/p' ../fixtures/engine-captures/kv-events-by-release.jsonl |
        while read -r hex; do
            printf '%b' "$(sed 's/../\\x&/g' <<<"$hex")" >"$corpus/$(cksum <<<"$hex" | cut -d' ' -f1)"
        done
fi
rc=0
"$dir/$triple/release/$target" -runs="$runs" -max_total_time="$seconds" -seed=1 -max_len=4096 -timeout=10 \
    -rss_limit_mb=2048 -artifact_prefix="$dir/artifacts/" -print_final_stats=1 "$corpus" >"$log" 2>&1 || rc=$?
grep -E 'INITED|DONE' "$log" || true
if [ "$rc" -ne 0 ]; then
    grep -A2 panicked "$log" || tail -20 "$log"
    echo "fuzz $target: failed ($rc); the input is in $dir/artifacts" >&2
    exit 1
fi
grep -q 'INITED cov:' "$log" || { echo "fuzz $target: not instrumented" >&2; exit 1; }
echo "fuzz $target: $(sed -n 's/.*number_of_executed_units: *//p' "$log") inputs, no crash"
