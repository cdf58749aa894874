#!/usr/bin/env bash
# Transfers between two processes of this host by NIXL (UCX) and Mooncake's transfer engine, each beside memcpy in turn, every
# byte of the last batches compared at the target. With a binary of Kvasir its own transports are measured between them.
#   bench/peers/transfer.sh [--smoke] [--json FILE] [--only nixl|mooncake] [--rounds N] [--repeats N] [--timeout SECONDS]
# KVASIR is the binary (default: target/release/kvasir, if it is there).
# PEERS is a folder with a Python environment that has the peers (default: one that this makes). Exit code 77: no wheel could
# be had. Mooncake's usual wheel needs the CUDA libraries to load at all; the one without CUDA is the same release.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
peers=${PEERS:-${TMPDIR:-/tmp}/kvasir-transfer-peers}
made=
if [ ! -x "$peers/bin/python" ]; then
    made=yes
    if ! command -v python3 >/dev/null || ! timeout 120 python3 -m venv "$peers"; then
        echo "SKIPPED: no Python with venv"
        exit 77
    fi
    # --no-deps: NIXL asks for torch (gigabytes), which moving bytes of host memory does not need.
    for wheel in numpy==2.4.6 "--no-deps nixl==1.5.1 nixl-cu12==1.5.1" "mooncake-transfer-engine-non-cuda==0.3.13.post1"; do
        # shellcheck disable=SC2086 # the list is meant to be split
        timeout 600 "$peers/bin/pip" install -q $wheel || echo "SKIPPED: no wheel of ${wheel##* } for this machine"
    done
fi
if ! "$peers/bin/python" -c 'import numpy' 2>/dev/null; then
    echo "SKIPPED: no numpy in $peers"
    # The next run shall try again.
    [ -z "$made" ] || rm -rf "$peers"
    exit 77
fi
kvasir=${KVASIR:-$here/../../target/release/kvasir}
if "$kvasir" bench --help >/dev/null 2>&1; then
    set -- --kvasir "$kvasir" "$@"
else
    echo "SKIPPED: no Kvasir with benchmarks at $kvasir (cargo build --release -p control-node --features bench)"
fi
# Nothing outlives this script: the processes die with their parents, and this one with its time limit.
PYTHONDONTWRITEBYTECODE=1 exec timeout -k 10 "${TRANSFER_TIMEOUT_S:-1800}" "$peers/bin/python" "$here/transfer/compare.py" "$@"
