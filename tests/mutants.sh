#!/usr/bin/env bash
# Mutation testing: changes crates in one place at a time, and each change must fail a test of its crate. Without a package:
# the election, checksums and hashes of blocks.
# Survivors are listed at the end; what no test can find is in mutants.toml, with its reason.
#
#   tests/mutants.sh [PACKAGE ...]
#   KVASIR_SHARD=0/8 tests/mutants.sh     a part of their mutants: the first of eight
#   KVASIR_MUTANTS_TESTS="--lib --test model"   only these tests: where a crate's slow ones would take the night
#   KVASIR_MUTANTS_OUT=FOLDER             where cargo-mutants leaves what it did (target/mutants.out)
#   KVASIR_MUTANTS_TARGET=FOLDER          where it builds (target/mutants)
set -euo pipefail
cd "$(dirname "$0")/.."
packages=("$@")
files=()
[ ${#packages[@]} -gt 0 ] || files=(control/discovery/src/election.rs 'dataplane/checksum/src/**' 'kvstore/block/src/**')
if ! cargo mutants --version >/dev/null 2>&1; then
    echo "SKIPPED: no cargo-mutants: cargo install --locked cargo-mutants@27.1.0"
    exit 77
fi
arguments=(--config tests/mutants.toml --output "${KVASIR_MUTANTS_OUT:-target}" --no-shuffle --colors never --all-features)
arguments+=(--timeout-multiplier 5 --minimum-test-timeout 20)
[ -z "${KVASIR_SHARD:-}" ] || arguments+=(--shard "$KVASIR_SHARD")
for package in "${packages[@]}"; do arguments+=(--package "$package"); done
for file in "${files[@]}"; do arguments+=(--file "$file"); done
[ ${#files[@]} -eq 0 ] || arguments+=(--workspace)
# shellcheck disable=SC2206 # options of cargo test, split at spaces
[ -z "${KVASIR_MUTANTS_TESTS:-}" ] || arguments+=(-- $KVASIR_MUTANTS_TESTS)
export CARGO_INCREMENTAL=0 CARGO_TARGET_DIR="${KVASIR_MUTANTS_TARGET:-$PWD/target/mutants}"
status=0
cargo mutants "${arguments[@]}" || status=$?
# 2: mutants were missed; 3: tests of some took too long, which counts as found, whatever else was missed.
if [ "$status" -eq 3 ]; then
    status=0
    [ ! -s "${KVASIR_MUTANTS_OUT:-target}/mutants.out/missed.txt" ] || status=2
fi
exit "$status"
