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
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
"$kvasir" mock --listen 127.0.0.1:9480 --model-folder tests/fixtures/golden/llama >"$scratch/mock.log" &
started+=($!)
printf '[gateway]\nmodel_folder = "tests/fixtures/golden/llama"\n' >"$scratch/kvasir.toml"
"$kvasir" gateway --listen 127.0.0.1:9481 --worker http://127.0.0.1:9480 --config "$scratch/kvasir.toml" &
started+=($!)
until curl -sf -o /dev/null http://127.0.0.1:9481/health; do sleep 0.1; done
# What a request may hold is the engine's to say: whether it takes what the document allows and refuses what it does not is
# no promise of the gateway.
"$schemathesis" run http://127.0.0.1:9481/openapi.json --max-examples "$examples" --generation-deterministic --no-color \
    --exclude-checks positive_data_acceptance,negative_data_rejection
