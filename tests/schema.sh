#!/usr/bin/env bash
# Holds the gateway against its own OpenAPI document: schemathesis makes requests from it, good and bad, and checks the answers.
#   tests/schema.sh [examples for each operation]
# Needs `schemathesis` on the path or in VENV. KVASIR is a binary that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
examples=${1:-30}
schemathesis=${VENV:+$VENV/bin/}schemathesis
source tests/gateways.bash
mock=$(port) gateway=$(port)
"$kvasir" mock --listen "127.0.0.1:$mock" --model-folder tests/fixtures/golden/llama >"$scratch/mock.log" &
started+=($!)
printf '[gateway]\nmodel_folder = "tests/fixtures/golden/llama"\n[database]\nfile = "%s"\n' "$scratch/documents.redb" >"$scratch/kvasir.toml"
"$kvasir" gateway --listen "127.0.0.1:$gateway" --worker "http://127.0.0.1:$mock" --config "$scratch/kvasir.toml" &
started+=($!)
healthy "${started[-1]}" "$gateway"
# What a request may hold is the engine's to say: whether it takes what the document allows and refuses what it does not is
# no promise of the gateway.
"$schemathesis" run "http://127.0.0.1:$gateway/openapi.json" --max-examples "$examples" --generation-deterministic --no-color \
    --exclude-checks positive_data_acceptance,negative_data_rejection
