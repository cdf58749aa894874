#!/usr/bin/env bash
# The double of the API server held against a real kube-apiserver 1.20.2, and this project's parts against the real one:
#
#     tests/apiserver/real/run.sh [FOLDER]
#
# FOLDER keeps the two binaries for the next run (default: a folder below TMPDIR). Building takes four minutes of two cores and
# 2.5 GB of disk the first time. With KVASIR_HELM_PYTHON, a Python with helm-sdkpy, Helm's own library installs and upgrades a chart.
# 77 with `SKIPPED: reason` where the server cannot be had.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$here/../../..
folder=${1:-${TMPDIR:-/tmp}/kvasir-apiserver}
command -v python3 >/dev/null || { echo "SKIPPED: no python3" && exit 77; }
mkdir -p "$folder"
"$here/build.sh" "$folder/kube-apiserver" "$folder/etcd"
run=$(mktemp -d)
free() { python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
export APISERVER=$folder/kube-apiserver ETCD=$folder/etcd RUN=$run
PORT=$(free) ETCD_PORT=$(free)
export PORT ETCD_PORT
trap 'RUN=$run "$here/stop.sh"; rm -rf "$run"' EXIT
trap 'exit 130' INT TERM
started=$("$here/start.sh") || { status=$?; echo "$started"; exit $status; }
eval "$started"
kubeconfig() { # the user, its token
    python3 - "$URL" "$CA" "$1" "$2" <<'P' >"$run/$1.json"
import base64, json, sys
url, ca, user, token = sys.argv[1:]
authority = base64.b64encode(open(ca, "rb").read()).decode()
print(json.dumps({
    "apiVersion": "v1", "kind": "Config", "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority-data": authority}}],
    "users": [{"name": user, "user": {"token": token}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": user, "namespace": "default"}}],
}))
P
}
kubeconfig admin "$ADMIN_TOKEN"
kubeconfig plain "$USER_TOKEN"
export KVASIR_APISERVER_KUBECONFIG=$run/admin.json KVASIR_APISERVER_USER_KUBECONFIG=$run/plain.json
cd "$root"
[ -x "${KVASIR:-target/debug/kvasir}" ] || cargo build --workspace --all-features --bin kvasir
# The features of the README's test command, so that nothing that it built is built again.
cargo test --workspace --all-features --test contract -- --nocapture

if [ -z "${KVASIR_HELM_PYTHON:-}" ]; then
    echo "SKIPPED Helm: KVASIR_HELM_PYTHON names no Python with helm-sdkpy"
    exit 0
fi
# A count of its own for each role, as the client expects.
sed 's/^max = 6$/workers = 2/' control/deploy/examples/vllm-disaggregated.toml >"$run/graph.toml"
"${KVASIR:-target/debug/kvasir}" deploy render "$run/graph.toml" --to helm --output "$run/chart"
# policy/v1 came with Kubernetes 1.21.
python3 - "$run/chart/templates/graph.yaml" <<'P'
import sys
text = open(sys.argv[1]).read()
kept = [part for part in text.split("\n---\n") if "kind: PodDisruptionBudget" not in part]
open(sys.argv[1], "w").write("\n---\n".join(kept))
P
echo | HOME=$run HELM_DRIVER=memory "$KVASIR_HELM_PYTHON" tests/client/helm_client.py "$run/admin.json" "$run/chart" default
echo "Helm's own library has installed and upgraded the chart at the real API server, without its PodDisruptionBudget"
