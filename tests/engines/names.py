"""What decides the names of an engine's blocks, with vLLM's own configurations but no engine.

    PYTHONPATH=kvstore/capi/python $LAB/venv/bin/python tests/engines/names.py
"""

import pathlib
import sys
import tempfile
from types import SimpleNamespace

from kvasir_kv import identity
from kvasir_kv.vllm_engine import worker_facts
from vllm.config import LoadConfig, MultiModalConfig

COMMIT, OTHER = "1" * 40, "2" * 40


def model(name="someone/model", revision=COMMIT, multimodal=None, **more):
    return SimpleNamespace(model=name, revision=revision, quantization=None, dtype="bfloat16", seed=0,
                           hf_config=SimpleNamespace(to_dict=dict), compute_hash=lambda: "",
                           multimodal_config=multimodal, **more)


def key(of_model=None, draft=None, load=None):
    """The key of an engine with this model, these drafts and this loader."""
    draft = draft and SimpleNamespace(method="eagle", model=draft.model, draft_model_config=draft)
    config = SimpleNamespace(
        model_config=of_model or model(),
        speculative_config=draft,
        load_config=LoadConfig(**load or {}),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=32, prefix_caching_hash_algo="sha256_cbor"),
        parallel_config=SimpleNamespace(rank=0, world_size=1, tensor_parallel_size=1),
    )
    return identity.key(worker_facts(config, (), [], ""))


def images(**settings):
    return MultiModalConfig(mm_processor_kwargs=settings)


def tensorizer(uri):
    return {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": uri}}


def hub(folder, commit):
    """A hub's folder in which `main` of a model is this commit, for a loader."""
    place = pathlib.Path(folder, "models--someone--model")
    for file, text in [("refs/main", commit), (f"snapshots/{commit}/config.json", "{}")]:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    return {"download_dir": folder}


def main():
    failed = False

    def check(what, is_equal, one, other):
        nonlocal failed
        good = (one() == other()) == is_equal
        failed |= not good
        print(f"  {'ok' if good else 'FAILED'}: {'the same' if is_equal else 'other'} names: {what}")

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        file = pathlib.Path(folder, "model.tensors.bin")
        file.write_bytes(b"weights")
        ours, local = model(folder, None), tensorizer(str(file))
        for what, one in [
            ("a commit", key),
            ("a branch in the hub's folder", lambda: key(model(revision="main"), load=hub(cache, COMMIT))),
            ("no revision in the hub's folder", lambda: key(model(revision=None), load=hub(cache, COMMIT))),
            ("a folder", lambda: key(ours)),
            ("the same settings for images", lambda: key(model(multimodal=images(num_crops=4)))),
            ("tensors in a file", lambda: key(load=local)),
            ("drafts with a commit", lambda: key(draft=model("someone/eagle"))),
            ("drafts by the model itself", lambda: key(draft=model())),
        ]:
            check(what, True, one, one)
        for what, one in [
            ("no revision", lambda: key(model(revision=None))),
            ("a branch", lambda: key(model(revision="main"))),
            ("a file of a model that is named", lambda: key(model("someone/model:Q4_K_M", None))),
            ("an object store", lambda: key(model(folder, None, model_weights="s3://models/one"))),
            ("tensors at an address", lambda: key(load=tensorizer("s3://models/one.tensors"))),
            ("drafts without a commit", lambda: key(draft=model("someone/eagle", None))),
        ]:
            check(f"{what}, after a restart", False, one, one)
        for what, one, other in [
            ("commits", key, lambda: key(model(revision=OTHER))),
            ("a branch that has moved", lambda: key(model(revision=None), load=hub(cache, COMMIT)),
             lambda: key(model(revision=None), load=hub(cache, OTHER))),
            ("commits of drafts", lambda: key(draft=model("a/b")), lambda: key(draft=model("a/b", OTHER))),
            ("a loader's settings", key, lambda: key(load={"model_loader_extra_config": {"pattern": "other"}})),
            ("settings for images", lambda: key(model(multimodal=images(num_crops=4))),
             lambda: key(model(multimodal=images(num_crops=16)))),
        ]:
            check(what, False, one, other)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
