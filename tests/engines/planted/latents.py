"""KvasirConnector without its refusal of engines whose prefix caching is off, for vLLM's MLA on a CPU.

vLLM computes behind loaded blocks there only where a single token is left: a decode. The lane `mla` asks for nothing else. Its loads bring wrong blocks while a file exists (see wrong_blocks.py).
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
