#!/usr/bin/env bash
# The suite over two VMs whose wire loses packets: loss.sh [PERCENT]. A check is one `pair` line in guest/loss.sh.
# Builds what it runs; KVASIR_LAB_ONLY=<regular expression> chooses checks.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source-path=SCRIPTDIR source=build.sh
. "$here/build.sh"
prepared=$("$here/kernel.sh") || { code=$? && echo "$prepared" && exit $code; }
kvasir=$(build_kvasir)
rxe=$(build_test dataplane-verbs/rxe)
suite="KVASIR=$(printf %q "$kvasir") RXE_TEST=$(printf %q "$rxe") KVASIR_LAB_ONLY=$(printf %q "${KVASIR_LAB_ONLY:-}") $(printf %q "$here")/guest/loss.sh"
"$here/two.sh" --loss "${1:-2}" --timeout 420 -- "$suite server" "$suite client"
