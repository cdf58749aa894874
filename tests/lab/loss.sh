#!/usr/bin/env bash
# The suite over two VMs whose wire loses packets: loss.sh [PERCENT]. A check is one `pair` line in guest/loss.sh.
# Takes KVASIR, the binary under test, and KVASIR_LAB_ONLY from the environment.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
suite="KVASIR=$(printf %q "${KVASIR:-}") KVASIR_LAB_ONLY=$(printf %q "${KVASIR_LAB_ONLY:-}") $(printf %q "$here")/guest/loss.sh"
"$here/two.sh" --loss "${1:-2}" --timeout 300 -- "$suite server" "$suite client"
