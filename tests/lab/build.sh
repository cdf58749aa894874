# Sourced by the lab's commands: builds on the host what the VMs run.
# shellcheck shell=bash
root=$(readlink -f "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..")
cd "$root"

# Reads cargo's messages, one JSON object per line, and prints the executables among them. Only cargo knows where it
# puts them: the target folder is configurable, and the names of test binaries end in a hash.
executables() { # whether built as a test (true or false), the target's name, its package
    sed -n '/"reason":"compiler-artifact"/ {
        /"package_id":"[^"]*[/#]'"$3"'[#@]/ { /"name":"'"$2"'"/ { /"test":'"$1"'},/ s/.*"executable":"\([^"]*\)".*/\1/p; }; }
    }'
}

built() { # what cargo was asked for, what was found
    [ -n "$2" ] && [ -x "$2" ] && echo "$2" && return
    echo "run.sh: cargo named no executable for $1" >&2
    exit 1
}

failed() { # what cargo was asked for
    echo "run.sh: cargo could not build $1; $(df -h --output=avail "$root" | tail -n 1 | tr -d ' ') of disk are free" >&2
    exit 1
}

build_test() { # package/target
    local package=${1%%/*} target=${1#*/} found
    # With all features of the whole workspace, as the README's test command has them: after it nothing is built again.
    local what=(--workspace --all-features --test "$target")
    if [ "$target" = lib ]; then
        what=(-p "$package" --lib)
        target=${package//-/_}
    fi
    # Command substitutions do not inherit `set -e`: a build that fails is said here, beside what cargo printed.
    found=$(cargo test --no-run --quiet "${what[@]}" --message-format=json-render-diagnostics |
        executables true "$target" "$package" | tail -n 1) || failed "$1"
    built "$1" "$found"
}

build_kvasir() {
    local found
    [ -z "${KVASIR:-}" ] || { built "KVASIR=$KVASIR" "$KVASIR" && return; }
    found=$(cargo build --release --quiet -p control-node --features bench --message-format=json-render-diagnostics |
        executables false kvasir control-node | tail -n 1) || failed kvasir
    built kvasir "$found"
}
