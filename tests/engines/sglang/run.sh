#!/usr/bin/env bash
# Kvasir's gateway in front of real SGLang servers on the CPU: run.sh [aggregated|ranks|hicache|storage|disaggregation …]
# Installs SGLang if it is not there, builds Kvasir, and runs check.py: all of it takes about 15 minutes on two cores.
# LAB is the folder for SGLang (6 GB) and the logs, LIMIT the most seconds that the checks may take.
# `SKIPPED: reason` and 77 where SGLang cannot be had.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$here/../../..
export LAB=${LAB:-${TMPDIR:-/tmp}/kvasir-sglang}
bash "$here/install.sh"
[ -e "$LAB/installed" ] || exit 77
[ -n "${KVASIR:-}" ] || (cd "$root" && cargo build --release -p control-node)
KVASIR=$(readlink -f "${KVASIR:-${CARGO_TARGET_DIR:-$root/target}/release/kvasir}")
export KVASIR
if [ $# -eq 0 ] || [[ " $* " == *" storage "* ]]; then
    [ -n "${KVASIR_KV_LIBRARY:-}" ] || (cd "$root" && cargo build --profile capi -p kvstore-capi)
    KVASIR_KV_LIBRARY=$(readlink -f "${KVASIR_KV_LIBRARY:-${CARGO_TARGET_DIR:-$root/target}/capi/libkvasir_kv.so}")
    export KVASIR_KV_LIBRARY
fi
exec timeout --foreground -k 60 "${LIMIT:-1800}" "$LAB/venv/bin/python" -u "$here/check.py" "$@"
