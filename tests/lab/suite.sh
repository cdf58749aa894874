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
    # One test at a time: the VM has two slow cores, and the tests measure time bounds. Two machines are loss.sh's.
    RXE_NETDEV=dummy0 "$1" --test-threads=1 --nocapture --skip two_machines 2>&1 | tee "$output" || return
    # The lab has all that a test may ask for: one that skips itself has not been run.
    ! grep -o 'SKIPPED.*' "$output" || return
    grep '^test result' "$output"
}

# In a cgroup that allows few RDMA objects: the 81st is refused, with a clear error, and everything is given back.
queue_pairs_run_out() { # the test binary
    mkdir -p /run/cgroup
    mount -t cgroup2 cgroup /run/cgroup
    echo +rdma >/run/cgroup/cgroup.subtree_control
    mkdir -p /run/cgroup/few
    echo "rxe0 hca_handle=100 hca_object=80" >/run/cgroup/few/rdma.max
    (echo "$BASHPID" >/run/cgroup/few/cgroup.procs && "$1" --test-threads=1 --nocapture run_out)
    if grep 'hca_object=[1-9]' /run/cgroup/few/rdma.current; then return 1; fi
    echo "queue pairs ran out at 80 objects; none is left"
}

# Random transfers, cancellations and deadlines between processes, every byte compared.
soak() { # seconds, the transports of each peer, seconds that a peer lives before it is killed
    "$KVASIR" bench transfer-soak --seconds "$1" --peers "$2" --life "$3"
}

# Receivers count markers for events whose writes both rails carry.
soak_over_two_rails() {
    soak 15 'rdma:rxe0,rdma:rxe1;rdma:rxe0' 4 | tee /run/soak
    sed -n '/^hand-offs/p' /run/soak | tail -n 1
    grep '^links:.* [1-9][0-9]* markers counted' /run/soak
}

links_failed() { # the soak's output; how many links were lost while their peer went on, at least
    local count
    count=$(sed -n 's/^links: \([0-9]*\) failed.*/\1/p' "$1")
    [ "${count:-0}" -ge "$2" ]
}

# Three times the second rail's link goes down and comes up again.
soak_while_a_link_flaps() {
    (for _ in 1 2 3; do sleep 5 && ip link set dummy1 down && sleep 2 && ip link set dummy1 up; done) &
    soak 24 'rdma:rxe0,rdma:rxe1' 600 | tee /run/soak
    wait
    links_failed /run/soak 2 && sed -n '/^links/p' /run/soak && sed -n '/^hand-offs/p' /run/soak | tail -n 1
}

packets_sent() { # the rail's device
    cat "/sys/class/infiniband/$1/ports/1/hw_counters/sent_pkts"
}

# The second rail's interface is deleted in the middle, with everything that was under way on it: not before the peers use
# it, however slowly this machine starts them.
soak_while_a_rail_is_torn_out() {
    local before
    before=$(packets_sent rxe1)
    (
        for _ in $(seq 120); do
            [ "$(packets_sent rxe1)" -lt $((before + 100)) ] || break
            sleep 0.5
        done
        sleep 1 && ip link delete dummy1
    ) &
    # Long enough for a slow machine to notice the loss: a lost rail is given up after its retries.
    soak 24 'rdma:rxe0,rdma:rxe1' 600 | tee /run/soak
    wait
    ip link add dummy1 type dummy
    rail 1 dummy1 10.77.1.1/24
    links_failed /run/soak 1 && sed -n '/^links/p' /run/soak && sed -n '/^hand-offs/p' /run/soak | tail -n 1
}

# Prefill and decode workers whose only transport is RDMA give the same tokens and log-probabilities as one worker that
# does both; also when blocks are damaged on the way.
hand_offs_over_rdma() {
    KVASIR_TEST_TRANSPORTS=rdma KVASIR_TEST_LENGTHS=15,17,33,100,257,400 \
        "$SYSTEM_TESTS" --test-threads=1 --nocapture disaggregation::output_does_not_depend 2>&1 | tee /run/handoffs
    grep -q 'test result: ok. 1 passed' /run/handoffs && grep -o 'rdma: .*' /run/handoffs | tail -n 1
}

# A killed worker gets its blocks back from the memory of a store node, read over RDMA.
blocks_of_another_node_over_rdma() {
    KVASIR_TEST_TRANSPORTS=rdma "$SYSTEM_TESTS" --test-threads=1 --nocapture tiers::another_nodes_memory 2>&1 | tee /run/tiers
    grep -q 'test result: ok. 1 passed' /run/tiers && grep -o 'rdma: .*' /run/tiers | tail -n 1
}

beside_perftest() { # bench transfer's options
    "$KVASIR" bench transfer --transport rdma --devices rxe0 --gid-index "$(gid_index rxe0)" --against perftest \
        --rounds 3 --warmup 4 "$@"
}

step "two rails are active" 10 both_rails_are_active
step "ib_write_lat, 64 bytes" 30 perftest ib_write_lat rxe0 -s 64 -n 1000
step "ib_write_bw, 64 KiB" 30 perftest ib_write_bw rxe0 -s 65536 -n 500
step "ib_read_bw, 64 KiB" 30 perftest ib_read_bw rxe0 -s 65536 -n 500
step "ib_write_bw on the second rail" 30 perftest ib_write_bw rxe1 -s 65536 -n 200
if [ -n "${KVASIR:-}" ]; then
    step "kvasir doctor" 30 "$KVASIR" doctor
    step "random transfers and killed peers over one rail" 60 soak 15 'rdma:rxe0;rdma:rxe0' 4
    step "random transfers and killed peers over two rails" 60 soak_over_two_rails
    step "a link goes down and up under random transfers" 90 soak_while_a_link_flaps
    step "a rail is torn out under random transfers" 90 soak_while_a_rail_is_torn_out
    step "kvasir bench transfer beside ib_write_bw" 120 beside_perftest --test bw --op write --sizes 64K --iterations 20
    step "kvasir bench transfer beside ib_write_lat" 120 beside_perftest --test lat --op write --sizes 64 --iterations 500
    step "kvasir bench transfer beside ib_read_bw" 120 beside_perftest --test bw --op read --sizes 64K --iterations 20
fi
if [ -n "${SYSTEM_TESTS:-}" ]; then
    step "hand-offs of a model's blocks over RDMA" 400 hand_offs_over_rdma
    step "blocks of another node over RDMA" 400 blocks_of_another_node_over_rdma
fi
for binary in "$@"; do
    step "tests of $(basename "${binary%-*}")" 120 test_binary "$binary"
    [[ $binary != */rxe-* ]] || step "queue pairs run out" 60 queue_pairs_run_out "$binary"
done
summary
