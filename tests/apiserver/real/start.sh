#!/usr/bin/env bash
# Starts etcd and a kube-apiserver on loopback, waits until the server is ready and prints lines that a shell can eval:
# URL, CA, ADMIN_TOKEN, USER_TOKEN, USER_NAME, ETCD_URL, APISERVER_PID, ETCD_PID.
#
# APISERVER, ETCD          the two binaries (build.sh)
# RUN                      folder for keys, data, logs and pids; a new start in the same folder keeps data and keys
# PORT, ETCD_PORT          the two loopback ports
# ADMIN_TOKEN, USER_TOKEN  bearer tokens (made up when not given) of `admin`, in group system:masters, and of the plain user USER_NAME (`plain`)
# APISERVER_FLAGS          further flags of the apiserver, split at spaces
# READY_S                  seconds to wait for the server (60)
#
# Exit: 0 ready, 77 with a line 'SKIPPED: ...' if a binary or tool is missing, 1 with the ends of the logs if it did not come up.
set -euo pipefail
umask 077

skip() { echo "SKIPPED: $*"; exit 77; }
: "${APISERVER:?}" "${ETCD:?}" "${RUN:?}" "${PORT:?}" "${ETCD_PORT:?}"
[ -x "$APISERVER" ] || skip "no kube-apiserver at $APISERVER"
[ -x "$ETCD" ] || skip "no etcd at $ETCD"
for tool in openssl curl realpath; do
    command -v "$tool" >/dev/null || skip "$tool is not on this machine"
done
here=$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")
mkdir -p "$RUN/pki"
RUN=$(realpath -- "$RUN")
pki=$RUN/pki
for name in etcd apiserver; do
    if [ -e "$RUN/$name.pid" ] && kill -0 "$(cut -d ' ' -f 1 "$RUN/$name.pid")" 2>/dev/null; then
        echo "start.sh: $RUN/$name.pid names a living process: stop.sh first" >&2
        exit 1
    fi
done

# --- Keys: an authority, the server's certificate for loopback, the key of the service accounts' tokens.
if [ ! -e "$pki/done" ]; then
    ec() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }
    ec "$pki/ca.key"
    openssl req -x509 -new -key "$pki/ca.key" -days 3650 -subj /CN=kube-apiserver-test-ca -out "$pki/ca.crt" \
        -addext basicConstraints=critical,CA:true -addext keyUsage=critical,keyCertSign,cRLSign 2>/dev/null
    ec "$pki/apiserver.key"
    openssl req -new -key "$pki/apiserver.key" -subj /CN=kube-apiserver -out "$pki/apiserver.csr" 2>/dev/null
    printf '%s\n' basicConstraints=critical,CA:false keyUsage=critical,digitalSignature extendedKeyUsage=serverAuth \
        subjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1 >"$pki/apiserver.ext"
    openssl x509 -req -in "$pki/apiserver.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -set_serial 2 -days 3650 -extfile "$pki/apiserver.ext" \
        -out "$pki/apiserver.crt" 2>/dev/null
    ec "$pki/sa.key"
    openssl pkey -in "$pki/sa.key" -pubout -out "$pki/sa.pub"
    touch "$pki/done"
fi

# --- Users.
USER_NAME=${USER_NAME:-plain}
kept() { [ -e "$RUN/$1" ] || openssl rand -hex 16 >"$RUN/$1"; cat "$RUN/$1"; }
[ -n "${ADMIN_TOKEN:-}" ] && echo "$ADMIN_TOKEN" >"$RUN/admin.token"
[ -n "${USER_TOKEN:-}" ] && echo "$USER_TOKEN" >"$RUN/user.token"
ADMIN_TOKEN=$(kept admin.token)
USER_TOKEN=$(kept user.token)
printf '%s,admin,admin-uid,"system:masters"\n%s,%s,%s-uid\n' "$ADMIN_TOKEN" "$USER_TOKEN" "$USER_NAME" "$USER_NAME" >"$RUN/tokens.csv"

# etcd takes ETCD_* from its environment as settings: none of the caller's may reach it.
for v in ${!ETCD_*}; do
    export -n "${v?}"
done
# A pid file holds the pid and the program's path: stop.sh ends only a process that still is that program.
start() {
    local name=$1
    shift
    "$@" </dev/null >>"$RUN/$name.log" 2>&1 9>&- &
    echo "$! $(realpath -- "$1")" >"$RUN/$name.pid"
}
failed() {
    echo "start.sh: $*" >&2
    tail -n 15 "$RUN"/etcd.log "$RUN"/apiserver.log >&2 2>/dev/null || true
    RUN=$RUN bash "$here/stop.sh" >&2 || true
    exit 1
}
alive() { kill -0 "$(cut -d ' ' -f 1 "$RUN/$1.pid")" 2>/dev/null; }
until_s=$((SECONDS + ${READY_S:-60}))
wait_for() {
    local name=$1 what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        alive etcd && alive "$name" || failed "$name ended before $what"
        [ $SECONDS -lt $until_s ] || failed "no $what in ${READY_S:-60} s"
        sleep 0.1
    done
}

ETCD_URL=http://127.0.0.1:$ETCD_PORT
case $(uname -m) in x86_64) ;; aarch64) export ETCD_UNSUPPORTED_ARCH=arm64 ;; *) ETCD_UNSUPPORTED_ARCH=$(uname -m) && export ETCD_UNSUPPORTED_ARCH ;; esac
# A member that is alone never dials its peer address: port 0, so that no third port is needed.
start etcd "$ETCD" --name=test --data-dir="$RUN/etcd" --listen-client-urls="$ETCD_URL" --advertise-client-urls="$ETCD_URL" \
    --listen-peer-urls=http://127.0.0.1:0 --initial-advertise-peer-urls=http://127.0.0.1:0 --initial-cluster=test=http://127.0.0.1:0 \
    --logger=zap --log-level=warn
wait_for etcd "etcd's health" curl -sf --noproxy '*' --max-time 2 "$ETCD_URL/health"

URL=https://127.0.0.1:$PORT
# endpoint-reconciler-type none: the service `kubernetes` may have no loopback endpoint, and without it every round would log that.
# ServiceAccount: off, since no controller makes the default account without which no pod could be made.
# shellcheck disable=SC2086
start apiserver "$APISERVER" --etcd-servers="$ETCD_URL" --bind-address=127.0.0.1 --secure-port="$PORT" \
    --advertise-address=127.0.0.1 --endpoint-reconciler-type=none \
    --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
    --token-auth-file="$RUN/tokens.csv" --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
    --service-cluster-ip-range=10.0.0.0/24 ${APISERVER_FLAGS:-}
ask() { curl -sf --noproxy '*' --max-time 5 --cacert "$pki/ca.crt" -H "Authorization: Bearer $ADMIN_TOKEN" "$URL$1"; }
wait_for apiserver "readyz" ask /readyz
wait_for apiserver "namespace default" ask /api/v1/namespaces/default

cat <<EOF
URL=$URL
CA=$pki/ca.crt
ADMIN_TOKEN=$ADMIN_TOKEN
USER_TOKEN=$USER_TOKEN
USER_NAME=$USER_NAME
ETCD_URL=$ETCD_URL
APISERVER_PID=$(cut -d ' ' -f 1 "$RUN/apiserver.pid")
ETCD_PID=$(cut -d ' ' -f 1 "$RUN/etcd.pid")
EOF
