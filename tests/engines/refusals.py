"""What the connector refuses at an engine's start, with vLLM's own types but no engine.

    PYTHONPATH=kvstore/capi/python $LAB/venv/bin/python tests/engines/refusals.py
"""

import sys
from types import SimpleNamespace

import torch
from kvasir_kv.settings import Settings
from kvasir_kv.vllm_engine import group_facts, refuse, refuse_group_handoff, refuse_handoff, windows
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=66)
CHUNKED = ChunkedLocalAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=128)
LARGE = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
UNIFORM = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": WINDOW, "b": WINDOW})
MIXED = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": WINDOW, "b": FULL})


def groups_of(specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs])


def check(
    specs=(FULL,), policy="recompute", algorithm="sha256_cbor", caching=True, scales=False, sleep=False, draft=None, store=None, **sizes
):
    """The connector's complaint about such an engine, or nothing."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=algorithm, enable_prefix_caching=caching, calculate_kv_scales=scales
        ),
        parallel_config=SimpleNamespace(**({"pipeline_parallel_size": 1, "world_size": 1} | sizes)),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=policy, kv_role="kv_consumer" if store and "transfer" in store else "kv_both"
        ),
        model_config=SimpleNamespace(enable_sleep_mode=sleep),
        speculative_config=draft,
    )
    caches = groups_of(specs)
    try:
        refuse(config, caches)
        settings = Settings.parse({"store": {"host_tier": {"capacity": "1 GiB"}, **(store or {})}})
        refuse_group_handoff(caches, settings)
        refuse_handoff(config, settings)
    except ValueError as problem:
        return str(problem)
    return ""


def main():
    failed = False
    for what, told, wanted in [
        ("one group of full attention", check(), ""),
        ("full attention, windows and chunks", check(specs=(FULL, WINDOW, WINDOW, CHUNKED)), ""),
        ("a sliding window", check(specs=(WINDOW,)), ""),
        ("many groups", check(specs=(FULL, *[WINDOW] * 65)), "66 groups of KV caches are more than 65"),
        ("layers of one kind and several sizes", check(specs=(UNIFORM, FULL)), ""),
        ("layers of two kinds in a group", check(specs=(MIXED, FULL)), "neither full, sliding window nor chunked"),
        ("recurrent states", check(specs=(FULL, MAMBA)), "neither full, sliding window nor chunked"),
        ("blocks of two sizes", check(specs=(LARGE, WINDOW)), "blocks of [32, 64] tokens"),
        ("speculation over windows", check(specs=(FULL, WINDOW), draft=object()), "speculative decoding"),
        ("speculation over one window", check(specs=(WINDOW,), draft=object()), "speculative decoding"),
        ("speculation", check(draft=object()), ""),
        ("hand-offs of windows", check(specs=(WINDOW,), store={"transfer": {}}), "not handed over"),
        ("windows from other nodes", check(specs=(FULL, WINDOW), store={"remote_tier": {"nodes": ["a:1"]}}), ""),
        ("hand-offs", check(store={"transfer": {}}), ""),
        ("pipeline stages", check(pipeline_parallel_size=2), ""),
        ("pipeline stages and windows", check(specs=(FULL, WINDOW), pipeline_parallel_size=2), "need one group of full attention"),
        ("pipeline stages and one window", check(specs=(WINDOW,), pipeline_parallel_size=2), "need one group of full attention"),
        ("pipeline stages over another executor", check(pipeline_parallel_size=2, distributed_executor_backend="external_launcher"), "only the last one"),
        ("hand-offs of pipeline stages", check(pipeline_parallel_size=2, world_size=2, store={"transfer": {}}), "hands no blocks over"),
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
    found = windows(groups_of((FULL, WINDOW, CHUNKED, UNIFORM)))
    # A token attends to itself and 65 before it: if it is the first of its block, to the last one of the third block before.
    good = found == [None, 3, 4, 3]
    print(f"  {'ok' if good else 'FAILED'}: windows of {found} blocks")
    # Blocks of the same layout and another window are others; one group of full attention has the names that it had.
    other = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=67)
    facts = [repr(group_facts(groups_of(specs))) for specs in ((FULL,), (FULL, WINDOW), (FULL, other), (WINDOW, FULL))]
    told_apart = facts[0] == "[]" and len(set(facts)) == 4
    print(f"  {'ok' if told_apart else 'FAILED'}: groups of four engines are told apart")
    sys.exit(1 if failed or not good or not told_apart else 0)


if __name__ == "__main__":
    main()
