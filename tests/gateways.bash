# For scripts that start gateways, sourced at the repository's root: the binary (KVASIR, or one that is built here), free
# ports, and waiting for a gateway that lives.

kvasir=${KVASIR:-}
if [ -z "$kvasir" ]; then
    cargo build --quiet -p control-node
    kvasir=${CARGO_TARGET_DIR:-target}/debug/kvasir
fi

# A left-over process on a fixed port would be tested in place of this one.
port() { "${python:-python3}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

healthy() { # PID PORT: waits until the gateway answers, for as long as it lives
    for _ in $(seq 300); do
        if curl -sf -o /dev/null "http://127.0.0.1:$2/health"; then return 0; fi
        kill -0 "$1" || return 1
        sleep 0.1
    done
    echo "the gateway does not answer"
    return 1
}

scratch=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
