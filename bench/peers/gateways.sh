#!/usr/bin/env bash
# Gateways beside each other in one run: the same mock engines behind vllm-router, sglang-router, smg and Kvasir, and the
# engines alone. What cannot be installed is skipped, loudly.
#   bench/peers/gateways.sh [options of `kvasir bench gateway`]
# PEERS is a folder with a Python environment that has the peers (default: one that this makes).
set -euo pipefail
cd "$(dirname "$0")/../.."
peers=${PEERS:-${TMPDIR:-/tmp}/kvasir-gateway-peers}
kvasir=${KVASIR:-target/release/kvasir}
# A build of `serve` alone has no benchmarks.
"$kvasir" bench --help >/dev/null 2>&1 || cargo build --release --quiet -p control-node --features bench
if [ ! -x "$peers/bin/python" ]; then
    python3 -m venv "$peers"
    for wheel in vllm-router sglang-router smg; do
        "$peers/bin/pip" install -q "$wheel" || echo "SKIPPED: no wheel of $wheel for this machine"
    done
fi
scratch=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
start() { # NAME PORT COMMAND...: waits until it answers
    local name=$1 port=$2
    shift 2
    "$@" >"$scratch/$name.log" 2>&1 &
    started+=($!)
    for _ in $(seq 100); do
        if curl -sf -m 5 -o /dev/null "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' \
            -d '{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":1}'; then
            return 0
        fi
        sleep 0.2
    done
    echo "$name does not answer:"; tail -5 "$scratch/$name.log"
    return 1
}
folder=tests/fixtures/golden/llama
start mock 9400 "$kvasir" mock --workers 2 --listen 127.0.0.1:9400 --model-folder "$folder" \
    --context-tokens 1000000 --blocks 100000
workers="http://127.0.0.1:9400 http://127.0.0.1:9401"
sides=(--side "direct=127.0.0.1:9400")
printf '[gateway]\nmodel_folder = "%s"\n' "$folder" >"$scratch/tokens.toml"
start kvasir 9410 "$kvasir" gateway --listen 127.0.0.1:9410 --worker "${workers% *}" --worker "${workers#* }"
sides+=(--side "kvasir=127.0.0.1:9410@${started[-1]}")
start kvasir-tokens 9411 "$kvasir" gateway --listen 127.0.0.1:9411 --worker "${workers% *}" --worker "${workers#* }" --config "$scratch/tokens.toml"
sides+=(--side "kvasir-tokens=127.0.0.1:9411@${started[-1]}")
port=9420
for peer in "vllm-router" "sglang-router launch" "smg launch"; do
    name=${peer%% *}
    if [ ! -x "$peers/bin/$name" ]; then
        echo "SKIPPED: $name is not installed"
        continue
    fi
    # shellcheck disable=SC2086 # both lists are meant to be split
    if start "$name" "$port" "$peers/bin/"$peer --host 127.0.0.1 --port "$port" --worker-urls $workers \
        --policy cache_aware --log-level error --prometheus-port $((port + 100)); then
        sides+=(--side "$name=127.0.0.1:$port@${started[-1]}")
    fi
    port=$((port + 1))
done
"$kvasir" bench gateway "${sides[@]}" "$@"
