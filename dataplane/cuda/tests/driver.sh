#!/usr/bin/env bash
# Holds this crate against NVIDIA's real driver libraries and headers, and the kernels against its real compilers. No GPU
# is needed, and nothing is installed: packages are unpacked into a folder.
#   dataplane/cuda/tests/driver.sh [--without-kernels] [folder]
# For each driver: every function of the table is found, those that came later exactly where the version promises them and
# in the form that is asked for, and without a device the reason is told. For each header: a C file of every signature,
# constant and structure that is used compiles, and one of what the double takes from it. For each NVRTC: all kernels
# compile, which takes minutes.
# What cannot be had is named; `SKIPPED: reason` and 77 when that is everything.
# Mirrors: DEBIAN_MIRROR, UBUNTU_MIRROR. KVASIR, the path of the built program, adds its `doctor`.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
kernels=yes
[ "${1:-}" != --without-kernels ] || { kernels= && shift; }
if [ $# -gt 0 ]; then
    mkdir -p "$1" && folder=$(cd "$1" && pwd)
else
    folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
fi
debian=${DEBIAN_MIRROR:-http://deb.debian.org/debian} ubuntu=${UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}

# Driver packages: one that is too old (11.0), the oldest that suffices (11.4), then 12.0, 12.2, 12.4, 12.8, 13.0 and 13.2.
packages=(libnvidia-tesla-450-cuda1 libnvidia-tesla-470-cuda1 libnvidia-tesla-cuda1 libcuda1/bookworm libcuda1/trixie
    libnvidia-compute-570/plucky-updates libnvidia-compute-580/noble-updates libnvidia-compute-595/noble-updates)
# Headers and compilers of a release, as NVIDIA's wheels: the first is the one that the types were made of.
wheels=("nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-nvrtc-cu12==12.8.93" "nvidia-cuda-runtime nvidia-cuda-nvrtc")

apt() {
    local program=$1 state=$folder/apt
    shift
    "$program" -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state/cache" -o Dir::Etc::SourceList="$state/sources" \
        -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=root "$@"
}

# Sources of its own, each signed: a distribution whose key is not at hand is left out.
sources() {
    local state=$folder/apt keys=/usr/share/keyrings
    mkdir -p "$state"/{lists,cache/archives}/partial "$state/keys" "$folder/drivers"
    local key=$keys/debian-archive-keyring.gpg
    : >"$state/sources"
    if [ -e $key ]; then
        for suite in bookworm trixie sid; do
            echo "deb [arch=amd64 signed-by=$key] $debian $suite non-free" >>"$state/sources"
        done
    fi
    key=$keys/ubuntu-archive-keyring.gpg
    if [ ! -e $key ]; then
        local package=pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb
        curl -fsS -m 60 -o "$state/keys.deb" "${ubuntu/http:/https:}/$package" && dpkg-deb -x "$state/keys.deb" "$state/keys"
        key=$state/keys$key
    fi
    if [ -e "$key" ]; then
        for suite in plucky-updates noble-updates; do
            echo "deb [arch=amd64 signed-by=$key] $ubuntu $suite restricted" >>"$state/sources"
        done
    fi
    apt apt-get -qq update
}

fetch_driver() {
    local target=$folder/drivers/${1//\//-}
    [ ! -e "$target" ] || return 0
    mkdir -p "$folder/packages" && rm -f "$folder"/packages/*
    (cd "$folder/packages" && apt apt-get -qq download "$1") && dpkg-deb -x "$folder"/packages/*.deb "$target.new" &&
        mv "$target.new" "$target" && rm "$folder"/packages/*
}

fetch_wheels() {
    local name=${1##* } && local target=$folder/wheels/${name//=/-}
    [ ! -e "$target" ] || return 0
    # shellcheck disable=SC2086 # two requirements
    python3 -m pip install -q --no-deps --only-binary=:all: --target "$target.new" $1 && mv "$target.new" "$target"
}

# A driver's library that root loads makes the node of a device that is not there: without this right it does not.
held() { if [ "$(id -u)" = 0 ]; then setpriv --bounding-set=-mknod --inh-caps=-mknod "$@"; else "$@"; fi; }
told() { held "$KVASIR" doctor | grep -A 1 '^GPU  .*CUDA driver '; }
failed=0 done=0
# A filter that nothing matches, and a test that leaves itself out, end with success too.
ran() {
    local said status=0
    said=$("$@" 2>&1) || status=$?
    echo "$said"
    [ $status = 0 ] && grep -q '^test result: ok\. [1-9][0-9]* passed' <<<"$said" && ! grep -qi 'skipped' <<<"$said"
}
check() { if "$@"; then done=$((done + 1)); else failed=$((failed + 1)); fi; }

{ command -v apt-get && command -v dpkg-deb && command -v curl; } >/dev/null && sources ||
    echo "SKIPPED: no driver packages: apt-get with dpkg-deb and curl finds no source" >&2
for package in "${packages[@]}"; do
    fetch_driver "$package" 2>"$folder/error" ||
        echo "SKIPPED: $package: $(tail -n 1 "$folder/error")" >&2
done
for pair in "${wheels[@]}"; do
    fetch_wheels "$pair" 2>"$folder/error" || echo "SKIPPED: $pair: $(tail -n 1 "$folder/error")" >&2
done

cd "$root"
test_of() { cargo test -q -p "$1" "${@:2}" -- --nocapture --test-threads=1; }
while IFS= read -r library; do
    echo "# ${library#"$folder/"}"
    KVASIR_LIBCUDA=$library check ran held cargo test -q -p dataplane-cuda --lib a_real_driver -- --nocapture
    [ -z "${KVASIR:-}" ] || LD_LIBRARY_PATH=$(dirname "$library") check told
done < <(find "$folder/drivers" -name libcuda.so.1 2>/dev/null | sort)
while IFS= read -r header; do
    echo "# ${header#"$folder/"}"
    KVASIR_CUDA_INCLUDE=$(dirname "$header") check ran test_of dataplane-cuda --lib the_header
    check cc -std=c11 -fsyntax-only -Wall -Werror -I "$(dirname "$header")" dataplane/cuda/tests/double/driver/abi.c
done < <(find "$folder/wheels" -name cuda.h 2>/dev/null | sort)
while IFS= read -r compiler; do
    echo "# ${compiler#"$folder/"}"
    export LD_LIBRARY_PATH=${compiler%/*}
    check ran test_of dataplane-cuda --test compile
    [ -z "$kernels" ] || KVASIR_NVRTC=$compiler check ran test_of dataplane-kernels --test nvrtc
done < <(find "$folder/wheels" -name 'libnvrtc.so.1?' 2>/dev/null | sort)
[ $((done + failed)) -gt 0 ] || { echo "SKIPPED: neither drivers nor wheels can be had here"; exit 77; }
echo "$done checks hold, $failed do not"
[ $failed = 0 ]
