#!/usr/bin/env bash
# GET and SET by redis-benchmark from Kvasir's RESP server over a store in memory and from redis-server, in turn in one run.
#   bench/peers/resp.sh [--smoke] [--repeats N]
# RESP_SERVER is the server (default: target/release/examples/resp_server: `cargo build --release -p kvstore-resp --example
# resp_server`). Prints requests per second, medians of the repeats, and their ratio: above 1 Kvasir answers more. Both
# servers and the client share the machine's cores. Exit code 77: Debian's redis-tools and redis-server are not there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
server=${RESP_SERVER:-$here/../../target/release/examples/resp_server}
repeats=5 smoke=
while [ $# -gt 0 ]; do
    case $1 in
    --smoke) smoke=yes repeats=1 ;;
    --repeats) repeats=$2 && shift ;;
    *) echo "unknown option $1" >&2 && exit 2 ;;
    esac
    shift
done
for tool in redis-server redis-benchmark redis-cli; do
    command -v $tool >/dev/null || { echo "SKIPPED: no $tool (apt-get install redis-tools redis-server)"; exit 77; }
done
[ -x "$server" ] || { echo "SKIPPED: no $server"; exit 77; }

dir=$(mktemp -d)
mkfifo "$dir/hold"
# Held open for reading and writing: the server stops when this script ends, however it ends.
exec 9<>"$dir/hold"
"$server" 0 4000000000 <&9 >"$dir/kvasir" 2>&1 &
kvasir_pid=$!
redis-server --port 0 --unixsocket "$dir/redis.sock" --save '' --appendonly no --daemonize no --dir "$dir" >/dev/null 2>&1 &
probe_pid=$!
trap 'kill $kvasir_pid $probe_pid 2>/dev/null || true; rm -rf "$dir"' EXIT
sleep 0.5
kill $probe_pid
wait $probe_pid || true
# redis-server cannot be given port 0 over TCP: a free port is taken by trying.
for port in $(shuf -i 20000-60000 -n 20); do
    redis-server --port "$port" --bind 127.0.0.1 --save '' --appendonly no --daemonize no --dir "$dir" >"$dir/redis" 2>&1 &
    probe_pid=$!
    sleep 0.5
    kill -0 $probe_pid 2>/dev/null && break
done
redis_port=$port
kvasir_port=$(sed -n 's/.*Tcp(127\.0\.0\.1:\([0-9]*\)).*/\1/p' "$dir/kvasir")
[ "$(redis-cli -p "$redis_port" ping)" = PONG ] && [ "$(redis-cli -p "$kvasir_port" ping)" = PONG ]

median() { sort -g | awk '{a[NR]=$1} END {print a[int((NR+1)/2)]}'; }
measure() { # port command bytes clients pipeline requests
    timeout 120 redis-benchmark -p "$1" -t "$2" -d "$3" -c "$4" -P "$5" -n "$6" -r 50 --csv 2>/dev/null |
        awk -F'"' 'NR==2 {print $4}' || echo "failed: port $1, $2 of $3 bytes, -c $4 -P $5" >&2
}
printf '%-4s %8s %4s %4s %12s %12s %7s\n' '' bytes -c -P kvasir/s redis/s ratio
for bytes in 64 4096 1048576 5242880; do
    for clients in 1 16; do
        for pipeline in 1 16; do
            case $bytes in
            64) requests=$((clients * pipeline > 1 ? 100000 : 15000)) ;;
            4096) requests=$((clients * pipeline > 1 ? 30000 : 10000)) ;;
            1048576) requests=600 ;;
            *) requests=160 ;;
            esac
            [ -z "$smoke" ] || requests=$((requests / 20 + 1))
            if [ $((bytes * clients * pipeline)) -gt 1000000000 ]; then
                echo "     $bytes bytes, -c $clients -P $pipeline: left out, the client alone would need gigabytes"
                continue
            fi
            for command in set get; do
                : >"$dir/a" && : >"$dir/b"
                for _ in $(seq "$repeats"); do
                    measure "$kvasir_port" $command $bytes $clients $pipeline $requests >>"$dir/a"
                    measure "$redis_port" $command $bytes $clients $pipeline $requests >>"$dir/b"
                done
                a=$(median <"$dir/a") b=$(median <"$dir/b")
                awk -v n=$command -v d=$bytes -v c=$clients -v p=$pipeline -v a="$a" -v b="$b" \
                    'BEGIN {printf "%-4s %8d %4d %4d %12.0f %12.0f %7s\n", n, d, c, p, a, b, (a > 0 && b > 0) ? sprintf("%.2f", a / b) : "-"}'
            done
        done
    done
    redis-cli -p "$redis_port" flushall >/dev/null
    redis-cli -p "$kvasir_port" flushall >/dev/null
done
