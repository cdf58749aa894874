#!/usr/bin/env bash
# The gateway beside nginx on one mock engine, which is nginx itself: what passing a request on costs at least. Client (wrk), engine and
# gateway share the first two cores. Chats of 1.2 KB with a whole answer; each round measures every side once, in turn.
#   bench/peers/nginx.sh [ROUNDS] [SECONDS]
# Printed for each side: requests/s at 64 connections, and p50, p99, p99.9 of one connection; then ratios of the medians.
# nginx and wrk are the distribution's; without them this says so and ends. PEERS is a folder with vllm-router (see gateways.sh).
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-5} seconds=${2:-3}
kvasir=${KVASIR:-target/release/kvasir}
peers=${PEERS:-${TMPDIR:-/tmp}/kvasir-gateway-peers}
for tool in nginx wrk; do
    command -v $tool >/dev/null || { echo "SKIPPED: there is no $tool here"; exit 0; }
done
[ -x "$kvasir" ] || cargo build --release --quiet -p control-node
scratch=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
mkdir -p "$scratch/temp"
chmod 755 "$scratch" # nginx started by root works as another user

# One worker process each: with the client there are three parties for two cores.
nginx_conf() { # FILE PID-NAME SERVER
    cat >"$1" <<CONF
worker_processes 1;
pid $scratch/$2.pid;
error_log $scratch/$2.log crit;
events { worker_connections 4096; }
http {
    access_log off;
    keepalive_requests 1000000000;
    keepalive_timeout 300s;
    client_body_buffer_size 64k;
    client_body_temp_path $scratch/temp; proxy_temp_path $scratch/temp; fastcgi_temp_path $scratch/temp;
    uwsgi_temp_path $scratch/temp; scgi_temp_path $scratch/temp;
    $3
}
CONF
}
answer='{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"Hello, how can I help you today?"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":300,"completion_tokens":9,"total_tokens":309,"prompt_tokens_details":{"cached_tokens":0}}}'
models='{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"vllm","root":"tiny","parent":null,"max_model_len":32768}]}'
# As lines of Prometheus text; nginx has no other way to write a line end.
metrics='process_start_time_seconds 1.0\nvllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="10000",enable_prefix_caching="True",engine="0"} 1\n'
printf '%b' "$metrics" >"$scratch/metrics"
nginx_conf "$scratch/engine.conf" engine "server {
        listen 127.0.0.1:9500 reuseport;
        default_type application/json;
        location = /v1/chat/completions { return 200 '$answer'; }
        location = /v1/models { return 200 '$models'; }
        location = /health { return 200 ''; }
        location = /version { return 200 '{\"version\":\"0.11.0\"}'; }
        location = /metrics { default_type text/plain; alias $scratch/metrics; }
    }"
nginx_conf "$scratch/proxy.conf" proxy "upstream engine { server 127.0.0.1:9500; keepalive 256; keepalive_requests 1000000000; }
    server {
        listen 127.0.0.1:9501;
        location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ''; }
    }"
pin="taskset -c 0,1"
run() { # NAME COMMAND...
    local name=$1
    shift
    $pin "$@" >"$scratch/$name.out" 2>&1 &
    started+=($!)
}
run engine nginx -p "$scratch" -c "$scratch/engine.conf" -g 'daemon off;'
run proxy nginx -p "$scratch" -c "$scratch/proxy.conf" -g 'daemon off;'
printf '[gateway]\nengine = "vllm"\n' >"$scratch/kvasir.toml"
run kvasir "$kvasir" gateway --listen 127.0.0.1:9502 --worker http://127.0.0.1:9500 --config "$scratch/kvasir.toml"
sides=("direct 9500" "nginx 9501" "kvasir 9502")
if [ -x "$peers/bin/vllm-router" ]; then
    run vllm-router "$peers/bin/vllm-router" --host 127.0.0.1 --port 9503 --worker-urls http://127.0.0.1:9500 \
        --policy cache_aware --log-level error --prometheus-port 9504
    sides+=("vllm-router 9503")
else
    echo "SKIPPED: vllm-router is not installed"
fi
python3 - "$scratch/chat.lua" <<'PY'
import json, sys
body = json.dumps({"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "word " * 220}]})
with open(sys.argv[1], "w") as out:
    out.write('wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\nwrk.body = [[%s]]\n' % body)
    out.write('done = function(summary, latency, requests)\n'
              '  local bad = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.status + summary.errors.timeout\n'
              '  io.write(string.format("RESULT %.0f %.0f %.0f %.0f %d\\n", summary.requests / summary.duration * 1e6,\n'
              '    latency:percentile(50), latency:percentile(99), latency:percentile(99.9), bad))\nend\n')
PY
for side in "${sides[@]}"; do
    read -r name port <<<"$side"
    for attempt in $(seq 100); do
        curl -sf -m 2 -o /dev/null "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' \
            -d '{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":1}' && break
        [ "$attempt" -lt 100 ] || { echo "$name does not answer:"; tail -3 "$scratch/$name.out"; exit 1; }
        sleep 0.2
    done
done
measure() { # PORT CONNECTIONS
    $pin wrk -t1 -c"$2" -d"${seconds}s" -s "$scratch/chat.lua" "http://127.0.0.1:$1/v1/chat/completions" | sed -n 's/^RESULT //p'
}
for round in $(seq "$rounds"); do
    printf '\rround %s of %s' "$round" "$rounds" >&2
    for side in "${sides[@]}"; do
        read -r name port <<<"$side"
        echo "$name 64 $(measure "$port" 64)" >>"$scratch/results"
        echo "$name 1 $(measure "$port" 1)" >>"$scratch/results"
    done
done
printf '\r' >&2
python3 - "$scratch/results" <<'PY'
import collections, statistics, sys
rows = collections.defaultdict(list)
for line in open(sys.argv[1]):
    name, connections, *numbers = line.split()
    rate, p50, p99, p999, bad = map(float, numbers)
    if bad:
        sys.exit(f"{name} at {connections} connections: {bad:.0f} requests failed")
    rows[name, int(connections)].append((rate, p50, p99, p999))
median = {key: [statistics.median(column) for column in zip(*values)] for key, values in rows.items()}
names = list(dict.fromkeys(name for name, _ in median))
for name in names:
    rate, one = median[name, 64][0], median[name, 1]
    print(f"{name:<12} {rate:>8.0f} requests/s at 64 connections; one connection: "
          f"{one[1]:.0f} / {one[2]:.0f} / {one[3]:.0f} us at p50 / p99 / p99.9")
rate = lambda name: median[name, 64][0]
added = lambda name: median[name, 1][1] - median["direct", 1][1]
print(f"kvasir / nginx: {rate('kvasir') / rate('nginx'):.2f} of its requests/s (target 0.8); "
      f"{added('kvasir') / max(added('nginx'), 1):.2f} of the p50 that it adds to direct (target 1.3 at most)")
if "vllm-router" in names:
    print(f"kvasir / vllm-router: {rate('kvasir') / rate('vllm-router'):.2f} of its requests/s (target 2)")
PY
