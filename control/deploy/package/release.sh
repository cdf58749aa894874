#!/usr/bin/env bash
# Builds the release binary so that equal sources give equal bytes: release.sh [--twice] FOLDER [CARGO OPTIONS].
# The sources are those of the last commit. The binary has all features. It is put into FOLDER, with its SHA-256 beside it; `--twice` builds it twice
# from nothing and fails if the two differ.
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

# Always the same place: crates have names that depend on where their sources lie.
place=/tmp/kvasir-release
mkdir "$place" || { echo "release.sh: $place is there already: another build, or what one has left" >&2 && exit 1; }
trap 'rm -rf "$place"' EXIT
build() { # options of cargo
    rm -rf "$place/tree" "$place/target"
    mkdir "$place/tree"
    git -C "$root" archive HEAD | tar -x -C "$place/tree"
    # Paths are embedded by rustc, by C compilers (`__FILE__`) and in debugging information.
    (cd "$place/tree" && CARGO_TARGET_DIR=$place/target \
        RUSTFLAGS="--remap-path-prefix=$place/tree=/kvasir --remap-path-prefix=$place/target=/target --remap-path-prefix=$cargo_home=/cargo" \
        CFLAGS="-ffile-prefix-map=$place/tree=/kvasir -ffile-prefix-map=$place/target=/target -ffile-prefix-map=$cargo_home=/cargo" \
        cargo build --quiet --release --locked -p control-node --all-features "$@") >&2
}

build "$@"
install "$place/target/release/kvasir" "$out/kvasir"
if [ -n "$twice" ]; then
    build "$@"
    cmp "$out/kvasir" "$place/target/release/kvasir"
    echo "two builds from nothing are equal"
fi
(cd "$out" && sha256sum kvasir | tee kvasir.sha256)
