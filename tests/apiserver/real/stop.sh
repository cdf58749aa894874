#!/usr/bin/env bash
# Ends what start.sh started in RUN, the apiserver first: SIGTERM, after STOP_S seconds (3) SIGKILL: with a watch open the apiserver
# would wait a minute, and its data are all in etcd. A pid that is another program by now is left alone.
set -euo pipefail
: "${RUN:?}"
for name in apiserver etcd; do
    file=$RUN/$name.pid
    [ -e "$file" ] || continue
    read -r pid program <"$file"
    ours() { [ "$(readlink "/proc/$pid/exe" 2>/dev/null)" = "$program" ] || [ "$(readlink "/proc/$pid/exe" 2>/dev/null)" = "$program (deleted)" ]; }
    if ours; then
        kill "$pid" 2>/dev/null || true
        for ((i = 0; i < ${STOP_S:-3} * 10; i++)); do
            ours || break
            sleep 0.1
        done
        if ours; then
            echo "stop.sh: $name did not end in ${STOP_S:-3} s: SIGKILL" >&2
            kill -KILL "$pid" 2>/dev/null || true
        fi
    fi
    rm -f "$file"
done
