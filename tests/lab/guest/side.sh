#!/usr/bin/env bash
# One side of two.sh, inside its VM: the rail on the wire, its losses, the other side, the command.
#   side.sh A|B LOSS_PERCENT COMMAND
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=rails.sh
. "$(dirname "$(readlink -f "$0")")/rails.sh"
side=$1 loss=$2 command=$3
case $side in
A) number=1 other=2 ;;
B) number=2 other=1 ;;
esac
modprobe -a virtio_net sch_netem rdma_rxe ib_uverbs rdma_ucm
rail 0 eth0 "10.77.0.$number/24"
# The other VM may still be booting. This also fills the neighbour tables, before packets are lost.
tries=0
until busybox ping -c 1 -W 1 "10.77.0.$other" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 60 ] || { echo "10.77.0.$other does not answer" && exit 1; }
done
touch "$KVASIR_LAB_MEET/$side-sees-the-other"
until [ -e "$KVASIR_LAB_MEET/A-sees-the-other" ] && [ -e "$KVASIR_LAB_MEET/B-sees-the-other" ]; do sleep 0.2; done
[ "$loss" = 0 ] || tc qdisc add dev eth0 root netem loss "$loss%"

serve() {
    local server
    (eval "$command") &
    server=$!
    # The client waits for a listening port, or for the end of a server that never listened.
    until ss -Hltn | grep -q . || ! kill -0 $server 2>/dev/null; do sleep 0.1; done
    touch "$KVASIR_LAB_MEET/server-listens"
    wait $server
}

connect() {
    until [ -e "$KVASIR_LAB_MEET/server-listens" ]; do sleep 0.1; done
    local code=0
    (eval "$command") || code=$?
    touch "$KVASIR_LAB_MEET/client-ended"
    return $code
}

if [ "$side" = A ]; then serve; else connect; fi
