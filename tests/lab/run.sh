#!/usr/bin/env bash
# The RDMA lab in one command: builds what is tested, boots a VM with two Soft-RoCE rails and runs suite.sh inside.
#   run.sh [--install] [PACKAGE/TEST…]     tests to run instead of those listed below
# One line per check, a sum, and an exit code that says the same. KVASIR_LAB_ONLY=<regular expression> chooses checks.
# `SKIPPED: reason` and 77 where there is no QEMU and it cannot be had.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$(readlink -f "$here/../..")

# What runs in the VM: package/test target. `lib` stands for the package's unit tests.
tests=()

[ "${1:-}" != --install ] || { "$here/install.sh" && shift; }
[ $# -eq 0 ] || tests=("$@")

# Reads cargo's messages, one JSON object per line, and prints the executables among them. Only cargo knows where it
# puts them: the target folder is configurable, and the names of test binaries end in a hash.
executables() { # whether built as a test (true or false), the target's name
    sed -n '/"reason":"compiler-artifact"/ {
        /"name":"'"$2"'"/ { /"test":'"$1"'},/ s/.*"executable":"\([^"]*\)".*/\1/p; }
    }'
}

built() { # what cargo was asked for, what was found
    [ -n "$2" ] && [ -x "$2" ] && echo "$2" && return
    echo "run.sh: cargo named no executable for $1" >&2
    exit 1
}

build_test() { # package/target
    local package=${1%%/*} target=${1#*/} what=(--test "${1#*/}") found
    if [ "$target" = lib ]; then
        what=(--lib)
        target=${package//-/_}
    fi
    found=$(cargo test --no-run --quiet -p "$package" "${what[@]}" --message-format=json-render-diagnostics |
        executables true "$target" | tail -n 1)
    built "$1" "$found"
}

# A machine that has no VM is told so before it builds anything.
prepared=$("$here/kernel.sh") || { code=$? && echo "$prepared" && exit $code; }
cd "$root"
kvasir=$(cargo build --release --quiet -p control-node --message-format=json-render-diagnostics |
    executables false kvasir | tail -n 1)
kvasir=$(built kvasir "$kvasir")
binaries=()
for test in "${tests[@]}"; do
    binary=$(build_test "$test")
    binaries+=("$binary")
done
"$here/vm.sh" --project "$root" --memory 4096 --timeout 600 -- \
    env KVASIR="$kvasir" KVASIR_LAB_ONLY="${KVASIR_LAB_ONLY:-}" "$here/suite.sh" "${binaries[@]}"
