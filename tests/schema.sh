#!/usr/bin/env bash
# Holds the gateway against its own OpenAPI document: schemathesis makes requests from it, good and bad, and checks the answers.
#   tests/schema.sh [examples for each operation]
# Needs `schemathesis` on the path or in VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
examples=${1:-30}
schemathesis=${VENV:+$VENV/bin/}schemathesis
cargo build --quiet -p control-node
kvasir=${CARGO_TARGET_DIR:-target}/debug/kvasir
scratch=$(mktemp -d)
# A left-over gateway on one of the ports would be tested in place of this one.
port() { "${python:-python3}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
healthy() { # PID PORT: waits until the gateway answers, for as long as it lives
    for _ in $(seq 300); do
        if curl -sf -o /dev/null "http://127.0.0.1:$2/health"; then return 0; fi
        kill -0 "$1" || return 1
        sleep 0.1
    done
    echo "the gateway does not answer"; return 1
}
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
mock=$(port) gateway=$(port)
"$kvasir" mock --listen "127.0.0.1:$mock" --model-folder tests/fixtures/golden/llama >"$scratch/mock.log" &
started+=($!)
printf '[gateway]\nmodel_folder = "tests/fixtures/golden/llama"\n' >"$scratch/kvasir.toml"
"$kvasir" gateway --listen "127.0.0.1:$gateway" --worker "http://127.0.0.1:$mock" --config "$scratch/kvasir.toml" &
started+=($!)
healthy "${started[-1]}" "$gateway"
# What a request may hold is the engine's to say: whether it takes what the document allows and refuses what it does not is
# no promise of the gateway.
"$schemathesis" run "http://127.0.0.1:$gateway/openapi.json" --max-examples "$examples" --generation-deterministic --no-color \
    --exclude-checks positive_data_acceptance,negative_data_rejection
