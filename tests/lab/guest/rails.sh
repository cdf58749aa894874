# Sourced inside a lab VM: Soft-RoCE devices ("rails") and questions about them.
# shellcheck shell=bash

# Makes the Soft-RoCE device rxe<N> on a network interface, with that address.
rail() { # its number, the interface, address/prefix
    ip addr add "$3" dev "$2"
    ip link set "$2" mtu 9000 up
    rdma link add "rxe$1" type rxe netdev "$2"
}

# Two rails in one VM, with no wire: each reaches only itself. What rxe0 sends to rxe1 arrives at neither.
two_rails() {
    modprobe -a dummy rdma_rxe ib_uverbs rdma_ucm
    ip link add dummy0 type dummy
    ip link add dummy1 type dummy
    rail 0 dummy0 10.77.0.1/24
    rail 1 dummy1 10.77.1.1/24
}

# The index of the rail's RoCE v2 GID that holds an IPv4 address.
gid_index() { # the device
    local gid index
    for gid in "/sys/class/infiniband/$1"/ports/1/gids/*; do
        index=${gid##*/}
        # Reading the type of an empty entry fails.
        if [[ $(<"$gid") == 0000:0000:0000:0000:0000:ffff:* ]] &&
            grep -q v2 "/sys/class/infiniband/$1/ports/1/gid_attrs/types/$index" 2>/dev/null; then
            echo "$index"
            return
        fi
    done
    echo "$1 has no RoCE v2 GID with an IPv4 address" >&2
    return 1
}

counter() { # the device, a hardware counter
    cat "/sys/class/infiniband/$1/ports/1/hw_counters/$2"
}
