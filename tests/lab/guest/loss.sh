#!/usr/bin/env bash
# Both sides of the suite over a wire that loses packets, each in its VM: loss.sh server|client
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source-path=SCRIPTDIR source=rails.sh
. "$here/rails.sh"
# shellcheck source-path=SCRIPTDIR source=steps.sh
. "$here/steps.sh"
# shellcheck source-path=SCRIPTDIR source=perftest.sh
. "$here/perftest.sh"
role=$1 server=10.77.0.1 pairs=0
gid=$(gid_index rxe0)

# Runs one check on both sides; the client's starts when the server's listens.
pair() { # its name, its limit in seconds, the server's command, the client's
    pairs=$((pairs + 1))
    if [ "$role" = server ]; then
        step "$1" "$2" serve "$3"
    else
        step "$1" "$2" connect "$4"
    fi
}

serve() { # the command
    local job
    eval "$1" &
    job=$!
    until ss -Hltn | grep -q . || ! kill -0 $job 2>/dev/null; do sleep 0.1; done
    touch "$KVASIR_LAB_MEET/listens-$pairs"
    wait $job
}

connect() { # the command
    until [ -e "$KVASIR_LAB_MEET/listens-$pairs" ]; do sleep 0.1; done
    eval "$1"
}

measure() { # the program, its options
    local output
    output=$("$@" "$server") || { echo "$output" && return 1; }
    perftest_result "$1" <<<"$output"
}

# A wire that lost nothing would prove nothing. Timeouts also happen where nothing is lost, when the emulator is slow; a
# gap that the other side complained about does not.
packets_were_lost() {
    local gaps
    gaps=$(counter rxe0 rcvd_seq_err)
    echo "the server reported $gaps gaps"
    [ "$gaps" -gt 0 ]
}

perftest="-d rxe0 -x $gid -F"
pair "ib_write_bw with loss" 60 "ib_write_bw $perftest -n 300" "measure ib_write_bw $perftest -n 300"
pair "ib_read_bw with loss" 60 "ib_read_bw $perftest -n 100" "measure ib_read_bw $perftest -n 100"
pair "ib_write_lat with loss" 60 "ib_write_lat $perftest -n 300" "measure ib_write_lat $perftest -n 300"
if [ -n "${RXE_TEST:-}" ]; then
    # Writes with immediates, messages and reads in both directions, every byte compared.
    pair "random traffic with loss" 120 \
        "RXE_LISTEN=$server:7500 $RXE_TEST --test-threads=1 --nocapture two_machines" \
        "RXE_CONNECT=$server:7500 $RXE_TEST --test-threads=1 --nocapture two_machines"
fi
if [ -n "${KVASIR:-}" ]; then
    bench="$KVASIR bench transfer --transport rdma --devices rxe0 --gid-index $gid --op write-imm --sizes 64K --test bw"
    pair "kvasir bench transfer with loss" 120 "$bench --listen $server:7600" \
        "$bench --connect $server:7600 --against none --iterations 8 --rounds 3 --batch 16 --check"
fi
[ "$role" = server ] || step "packets were lost" 5 packets_were_lost
summary
