#!/usr/bin/env bash
# Becomes one real vLLM server on the tiny model; ready after half a minute or, on a busy machine, two.
#   serve.sh PORT CORE [alone|prefill|decode|kvasir-prefill|kvasir-decode|shared|shared-small|mla|tiered|slow-disk|conversations|offload|planted] [vLLM options]
# KV events on PORT+1000 with replay on PORT+2000; the NIXL side channel on PORT+3000, Kvasir's hand-offs on PORT+4000. Its process id is in
# $LAB/PORT.pid; started with setsid, that is also the group to end, with all of its children.
# The model is the one in $LAB/$KVASIR_TEST_MODEL, `tinymodel` if that is not set.
# It listens on KVASIR_ENGINE_HOST, 127.0.0.1 if that is not set, in the network namespace KVASIR_NETNS if that is set.
# CORE is one core for each process of the engine, separated by '|': two processes on one core take seconds for what takes milliseconds.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
LAB=${LAB:-${TMPDIR:-/tmp}/kvasir-engines}
port=$1 core=$2 part=${3:-alone}
shift 2
[ $# -eq 0 ] || shift
cd "$LAB"
export VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=$core VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
    VLLM_NIXL_SIDE_CHANNEL_PORT=$((port + 3000)) UCX_TLS=tcp,shm,self
nixl='"kv_connector":"NixlConnector","kv_buffer_device":"cpu"'
case $part in
alone) transfer=() ;;
prefill) transfer=(--kv-transfer-config "{$nixl,\"kv_role\":\"kv_producer\"}") ;;
decode) transfer=(--kv-transfer-config "{$nixl,\"kv_role\":\"kv_consumer\"}") ;;
kvasir-prefill | kvasir-decode)
    # Its blocks are handed over by Kvasir's library, KVASIR_KV_LIBRARY; KVASIR_TRANSPORT is "auto", "shm" or "tcp".
    # KVASIR_LEASE and KVASIR_DEADLINE are how long the one keeps blocks and the other waits for them.
    export PYTHONPATH=$here/../../kvstore/capi/python
    role=kv_producer
    [ "$part" = kvasir-prefill ] || role=kv_consumer
    kvasir="\"kv_connector\":\"KvasirConnector\",\"kv_connector_module_path\":\"kvasir_kv.vllm\",\"kv_role\":\"$role\""
    handoff="\"listen\":\"127.0.0.1:$((port + 4000))\",\"transport\":\"${KVASIR_TRANSPORT:-auto}\",\"capacity\":\"512 MiB\",\
\"lease\":\"${KVASIR_LEASE:-60 s}\""
    transfer=(--prefix-caching-hash-algo sha256_cbor --kv-transfer-config "{$kvasir,\
\"kv_load_failure_policy\":\"recompute\",\"kv_connector_extra_config\":{\"offload\":false,\"handoff_deadline\":${KVASIR_DEADLINE:-60},\"store\":{\
\"host_tier\":{\"capacity\":\"16 MiB\"},\"transfer\":{$handoff}}}}")
    ;;
shared | shared-small | mla)
    # Its blocks go to a small store of its own and to the pools that KVASIR_NODES names, a list in JSON. The smaller store has
    # no room for three long prompts. With `mla` the connector is planted/latents.py.
    export PYTHONPATH=$here/../../kvstore/capi/python
    connector=KvasirConnector module=kvasir_kv.vllm capacity='64 MiB' deadline=1s
    [ "$part" != shared-small ] || capacity='16 MiB'
    if [ "${KVASIR_TEST_MODEL:-}" = hybridmodel ]; then
        # Three groups of layers need three blocks for 32 tokens.
        capacity="$((${capacity% MiB} * 3)) MiB"
    fi
    if [ "$part" = mla ]; then
        export PYTHONPATH=$PYTHONPATH:$here/planted KVASIR_WRONG_BLOCKS=$LAB/wrong-blocks
        connector=Latents module=latents capacity='256 MiB' deadline=10s
    fi
    kvasir="\"kv_connector\":\"$connector\",\"kv_connector_module_path\":\"$module\",\"kv_role\":\"kv_both\""
    tiers="\"host_tier\":{\"capacity\":\"$capacity\"},\"remote_tier\":{\"nodes\":$KVASIR_NODES,\"deadline\":\"$deadline\"}"
    transfer=(--prefix-caching-hash-algo sha256_cbor --kv-transfer-config "{$kvasir,\
\"kv_load_failure_policy\":\"recompute\",\"kv_connector_extra_config\":{\"store\":{$tiers}}}")
    ;;
tiered | slow-disk | conversations)
    # Its blocks go to host memory and to a disk below it; its own cache (see run.sh) is far smaller.
    export PYTHONPATH=$here/../../kvstore/capi/python
    disk=$LAB/tiered-$port capacity='24 MiB'
    # With `slow-disk` the disk is the one of slow_disk.py, and host memory has room for two long prompts.
    [ "$part" = tiered ] || disk=$LAB/slow/mount/$port capacity='16 MiB'
    # With `conversations` it has room for some fifteen of two thousand tokens, and KVASIR_PREFETCH has more of its keys.
    more=
    if [ "$part" = conversations ]; then
        disk=$LAB/slow/mount/$port capacity='64 MiB' more=",$KVASIR_PREFETCH"
        set -- --num-gpu-blocks-override 192 "$@"
    fi
    rm -rf "$disk"
    kvasir="\"kv_connector\":\"KvasirConnector\",\"kv_connector_module_path\":\"kvasir_kv.vllm\",\"kv_role\":\"kv_both\""
    tiers="\"host_tier\":{\"capacity\":\"$capacity\"$more},\"disk_tier\":{\"capacity\":\"512 MiB\",\"segment\":\"64 MiB\",\
\"path\":\"$disk\"}"
    transfer=(--prefix-caching-hash-algo sha256_cbor --kv-transfer-config "{$kvasir,\
\"kv_load_failure_policy\":\"recompute\",\"kv_connector_extra_config\":{\"store\":{$tiers}}}")
    ;;
offload | planted)
    # Its blocks go to Kvasir's store: KVASIR_KV_LIBRARY, with KVASIR_HOST_TIER of memory and files in $LAB/offload. With `planted`,
    # loads bring wrong blocks while $LAB/wrong-blocks exists.
    export PYTHONPATH=$here/../../kvstore/capi/python
    connector=KvasirConnector module=kvasir_kv.vllm
    if [ "$part" = planted ]; then
        export PYTHONPATH=$PYTHONPATH:$here/planted KVASIR_WRONG_BLOCKS=$LAB/wrong-blocks
        connector=WrongBlocks module=wrong_blocks
    fi
    kvasir="\"kv_connector\":\"$connector\",\"kv_connector_module_path\":\"$module\",\"kv_role\":\"kv_both\""
    tiers="\"host_tier\":{\"capacity\":\"${KVASIR_HOST_TIER:-256 MiB}\"},\"disk_tier\":{\"capacity\":\"1 GiB\",\"segment\":\"64 MiB\",\
\"path\":\"$LAB/offload\"}"
    transfer=(--prefix-caching-hash-algo sha256_cbor --kv-transfer-config "{$kvasir,\
\"kv_load_failure_policy\":\"recompute\",\"kv_connector_extra_config\":{\"store\":{$tiers}}}")
    ;;
*) echo "serve.sh: $part is none of alone, prefill, decode, kvasir-prefill, kvasir-decode, shared, shared-small, mla, tiered, slow-disk, conversations, offload, planted" >&2 && exit 2 ;;
esac
events="{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$((port + 1000))\",\
\"replay_endpoint\":\"tcp://*:$((port + 2000))\",\"topic\":\"kv@127.0.0.1:$port@tiny\"}"
echo $$ >"$port.pid"
# Every server has the same weights, so that answers can be compared from one to another. The command `vllm serve`
# asks for a package of the name vllm and this one is called vllm-cpu; the module does not ask.
# shellcheck disable=SC2086 # the namespace's command is several words
exec ${KVASIR_NETNS:+ip netns exec $KVASIR_NETNS} nice -n 5 venv/bin/python -m vllm.entrypoints.openai.api_server --model "./${KVASIR_TEST_MODEL:-tinymodel}" --served-model-name tiny \
    --seed 7 --host "${KVASIR_ENGINE_HOST:-127.0.0.1}" --port "$port" --dtype bfloat16 --max-model-len 4096 --enforce-eager \
    --block-size 32 --num-gpu-blocks-override 512 --enable-prompt-tokens-details --kv-events-config "$events" \
    "${transfer[@]}" "$@"
