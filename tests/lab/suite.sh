#!/usr/bin/env bash
# The RDMA suite, run inside a lab VM by run.sh: suite.sh [TEST_BINARY…]
# Two Soft-RoCE rails, rxe0 and rxe1, then one line per check: `ok:`, `FAILED:` or `skipped:`, and a sum. A check is one
# `step` line below. KVASIR is the binary under test, KVASIR_LAB_ONLY chooses checks by name.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source-path=SCRIPTDIR source=guest/rails.sh
. "$here/guest/rails.sh"
# shellcheck source-path=SCRIPTDIR source=guest/steps.sh
. "$here/guest/steps.sh"
# shellcheck source-path=SCRIPTDIR source=guest/perftest.sh
. "$here/guest/perftest.sh"

two_rails
[ -n "$(gid_index rxe0)" ] && [ -n "$(gid_index rxe1)" ]

both_rails_are_active() {
    ibv_devinfo | grep -c PORT_ACTIVE
    [ "$(ibv_devinfo | grep -c PORT_ACTIVE)" = 2 ]
}

test_binary() { # its path
    local output
    output=$(mktemp)
    # One test at a time: the VM has two slow cores, and the tests measure time bounds.
    "$1" --test-threads=1 --nocapture 2>&1 | tee "$output" || return
    # The lab has all that a test may ask for: one that skips itself has not been run.
    ! grep -o 'SKIPPED.*' "$output" || return
    grep '^test result' "$output"
}

step "two rails are active" 10 both_rails_are_active
step "ib_write_lat, 64 bytes" 30 perftest ib_write_lat rxe0 -s 64 -n 1000
step "ib_write_bw, 64 KiB" 30 perftest ib_write_bw rxe0 -s 65536 -n 500
step "ib_read_bw, 64 KiB" 30 perftest ib_read_bw rxe0 -s 65536 -n 500
step "ib_write_bw on the second rail" 30 perftest ib_write_bw rxe1 -s 65536 -n 200
if [ -n "${KVASIR:-}" ]; then
    step "kvasir doctor" 30 "$KVASIR" doctor
fi
for binary in "$@"; do
    step "tests of $(basename "${binary%-*}")" 120 test_binary "$binary"
done
summary
