#!/usr/bin/env bash
# Becomes one real SGLang server on the tiny model; ready after about 40 seconds, on a busy machine a few minutes.
#   LAB=FOLDER serve.sh PORT CORE [alone|prefill|decode|hicache] [SGLang options]
# KV events on PORT+100, replay on PORT+200 (rank r: plus r); a prefill server's bootstrap port is PORT+300. Started
# with setsid, its process id is also the group to end, with all of its children.
# CORE is the core (or the list for taskset) that it may use. PAGE is the page size (tokens of a KV block), TOKENS the
# size of the pool, RATIO that of HiCache's host pool over it.
# `alone 0,1 --dp-size 2` needs SGLANG_CPU_OMP_THREADS_BIND="0|1": without it SGLang counts NUMA nodes and gives up.
set -euo pipefail
LAB=${LAB:-${TMPDIR:-/tmp}/kvasir-sglang}
port=$1 core=$2 part=${3:-alone}
shift 2
[ $# -eq 0 ] || shift
cd "$LAB"
export SGLANG_USE_CPU_ENGINE=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 OMP_NUM_THREADS=1 \
    SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1 MASTER_ADDR=127.0.0.1 \
    SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=60 SGLANG_DISAGGREGATION_WAITING_TIMEOUT=60 \
    UCX_TLS=tcp,shm,self NIXL_LOG_LEVEL=ERROR
disaggregation=(--disaggregation-bootstrap-port $((port + 300)) --disaggregation-transfer-backend nixl)
case $part in
alone) more=() ;;
prefill | decode) more=(--disaggregation-mode "$part" "${disaggregation[@]}") ;;
hicache) more=(--enable-hierarchical-cache --hicache-ratio "${RATIO:-4}" --hicache-write-policy write_through \
    --hicache-io-backend direct --hicache-mem-layout layer_first) ;;
*) echo "serve.sh: $part is none of alone, prefill, decode, hicache" >&2 && exit 2 ;;
esac
events="{\"publisher\":\"zmq\",\"bind\":true,\"endpoint\":\"tcp://127.0.0.1:$((port + 100))\",\
\"replay_endpoint\":\"tcp://127.0.0.1:$((port + 200))\",\"topic\":\"kv-events\"}"
exec nice -n 10 taskset -c "$core" venv/bin/python -m sglang.launch_server --model-path ./tinymodel \
    --served-model-name tiny --host 127.0.0.1 --port "$port" --device cpu --dtype bfloat16 --context-length 4096 \
    --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule --disable-cuda-graph \
    --page-size "${PAGE:-16}" --max-total-tokens "${TOKENS:-16384}" --max-running-requests 64 --mem-fraction-static 0.5 \
    --enable-cache-report --enable-metrics --kv-events-config "$events" "${more[@]}" "$@"
