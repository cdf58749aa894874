#!/usr/bin/env bash
# The gateway's own page in headless Chromium: first before a made-up gateway that behaves badly, then before a real one
# with mock engines, open and closed.
#   tests/page/run.sh [screenshot.png]
# Needs Chromium with chromedriver, and selenium for python3 (on the path or in VENV). KVASIR is a binary that is built already.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${VENV:+$VENV/bin/}python3
screenshot=${1:+--screenshot $1}
source tests/gateways.bash

if [ -z "${SKIP_STUB:-}" ]; then "$python" tests/page/page_test.py --stub --page router/gateway/src/page; fi

workers=()
for _ in 1 2 3; do
    port=$(port)
    workers+=(--worker "http://127.0.0.1:$port")
    "$kvasir" mock --listen "127.0.0.1:$port" --step-ms 4 --model-folder tests/fixtures/golden/llama >>"$scratch/mock.log" &
    started+=($!)
done
key=$("$kvasir" key new boss --admin 2>"$scratch/key.txt")
sed -n '/^\[\[key\]\]/,$p' "$scratch/key.txt" >"$scratch/keys.toml"
printf '[planner]\ninterval = "300ms"\n' >"$scratch/planner.toml"
for kind in open closed; do
    {
        printf '[gateway]\nmodel_folder = "tests/fixtures/golden/llama"\n'
        if [ "$kind" = closed ]; then printf '[access]\nkeys_file = "%s"\n' "$scratch/keys.toml"; fi
    } >"$scratch/$kind.toml"
    port=$(port)
    "$kvasir" gateway --listen "127.0.0.1:$port" --config "$scratch/$kind.toml" "${workers[@]}" &
    gateway=$!
    started+=("$gateway")
    healthy "$gateway" "$port"
    if [ "$kind" = closed ]; then flags=(--key "$key"); else flags=(); fi
    KVASIR_KEY=$key "$kvasir" control --gateway "127.0.0.1:$port" --config "$scratch/planner.toml" >>"$scratch/control.log" 2>&1 &
    control=$!
    started+=("$control")
    for _ in $(seq 50); do
        if KVASIR_KEY=$key "$kvasir" plan explain "127.0.0.1:$port" >"$scratch/plan.txt" 2>&1; then break; fi
        sleep 0.2
    done
    grep -q ready "$scratch/plan.txt" || { cat "$scratch/plan.txt" "$scratch/control.log"; exit 1; }
    # shellcheck disable=SC2086
    "$python" tests/page/page_test.py "http://127.0.0.1:$port" "${flags[@]}" $screenshot
    kill "$control" "$gateway"
    wait "$gateway" "$control" 2>/dev/null || true
done
