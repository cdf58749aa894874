"""Kvasir's connector for vLLM's MLA on a CPU, which computes behind loaded blocks only where a single token is left: a decode.

vLLM turns prefix caching off there, and the connector refuses such engines; the lane `mla` asks for nothing but prompts of which one token
is left. Its loads bring wrong blocks while a file exists (see wrong_blocks.py).
"""

from typing import Any

from wrong_blocks import WrongBlocks


class Latents(WrongBlocks):
    """See the module's documentation."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        cache = vllm_config.cache_config
        before, cache.enable_prefix_caching = cache.enable_prefix_caching, True
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            cache.enable_prefix_caching = before
