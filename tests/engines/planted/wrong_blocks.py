"""Kvasir's connector with a planted fault: while a file exists, each load brings one block of another prompt.

The block in the middle of each load is taken from the load before it, which the store finds in good order: only the
answer shows that it is the wrong one. The lanes `offload`, `hybrid`, `pipeline` and `mla` check that their judgement does.
The file's path is in KVASIR_WRONG_BLOCKS.
"""

import dataclasses
import os
import pathlib
from typing import Any

from kvasir_kv.messages import Load
from kvasir_kv.vllm import KvasirConnector

_MARK = pathlib.Path(os.environ["KVASIR_WRONG_BLOCKS"])


class WrongBlocks(KvasirConnector):
    """See the module's documentation."""

    _before: list[bytes] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._told
        is_planted = _MARK.exists()
        self._working.load(dataclasses.replace(step, loads=[self._plant(load, is_planted) for load in step.loads]))

    def _plant(self, load: Load, is_planted: bool) -> Load:
        before, self._before = self._before, load.hashes
        if not (is_planted and before and load.hashes):
            return load
        hashes, middle = list(load.hashes), len(load.hashes) // 2
        hashes[middle] = before[min(middle, len(before) - 1)]
        return dataclasses.replace(load, hashes=hashes)
