#!/usr/bin/env bash
# Installs a real SGLang that runs on a CPU, to test against: 6 GB and 5 to 10 minutes the first time.
#   LAB=/some/scratch/folder install.sh
#   BASE=/other/venv LAB=... install.sh     uses the packages of another venv with torch 2.13.0: 0.6 GB, 1 to 2 minutes
# SGLang's wheel comes from PyPI as it is. Its compiled CPU kernels (sgl-kernel) are on no index; stubs/sgl_kernel
# stands in for them, and patch.py says of SGLang's KV cache that it is host memory. Any x86 processor will do.
# Prints `SKIPPED: reason` and succeeds where it cannot be had; $LAB/installed exists only if all is there.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
LAB=${LAB:-${TMPDIR:-/tmp}/kvasir-sglang}
sglang=0.5.23 torch=2.13.0 torchvision=0.28.0 nixl=1.5.1 dill=0.4.0
skip() { echo "SKIPPED: $*"; exit 0; }

mkdir -p "$LAB"
cd "$LAB"
[ "$(cat installed 2>/dev/null)" != "$sglang" ] || exit 0
rm -f installed
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ "$free" -ge $([ -n "${BASE:-}" ] && echo 2 || echo 9) ] || skip "$LAB has $free GB free, SGLang needs 9 (2 with BASE)"
# The wheel is for one version of Python, and patch.py for what that version runs.
python=$([ -n "${BASE:-}" ] && echo "$BASE/bin/python3" || command -v python3.11 || command -v python3 || echo python3)
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    skip "this needs Python 3.11 (python3.11 on the PATH), not $("$python" --version 2>&1)"
[ -x venv/bin/pip ] || { rm -rf venv && "$(readlink -f "$(command -v "$python")")" -m venv venv; } ||
    skip "python3 cannot make a virtual environment"
site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
[ -z "${BASE:-}" ] ||
    "$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/zz_base.pth"

# The wheel first: if there is none for this machine, nothing else needs to be fetched.
venv/bin/pip download -q --no-deps -d wheel "sglang==$sglang" 2>pip.log ||
    skip "pip has no sglang $sglang for this machine ($(tail -1 pip.log))"
echo "installing SGLang $sglang into $LAB; this takes some minutes"
# Of its requirements those that a CPU server imports, in the versions that it asks for; torch is one that is also
# the vLLM lab's.
venv/bin/python - wheel/sglang-"$sglang"-*.whl >requirements.txt <<'PYTHON'
import re, sys, zipfile
WANTED = """aiohttp apache-tvm-ffi compressed-tensors distro easydict einops fastapi gguf interegular ipython llguidance
mistral-common msgspec ninja numpy nvidia-ml-py openai openai-harmony orjson packaging partial-json-parser pillow
prometheus-client psutil pybase64 pydantic python-dateutil python-multipart pyzmq regex requests scipy sentencepiece
setproctitle soundfile tiktoken tokenizers tqdm transformers uvicorn uvloop watchfiles xgrammar xxhash zstandard""".split()
wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))).decode()
for need in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M):
    name = re.match(r"[\w.-]+", need)[0].lower().replace("_", "-")
    if "extra ==" not in need and name in WANTED:
        print(need)
PYTHON
venv/bin/pip install -q "torch==$torch" "torchvision==$torchvision" 2>>pip.log
# SGLang imports dill and does not ask for it.
venv/bin/pip install -q -r requirements.txt "dill==$dill" "nixl==$nixl" 2>>pip.log
venv/bin/pip install -q --no-deps wheel/sglang-"$sglang"-*.whl 2>>pip.log
cp -r "$here/stubs/sgl_kernel" "$site/"
venv/bin/python "$here/patch.py" "$site"
[ -d tinymodel ] || venv/bin/python "$here/../make_model.py" tinymodel
venv/bin/pip freeze >frozen.txt
echo "$sglang" >installed
