#!/usr/bin/env bash
# Two lab VMs on one wire that loses packets: a server's command in A (10.77.0.1), a client's in B (10.77.0.2), each
# with the Soft-RoCE device rxe0 on that wire.
#   two.sh [options] -- 'SERVER COMMAND' 'CLIENT COMMAND'
#     --loss PERCENT   2: of the packets that each side sends
#     --memory MIB     2048        --cpus N     1, per VM        --timeout S   180
#     --install        installs what is needed first
# The commands are bash and find the functions of guest/rails.sh (gid_index, counter). B's starts as soon as A's listens
# on a TCP port. What both wrote into $KVASIR_LAB_MEET can be seen by both; the file client-ended appears there when B's
# command has ended, so that a server which serves for ever knows when to stop.
# Output is prefixed with `A: ` and `B: `. Exit code: 0 if both succeeded, else that of the one that failed, B's first;
# 77 with `SKIPPED: reason` where there is no QEMU.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 64
}

loss=2 memory=2048 cpus=1 seconds=180 install=no
while [ $# -gt 0 ]; do
    case $1 in
    --install) install=yes && shift && continue ;;
    --) shift && break ;;
    esac
    [ $# -ge 2 ] || usage
    case $1 in
    --loss) loss=$2 ;;
    --memory) memory=$2 ;;
    --cpus) cpus=$2 ;;
    --timeout) seconds=$2 ;;
    *) usage ;;
    esac
    shift 2
done
[ $# -eq 2 ] || usage
[ $install = no ] || "$here/install.sh"
# Both VMs need it: prepared, or found impossible, before either starts.
prepared=$("$here/kernel.sh") || { code=$? && echo "$prepared" && exit $code; }

meet=$(mktemp -d)
running=() printing=()
# shellcheck disable=SC2317 # the trap calls it
finish() {
    [ ${#running[@]} -eq 0 ] || kill "${running[@]}" 2>/dev/null || true
    wait
    rm -rf "$meet"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

machine() { # A or B, its socket, the other's socket, the command
    mkfifo "$meet/$1"
    sed -u "s/^/$1: /" <"$meet/$1" &
    printing+=($!)
    # Datagrams between Unix sockets: QEMU's TCP wire coalesces, which adds 20 ms to each exchange.
    "$here/vm.sh" --memory "$memory" --cpus "$cpus" --timeout "$seconds" --share "$meet" \
        --nic "dgram,local.type=unix,local.path=$meet/$2,remote.type=unix,remote.path=$meet/$3" \
        -- env KVASIR_LAB_MEET="$meet" "$here/guest/side.sh" "$1" "$loss" "$4" >"$meet/$1" 2>&1 &
    running+=($!)
}
machine A a.sock b.sock "$1"
machine B b.sock a.sock "$2"

code_a=0 code_b=0
wait "${running[1]}" || code_b=$?
# A server whose client is gone has what is left of its time, and no more than this.
wait "${running[0]}" || code_a=$?
wait "${printing[@]}"
running=()
echo "two: server $code_a, client $code_b"
[ $code_b -eq 0 ] || exit $code_b
exit $code_a
