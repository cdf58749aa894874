# Sourced by a suite inside a lab VM: one line per check, and the count of those that failed.
# shellcheck shell=bash
# KVASIR_LAB_ONLY, a regular expression, chooses checks by name; KVASIR_LAB_PATIENCE multiplies their limits.
passed=0 failed=0 skipped=0
step_log=$(mktemp)

# Runs a check and prints its line. Code 77 is `SKIPPED`. The last line of the output is shown, for what it measured;
# all of it when the check fails.
step() { # its name, its limit in seconds, the command (may be a function)
    local name=$1 limit=$(($2 * ${KVASIR_LAB_PATIENCE:-1})) started=$SECONDS code=0 last
    shift 2
    [[ $name =~ ${KVASIR_LAB_ONLY:-} ]] || return 0
    # A function has no process that `timeout` could end, so that the check is a job, and its group is ended.
    set -m
    "$@" >"$step_log" 2>&1 </dev/null &
    local job=$!
    set +m
    (sleep "$limit" && echo "out of time after $limit s" >>"$step_log" && kill -KILL -- "-$job") >/dev/null 2>&1 &
    local watchdog=$!
    wait "$job" 2>/dev/null || code=$?
    kill "$watchdog" 2>/dev/null || true
    # What the check left running must not disturb the next one.
    kill -KILL -- "-$job" 2>/dev/null || true
    last=$(grep -v '^-*$' "$step_log" | tail -n 1 | cut -c1-160) || true
    case $code in
    0) passed=$((passed + 1)) && echo "ok: $name ($((SECONDS - started)) s)${last:+: $last}" ;;
    77) skipped=$((skipped + 1)) && echo "skipped: $name: $last" ;;
    *)
        failed=$((failed + 1))
        echo "FAILED: $name (code $code after $((SECONDS - started)) s)"
        sed 's/^/    /' "$step_log" | tail -n "${KVASIR_LAB_LINES:-60}"
        ;;
    esac
}

# Prints the sum; fails if a check failed or if there was none.
summary() {
    echo "lab: $passed ok, $failed failed, $skipped skipped, $SECONDS s"
    [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
}
