"""Kvasir's store of KV blocks for inference engines.

In reading order: `library` binds `libkvasir_kv`; `settings` are what an engine is started with; `identity` names
blocks; `planes` finds a block's bytes in an engine's tensors; `messages` are what the two sides of an engine tell each
other: `scheduler` decides what is loaded and saved, `worker` does it; `vllm` fits both to vLLM's interface for
connectors.

Only `vllm` and its `vllm_engine` and `vllm_metrics` import vLLM and PyTorch; all else needs the standard library alone.
"""
