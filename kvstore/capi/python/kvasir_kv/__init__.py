"""Kvasir's store of KV blocks for inference engines.

In reading order: `library` binds `libkvasir_kv`; `settings` are what an engine is started with; `identity` names
blocks; `planes` finds a block's bytes in an engine's tensors; `messages` are what the two sides of an engine tell each
other: `scheduler` decides what is loaded and saved, `worker` does it; `vllm` fits both to vLLM's interface for
connectors. `sglang` fits the store to SGLang's hierarchical cache, without `scheduler` and `worker`.

Only `vllm`, `vllm_engine`, `vllm_metrics` and `sglang` import an engine and PyTorch. `identity.hub_commit` imports `huggingface_hub`; all else
needs the standard library alone.
"""
