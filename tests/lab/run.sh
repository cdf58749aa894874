#!/usr/bin/env bash
# The RDMA lab in one command: builds what is tested, boots a VM with two Soft-RoCE rails and runs suite.sh inside.
#   run.sh [--install] [PACKAGE/TEST…]     tests to run instead of those listed below
# One line per check, a sum, and an exit code that says the same. KVASIR_LAB_ONLY=<regular expression> chooses checks.
# `SKIPPED: reason` and 77 where there is no QEMU and it cannot be had.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")

# What runs in the VM: package/test target. `lib` stands for the package's unit tests.
tests=(dataplane-verbs/rxe dataplane-verbs/software dataplane-verbs/storm)

if [ "${1:-}" = --install ]; then
    "$here/install.sh" || exit $?
    shift
fi
[ $# -eq 0 ] || tests=("$@")

# shellcheck source-path=SCRIPTDIR source=build.sh
. "$here/build.sh"

# A machine that has no VM is told so before it builds anything.
prepared=$("$here/kernel.sh") || { code=$? && echo "$prepared" && exit $code; }
kvasir=$(build_kvasir)
# Not tests of the lab's own: the system tests of hand-offs and of tiers, over RDMA.
system=$(build_test control-node/system)
binaries=()
for test in "${tests[@]}"; do
    binary=$(build_test "$test")
    binaries+=("$binary")
done
"$here/vm.sh" --project "$root" --memory 4096 --timeout $((900 * ${KVASIR_LAB_PATIENCE:-1})) -- \
    env KVASIR="$kvasir" SYSTEM_TESTS="$system" KVASIR_LAB_ONLY="${KVASIR_LAB_ONLY:-}" \
    KVASIR_LAB_PATIENCE="${KVASIR_LAB_PATIENCE:-1}" "$here/suite.sh" "${binaries[@]}"
