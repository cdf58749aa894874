#!/usr/bin/env bash
# Builds the release binary so that it does not depend on where it is built: release.sh [--twice] FOLDER [CARGO OPTIONS].
# The sources are those of the last commit. The binary is put into FOLDER, with its SHA-256 beside it; `--twice` builds it in two
# places and fails if the two differ.
set -euo pipefail
# A build that fails ends the script where it runs in a command substitution, too.
shopt -s inherit_errexit
here=$(dirname "$(readlink -f "$0")")
twice=
[ "${1:-}" != --twice ] || { twice=1 && shift; }
mkdir -p "${1:?a folder for the binary}"
out=$(readlink -f "$1")
shift
root=$(git -C "$here" rev-parse --show-toplevel)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH CARGO_INCREMENTAL=0

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
build() { # folder below $scratch; further options of cargo
    local tree=$scratch/$1 target=$scratch/$1-target
    shift
    mkdir "$tree"
    git -C "$root" archive HEAD | tar -x -C "$tree"
    # Paths are embedded by rustc, by C compilers (`__FILE__`) and in debugging information.
    (cd "$tree" && CARGO_TARGET_DIR=$target \
        RUSTFLAGS="--remap-path-prefix=$tree=/kvasir --remap-path-prefix=$target=/target --remap-path-prefix=$cargo_home=/cargo" \
        CFLAGS="-ffile-prefix-map=$tree=/kvasir -ffile-prefix-map=$target=/target -ffile-prefix-map=$cargo_home=/cargo" \
        cargo build --quiet --release --locked -p control-node "$@") >&2
    echo "$target/release/kvasir"
}

binary=$(build one "$@")
if [ -n "$twice" ]; then
    install -D "$binary" "$scratch/kept"
    rm -rf "$scratch/one-target"
    again=$(build another-place "$@")
    cmp "$scratch/kept" "$again"
    binary=$again
    echo "two builds in two places are equal"
fi
install "$binary" "$out/kvasir"
(cd "$out" && sha256sum kvasir | tee kvasir.sha256)
