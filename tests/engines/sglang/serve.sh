#!/usr/bin/env bash
# Becomes one real SGLang server on the tiny model; ready after about 40 seconds, on a busy machine a few minutes.
#   LAB=FOLDER serve.sh PORT CORE [alone|prefill|decode|hicache|storage] [SGLang options]
# KV events on PORT+100, replay on PORT+200 (rank r: plus r); a prefill server's bootstrap port is PORT+300. Started
# with setsid, its process id is also the group to end, with all of its children.
# CORE is the core (or the list for taskset) that it may use. PAGE is the page size (tokens of a KV block), TOKENS the
# size of the pool, RATIO that of HiCache's host pool over it.
# `storage` is HiCache over Kvasir's store: KVASIR_KV_LIBRARY, with the sections of its configuration in STORE (JSON).
# `alone 0,1 --dp-size 2` needs SGLANG_CPU_OMP_THREADS_BIND="0|1": without it SGLang counts NUMA nodes and gives up.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
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
storage)
    # SGLang compiles the hash of its pages when a server first needs it.
    ninja='from importlib.metadata import files; print(next(f for f in files("ninja") if f.name == "ninja").locate().resolve().parent)'
    PATH=$(venv/bin/python -c "$ninja"):$PATH
    export PATH TORCH_EXTENSIONS_DIR=$LAB/extensions PYTHONPATH=$here/../../../kvstore/capi/python
    storage="{\"backend_name\": \"kvasir\", \"module_path\": \"kvasir_kv.sglang\", \"class_name\": \"KvasirHiCache\", \"interface_v1\": 1,
        \"hicache_storage_pass_prefix_keys\": true, \"prefetch_threshold\": 32, \"store\": $STORE}"
    more=(--enable-hierarchical-cache --hicache-ratio "${RATIO:-2}" --hicache-write-policy write_through \
        --hicache-io-backend direct --hicache-mem-layout layer_first --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config "$storage" --hicache-storage-prefetch-policy wait_complete)
    ;;
*) echo "serve.sh: $part is none of alone, prefill, decode, hicache, storage" >&2 && exit 2 ;;
esac
events="{\"publisher\":\"zmq\",\"bind\":true,\"endpoint\":\"tcp://127.0.0.1:$((port + 100))\",\
\"replay_endpoint\":\"tcp://127.0.0.1:$((port + 200))\",\"topic\":\"kv-events\"}"
exec nice -n 10 taskset -c "$core" venv/bin/python -m sglang.launch_server --model-path ./tinymodel \
    --served-model-name tiny --host 127.0.0.1 --port "$port" --device cpu --dtype bfloat16 --context-length 4096 \
    --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule --disable-cuda-graph \
    --page-size "${PAGE:-16}" --max-total-tokens "${TOKENS:-16384}" --max-running-requests 64 --mem-fraction-static 0.5 \
    --enable-cache-report --enable-metrics --kv-events-config "$events" "${more[@]}" "$@"
