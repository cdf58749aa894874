#!/usr/bin/env bash
# Tests of crates with unsafe code under AddressSanitizer, those of the lock-free index under ThreadSanitizer (the lists are below):
#   sanitizers.sh [address|thread]…
# ThreadSanitizer runs by hand: now and then it takes for a race what the test harness does, which is in the standard library.
# Sanitizers are unstable options of rustc; RUSTC_BOOTSTRAP=1 lets the stable compiler take them. `SKIPPED: reason` and 77 where the
# toolchain has no runtime for them. The standard library is not instrumented: what ThreadSanitizer says about it alone is
# left out (sanitizers.supp).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- address thread
triple=$(rustc -vV | sed -n 's/^host: //p')
runtimes=$(rustc --print sysroot)/lib/rustlib/$triple/lib
export RUSTC_BOOTSTRAP=1 CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=${SANITIZERS_TARGET_DIR:-$PWD/target/sanitizers}
# A leak at exit is what detached threads still hold.
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS="suppressions=$PWD/tests/sanitizers.supp halt_on_error=1"

# Programs with a planted bug each, which the sanitizer must report.
planted_address='fn main() { let gone = { let kept = vec![1_u8; 64]; kept.as_ptr() }; std::process::exit(i32::from(unsafe { gone.read_volatile() } == 255)); }'
planted_thread='static mut COUNT: u64 = 0;
fn main() { let add = || for _ in 0..1000 { unsafe { COUNT += 1 } }; std::thread::scope(|scope| { scope.spawn(add); scope.spawn(add); }); }'

# package: what runs (`lib`: unit tests; else a test target)
unsafe_crates=(dataplane-memory:lib dataplane-shm:lib dataplane-shm:hardship dataplane-tcp:lib dataplane-tcp:contract dataplane-verbs:software
    dataplane-transfer:simulation kvstore-catalog:model kvstore-io:lib kvstore-disk:lib kvstore-nvme:software)
# Not crates with a `Mutex` (the standard library takes a contended one without instrumentation), and not those over memory that is
# mapped by system calls (an address that is mapped again is taken for the same memory). Loom has their protocols (loom.sh).
lock_free_crates=(router-radix:lib router-radix:stress)

# A sanitizer's own memory is not measured: tests of resident memory are left out.
for sanitizer in "$@"; do
    case $sanitizer in
    address) runtime=asan flags= crates=("${unsafe_crates[@]}") ;;
    # Crates of the standard library are built without it.
    thread) runtime=tsan flags=-Cunsafe-allow-abi-mismatch=sanitizer crates=("${lock_free_crates[@]}") ;;
    *) echo "sanitizers.sh: $sanitizer is neither address nor thread" >&2 && exit 2 ;;
    esac
    compgen -G "$runtimes/librustc-*_rt.$runtime.a" >/dev/null || { echo "SKIPPED: no runtime of $sanitizer for $triple" && exit 77; }
    planted=planted_$sanitizer
    mkdir -p "$CARGO_TARGET_DIR"
    # shellcheck disable=SC2086 # no flag is no argument
    rustc -Zsanitizer="$sanitizer" $flags --target "$triple" --edition 2021 --allow static_mut_refs -o "$CARGO_TARGET_DIR/$planted" - <<<"${!planted}"
    told=$("$CARGO_TARGET_DIR/$planted" 2>&1) || true
    grep -qE 'heap-use-after-free|ThreadSanitizer: data race' <<<"$told" || {
        echo "sanitizers.sh: the $sanitizer sanitizer does not report a planted bug: $told" >&2 && exit 1
    }
    for crate in "${crates[@]}"; do
        package=${crate%:*} target=${crate#*:}
        what=(--test "$target")
        [ "$target" != lib ] || what=(--lib)
        out=$(RUSTFLAGS="-Zsanitizer=$sanitizer $flags" cargo test --quiet --locked --target "$triple" -p "$package" --all-features "${what[@]}" -- --skip memory_returns 2>&1) ||
            { printf '%s\n' "$out" | tail -n 80 && exit 1; }
        passed=$(grep -o '[0-9]* passed' <<<"$out" | tail -n 1)
        [ "${passed%% *}" -gt 0 ] || { echo "sanitizers.sh: no test of $package $target ran" >&2 && exit 1; }
        echo "$sanitizer: $package $target: $passed"
    done
done
