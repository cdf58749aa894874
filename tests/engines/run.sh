#!/usr/bin/env bash
# Kvasir in front of and below real engines on the CPU:
#   run.sh [routing|pools|control|disaggregation|offload|hybrid|mla|pipeline|slow|conversations|tiers|stores|all] [--direct|--kvasir]   (vLLM)
#   run.sh handoff [handoff.py's options]
#   run.sh shared [shared.py's options]
# Installs vLLM if it is not there, builds Kvasir, starts two engines and the gateway (mla and pipeline: one engine of two processes), asks,
# and ends all that it started. With --direct the gateway is left out: what do the engines and the check itself do? With --kvasir prompts are
# handed over by KvasirConnector instead of NIXL's. `handoff` compares the two, without a gateway; `shared` has two engines share blocks
# through pools, and `stores` has a gateway in front of such engines.
# LAB is the folder for vLLM (7 GB) and the logs. Succeeds with `SKIPPED: reason` where vLLM cannot be had.
# run.sh sglang [SCENARIO…] does the same for real SGLang servers (sglang/run.sh), in $LAB/sglang if LAB is set; `all` leaves
# them out. 77 where SGLang cannot be had.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$here/../..
if [ "${1:-}" = sglang ]; then
    shift
    [ -z "${LAB:-}" ] || export LAB=$LAB/sglang
    exec bash "$here/sglang/run.sh" "$@"
fi
export LAB=${LAB:-${TMPDIR:-/tmp}/kvasir-engines}
what=${1:-all} direct=${2:-}
case "$what $direct" in
"routing " | "routing --direct" | "pools " | "control " | "disaggregation "* | "offload " | "hybrid " | "mla " | "pipeline " | "slow " | "conversations " | "tiers " | "stores " | "all " | "all --direct" | "handoff "* | "shared "*) ;;
*) echo "run.sh [routing|pools|control|disaggregation|offload|hybrid|mla|pipeline|slow|conversations|tiers|stores|all] [--direct|--kvasir]; run.sh handoff …; run.sh shared …" >&2 && exit 2 ;;
esac
parts=(prefill decode)
if [ "$direct" = --kvasir ]; then
    parts=(kvasir-prefill kvasir-decode) direct=
    by_kvasir=1
fi
first=8101 second=8102 gateway=127.0.0.1:8200

"$here/install.sh"
[ -e "$LAB/installed" ] || exit 0
python=$LAB/venv/bin/python
# One core for each engine, of those that this process may use.
cores='import os; cores = sorted(os.sched_getaffinity(0)); print(cores[0], cores[1 % len(cores)])'
read -r core1 core2 < <("$python" -c "$cores")
target=${CARGO_TARGET_DIR:-$root/target}
kvasir=${KVASIR:-$target/release/kvasir}
export KVASIR_KV_LIBRARY=${KVASIR_KV_LIBRARY:-}
needs_kvasir=1 needs_library=1
case "$what" in
offload | hybrid | pipeline | slow | conversations | handoff) needs_kvasir= ;;
routing | pools | control | disaggregation) needs_library=${by_kvasir:-} ;;
esac
if [ -n "$needs_kvasir" ] && [ -z "$direct" ] && [ -z "${KVASIR:-}" ]; then
    (cd "$root" && cargo build --release -p control-node)
fi
if [ -n "$needs_library" ] && [ -z "$KVASIR_KV_LIBRARY" ]; then
    (cd "$root" && cargo build --profile capi -p kvstore-capi)
    KVASIR_KV_LIBRARY=$target/capi/libkvasir_kv.so
fi

# Each engine is a process group of its own, and so is one that a check has started again.
finish() {
    local name pid
    for name in "$first" "$second" gateway; do
        pid=$(cat "$LAB/$name.pid" 2>/dev/null) || continue
        kill -KILL -- "-$pid" 2>/dev/null || true
        rm -f "$LAB/$name.pid"
    done
}
trap finish EXIT
trap 'exit 130' INT TERM

up() { # what it is, its health URL, its log
    local seconds=0
    until curl -sf -m 5 -o /dev/null "$2"; do
        if [ $seconds -ge 300 ]; then
            echo "$1 is not up after $seconds s; the end of $3:" >&2
            tail -20 "$3" >&2
            exit 1
        fi
        [ $((seconds % 20)) -ne 10 ] || echo "  waiting for $1, $seconds s"
        sleep 1
        seconds=$((seconds + 1))
    done
    echo "$1 is up"
}

engines() { # part of the first, part of the second, each perhaps with options of vLLM
    finish
    # shellcheck disable=SC2086 # options are words of their own
    setsid "$here/serve.sh" "$first" "$core1" $1 >"$LAB/$first.log" 2>&1 </dev/null &
    # shellcheck disable=SC2086
    setsid "$here/serve.sh" "$second" "$core2" $2 >"$LAB/$second.log" 2>&1 </dev/null &
    disown -a
    up "vLLM ($1)" "http://127.0.0.1:$first/health" "$LAB/$first.log"
    up "vLLM ($2)" "http://127.0.0.1:$second/health" "$LAB/$second.log"
}

gateway() { # more of the configuration, then the options that name the workers
    local more=$1
    shift
    printf '[gateway]\nmodel_folder = "%s"\nmodel = "tiny"\n%b' "$LAB/tinymodel" "$more" >"$LAB/kvasir.toml"
    setsid "$kvasir" gateway --config "$LAB/kvasir.toml" --listen "$gateway" "$@" >"$LAB/gateway.log" 2>&1 </dev/null &
    echo $! >"$LAB/gateway.pid"
    disown -a
    up "the gateway" "http://$gateway/health" "$LAB/gateway.log"
}

if [ "$what" = handoff ]; then
    shift
    "$python" -B "$here/handoff.py" --ports "$first,$second" --cores "$core1,$core2" "$@"
    exit
fi

if [ "$what" = shared ]; then
    shift
    if [[ " $* " = *" --hybrid "* ]] && [ ! -e "$LAB/hybridmodel/model.safetensors" ]; then
        "$python" "$here/make_model.py" "$LAB/hybridmodel" hybrid
    fi
    "$python" -B "$here/shared.py" --kvasir "$kvasir" --ports "$first,$second" --cores "$core1,$core2" "$@"
    exit
fi

rc=0
check() { # its name, then the command
    local name=$1
    shift
    echo "=== $name ($(date +%T))"
    local status=0
    "$@" || status=$?
    case $status in
    0) echo "=== $name: ok" ;;
    77) echo "=== $name: SKIPPED" ;;
    *)
        rc=1
        echo "=== $name: FAILED; logs in $LAB"
        ;;
    esac
}

if [ "$what" != routing ] && [ "$what" != pools ]; then
    check judgement "$python" -B "$here/test_judge.py"
fi
if [ "$what" = routing ] || [ "$what" = all ]; then
    engines alone alone
    if [ -n "$direct" ]; then
        check routing "$python" "$here/routing.py" --direct "http://127.0.0.1:$first" "http://127.0.0.1:$second"
    else
        gateway '' --worker "http://127.0.0.1:$first" --worker "http://127.0.0.1:$second"
        check routing "$python" "$here/routing.py" "http://$gateway"
    fi
fi
if [ "$what" = tiers ] || [ "$what" = all ] && [ -z "$direct" ]; then
    # Half of the conversations fit into both caches: the rest is in host memory or on the disk.
    small='tiered --num-gpu-blocks-override 192 --max-model-len 3072'
    engines "$small" "$small"
    gateway '' --worker "http://127.0.0.1:$first" --worker "http://127.0.0.1:$second"
    check tiers "$python" "$here/routing.py" --requests 400 --conversations 60 "http://$gateway" \
        --stores "http://127.0.0.1:$first" "http://127.0.0.1:$second"
fi
if [ "$what" = stores ] || [ "$what" = all ] && [ -z "$direct" ]; then
    finish
    check stores "$python" -B "$here/stores.py" --kvasir "$kvasir" --ports "$first,$second" --gateway "$gateway" --cores "$core1,$core2"
fi
if [ "$what" = pools ] || [ "$what" = all ] && [ -z "$direct" ]; then
    engines alone 'alone --served-model-name other'
    pool='[[pool]]\nname = "other"\naliases = ["o"]\nfallback = ["gateway"]\n'
    pool+="workers = [\"http://127.0.0.1:$second\"]\nmodel_folder = \"$LAB/tinymodel\"\n"
    gateway "$pool"'[[split]]\nmodel = "mix"\npools = ["gateway=90", "other=10"]\n' --worker "http://127.0.0.1:$first"
    check pools "$python" "$here/pools.py" "http://$gateway" "http://127.0.0.1:$first" "http://127.0.0.1:$second"
fi
if [ "$what" = control ] || [ "$what" = all ] && [ -z "$direct" ]; then
    engines alone alone
    # The gateway makes the text: streams go on token for token.
    gateway 'text = "gateway"\n' --worker "http://127.0.0.1:$first" --worker "http://127.0.0.1:$second"
    check control "$python" "$here/control.py" "http://$gateway" --kvasir "$kvasir" --ports "$first,$second" \
        --cores "$core1,$core2"
fi
if [ "$what" = disaggregation ] || [ "$what" = all ]; then
    engines "${parts[@]}"
    if [ -n "$direct" ]; then
        check disaggregation "$python" "$here/disaggregation.py" --cores "$core1,$core2" --direct
    else
        gateway '[router]\ndisaggregate_above_tokens = 64\n' \
            --prefill-worker "http://127.0.0.1:$first" --decode-worker "http://127.0.0.1:$second"
        check disaggregation "$python" "$here/disaggregation.py" --cores "$core1,$core2" --parts "${parts[0]},${parts[1]}" \
            "http://$gateway"
    fi
fi
if [ "$what" = offload ] || [ "$what" = all ]; then
    finish
    check refusals env PYTHONPATH="$root/kvstore/capi/python" "$python" "$here/refusals.py"
    check names env PYTHONPATH="$root/kvstore/capi/python" "$python" "$here/names.py"
    check offload "$python" "$here/offload.py" --port "$first" --cores "$core1"
fi
if [ "$what" = hybrid ] || [ "$what" = all ]; then
    finish
    [ -e "$LAB/hybridmodel/model.safetensors" ] || "$python" "$here/make_model.py" "$LAB/hybridmodel" hybrid
    check refusals env PYTHONPATH="$root/kvstore/capi/python" "$python" "$here/refusals.py"
    # Three groups of layers need more memory: three blocks for 32 tokens.
    check hybrid env KVASIR_TEST_MODEL=hybridmodel KVASIR_HOST_TIER='640 MiB' "$python" -B "$here/offload.py" --port "$first" --cores "$core1" --hybrid
fi
if [ "$what" = mla ] || [ "$what" = all ]; then
    finish
    [ -e "$LAB/mlamodel/model.safetensors" ] || "$python" "$here/make_model.py" "$LAB/mlamodel" mla
    check mla "$python" -B "$here/mla.py" --kvasir "$kvasir" --port "$first" --cores "$core1,$core2"
fi
if [ "$what" = pipeline ] || [ "$what" = all ]; then
    finish
    check pipeline "$python" -B "$here/offload.py" --port "$first" --cores "$core1,$core2" --pipeline 2 --prompts 4
fi
if [ "$what" = slow ] || [ "$what" = all ]; then
    finish
    "$python" -c 'import mfusepy' 2>/dev/null || "$LAB/venv/bin/pip" install -q --no-deps mfusepy==3.1.1 || true
    check slow "$python" "$here/slow_disk.py" --port "$first" --cores "$core1"
fi
if [ "$what" = conversations ] || [ "$what" = all ]; then
    finish
    "$python" -c 'import mfusepy' 2>/dev/null || "$LAB/venv/bin/pip" install -q --no-deps mfusepy==3.1.1 || true
    check conversations "$python" -B "$here/conversations.py" --port "$first" --cores "$core1"
fi
exit $rc
