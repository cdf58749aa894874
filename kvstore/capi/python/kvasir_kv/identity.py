"""Names of blocks: 16 bytes that stand for everything that decides a block's bytes.

vLLM's own hash of a block is a chain over the tokens up to its end and over what else the request brings into them
(multimodal inputs, LoRA's name, cache salt). What it leaves out is added here: as a key, the facts that hold for all
blocks of a worker (model, weights, layout, rank); as a salt, those of one request (the files of its LoRA adapter).

A wrong answer is worse than a miss: what cannot be told apart for certain gets a name that no later process finds.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from .library import IDENTITY_BYTES

_log = logging.getLogger("vllm.kvasir_kv")

_TAG_BYTES = 2
"""Enough to route by: a gateway takes blocks of one key in 65,536 for those of another."""

_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Of each file of weights, spread evenly: 256 KiB are read."""

_TENSOR_SAMPLES, _WHOLE_BYTES = 8, 64 << 10
"""Samples of each large tensor, and how long a tensor is that is read whole."""

_COMMIT = re.compile("[0-9a-f]{40}")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model")


def key(facts: Mapping[str, object]) -> bytes:
    """32 bytes for the facts of a worker. Anything that JSON does not have is taken by its text."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"kvasir-kv-vllm-2").digest()


def identities(of_key: bytes, hashes: Iterable[bytes]) -> bytes:
    """The names of blocks, one after the other, from the engine's hashes.

    The second half of a name is the end of the hash, by which the engine's events call a block without a salt (`engine_hash`). The
    first tells it from blocks of the same tokens under other facts; it begins with the key's `tag`. Of blocks under one key 112 bits
    differ.
    """
    blake2b, half, start = hashlib.blake2b, IDENTITY_BYTES // 2, of_key[:_TAG_BYTES]
    rest = half - _TAG_BYTES
    return b"".join(start + blake2b(name, digest_size=rest, key=of_key).digest() + name[-half:] for name in hashes)


def tag(of_key: bytes) -> str:
    """How the names of a worker's blocks begin, in hexadecimal digits: a gateway tells them from others in a shared store by it."""
    return of_key[:_TAG_BYTES].hex()


def engine_hash(name: bytes) -> int:
    """The number by which the engine's events call a block of this name, or of this hash."""
    return int.from_bytes(name[-IDENTITY_BYTES // 2 :], "big")


def salted(salt: bytes, hashes: list[bytes]) -> list[bytes]:
    """The engine's hashes, told apart from those with another salt. An empty salt changes nothing."""
    if not salt:
        return hashes
    salt_key = hashlib.blake2b(salt, digest_size=32).digest()
    return [hashlib.blake2b(name, digest_size=32, key=salt_key).digest() for name in hashes]


def weights(path: str) -> object:
    """What tells the weights at a path from others: names, sizes and times of files; nothing without such a folder.

    Reading gigabytes to hash them would cost each start seconds; whoever writes new weights moves the times.
    """
    place = Path(path)
    if place.is_file():
        return _facts_of(place)
    if not place.is_dir():
        return None
    return sorted(_facts_of(file) for file in place.iterdir() if file.suffix in _WEIGHT_SUFFIXES and file.is_file())


def portable(place: str, commit: str | None) -> object:
    """What tells the weights at a place from others on every machine, or nothing: files have other times elsewhere.

    The commit, or names and sizes of files with a hash of samples: other weights differ nearly everywhere.
    """
    if commit:
        return commit
    path = Path(place)
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    return [_sampled(file) for file in files if file.suffix in _WEIGHT_SUFFIXES and file.is_file()] or None


def _sampled(file: Path) -> tuple[str, int, str]:
    """Name, size, and a hash of samples. Of a safetensors file: its header, whole small tensors (scales, norms), and parts of each
    large one, so that no tensor is left out.
    """
    size, digest = file.stat().st_size, hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        ranges = _tensors(opened, size) if file.suffix == ".safetensors" else []
        for start, stop in ranges or [(0, size)]:
            if ranges and stop - start <= _WHOLE_BYTES:
                opened.seek(start)
                digest.update(opened.read(stop - start))
                continue
            samples = _TENSOR_SAMPLES if ranges else _SAMPLES
            for at in range(samples):
                opened.seek(start + (stop - start) * at // samples)
                digest.update(opened.read(min(_SAMPLE_BYTES, stop - opened.tell())))
    return file.name, size, digest.hexdigest()


def _tensors(opened: BinaryIO, size: int) -> list[tuple[int, int]]:
    """The ranges of a safetensors file, its header among them (8 bytes of length, then JSON); none if it is no such file."""
    length = int.from_bytes(opened.read(8), "little")
    if not 0 < length <= size - 8:
        return []
    try:
        header = json.loads(opened.read(length))
        offsets = [tuple(fact["data_offsets"]) for name, fact in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    first = 8 + length
    ranges = sorted((first + start, first + stop) for start, stop in offsets)
    return [(0, first), *(one for one in ranges if first <= one[0] <= one[1] <= size)]


def is_commit(revision: str | None) -> bool:
    return _COMMIT.fullmatch(revision or "") is not None


def hub_commit(name: str, revision: str | None, folder: str | None) -> str | None:
    """The commit of a model of Hugging Face's hub: its files lie below a folder, or where the hub puts them."""
    if is_commit(revision):
        return revision
    from huggingface_hub import snapshot_download

    try:
        # Files of the revision have just been loaded: the folder that they lie in bears the commit's name.
        snapshot = snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True)
    except (OSError, ValueError):
        return None
    commit = Path(snapshot).name
    return commit if is_commit(commit) else None


def source(place: str, commit: str | None) -> object:
    """What tells the weights at a place from others, be it a path or a name in some collection of models.

    A name or an address alone does not: other weights may be there tomorrow. With neither files to look at nor a commit
    the answer is one that no later process gives.
    """
    files = weights(place)
    if files or commit:
        return [files, commit]
    _log.warning("Nobody can tell later whether %s has the same weights: only this process finds its blocks.", place)
    return os.urandom(16).hex()


def tenant(cache_salt: str | None) -> int:
    """The number of a tenant, who is whoever has one `cache_salt`; 0: requests without one."""
    if not cache_salt:
        return 0
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=4).digest()
    # 0 and 2^32 - 1 are taken.
    return int.from_bytes(digest, "big") % ((1 << 32) - 2) + 1


def adapter(process: bytes, name: str, number: int, path: str) -> bytes:
    """A salt for the requests of a LoRA adapter, which holds for one process.

    The engine knows an adapter by its name and loads its files when it pleases, so that nobody else can say which
    files' weights a block was computed with: after a restart such blocks are misses. New files of the same name are
    another adapter.
    """
    try:
        files = weights(path)
    except OSError:
        files = None
    facts = json.dumps([name, number, path, files])
    return hashlib.blake2b(facts.encode(), digest_size=32, key=process).digest()


def _facts_of(file: Path) -> tuple[str, int, int]:
    facts = file.stat()
    return file.name, facts.st_size, facts.st_mtime_ns
