#!/bin/sh
# Compiles the kernels with NVIDIA's run-time compiler (PyPI `nvidia-cuda-nvrtc-cu12`) and its assembler
# (`nvidia-cuda-nvcc-cu12`). No GPU is needed. Skips, and says so, where they cannot be installed.
# Usage: tests/nvrtc.sh [directory for the Python environment]
set -eu
cd "$(dirname "$0")/.."
venv=${1:-$(mktemp -d)/venv}
nvrtc=$(find "$venv" -name 'libnvrtc.so.1*' 2>/dev/null | head -n 1)
if [ -z "$nvrtc" ]; then
    python3 -m venv "$venv" && "$venv/bin/pip" install -q nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvcc-cu12 || {
        echo "SKIPPED: nvidia-cuda-nvrtc-cu12 cannot be installed here" >&2
        exit 0
    }
    nvrtc=$(find "$venv" -name 'libnvrtc.so.1*' | head -n 1)
fi
ptxas=$(find "$venv" -name ptxas -type f | head -n 1)
"$venv/bin/pip" list 2>/dev/null | grep -i '^nvidia'
[ -z "$ptxas" ] || export KVASIR_PTXAS="$ptxas"
KVASIR_NVRTC="$nvrtc" LD_LIBRARY_PATH="$(dirname "$nvrtc")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
    cargo test -p dataplane-kernels --test nvrtc -- --nocapture
