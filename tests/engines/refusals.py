"""What the connector refuses at an engine's start, with vLLM's own types but no engine.

    PYTHONPATH=kvstore/capi/python $LAB/venv/bin/python tests/engines/refusals.py
"""

import sys
from types import SimpleNamespace

import torch
from kvasir_kv.vllm_engine import refuse
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64)


def check(specs=(FULL,), policy="recompute", algorithm="sha256_cbor", caching=True, scales=False, sleep=False, **sizes):
    """The connector's complaint about such an engine, or nothing."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=algorithm, enable_prefix_caching=caching, calculate_kv_scales=scales
        ),
        parallel_config=SimpleNamespace(**sizes),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        model_config=SimpleNamespace(enable_sleep_mode=sleep),
    )
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    try:
        refuse(config, caches)
    except ValueError as problem:
        return str(problem)
    return ""


def main():
    failed = False
    for what, told, wanted in [
        ("one group of full attention", check(), ""),
        ("two groups", check(specs=(FULL, WINDOW)), "not one group"),
        ("a sliding window", check(specs=(WINDOW,)), "not one group"),
        ("pipeline stages", check(pipeline_parallel_size=2), "pipeline_parallel_size is 2"),
        ("context parallel decoding", check(decode_context_parallel_size=2), "decode_context_parallel_size is 2"),
        ("a weak hash", check(algorithm="xxhash"), "could give two prompts one name"),
        ("no prefix caching", check(caching=False), "prefix caching is off"),
        ("scales computed while running", check(scales=True), "calculate_kv_scales"),
        ("sleep mode", check(sleep=True), "sleep mode"),
        ("failing requests", check(policy="fail"), 'set "recompute"'),
        ("two things at once", check(policy="fail", sleep=True), "sleep mode"),
    ]:
        good = wanted in told if wanted else not told
        failed |= not good
        print(f"  {'ok' if good else 'FAILED'}: {what}: {told or 'accepted'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
