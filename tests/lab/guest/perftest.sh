# Sourced inside a lab VM: perftest's programs, both ends on one rail, with what they measured as a line.
# shellcheck shell=bash

# Prints `<program> <bytes> bytes: <number> <unit>`. Fails if it measured nothing or nothing above zero.
perftest() { # the program, the device, more options for both ends
    local program=$1 device=$2 server output port=18515
    shift 2
    local options=(-d "$device" -x "$(gid_index "$device")" -p "$port" "$@")
    "$program" "${options[@]}" >/dev/null 2>&1 &
    server=$!
    wait_for_listener "$port"
    # -F: the emulated clock varies, which is no reason to refuse.
    output=$("$program" -F "${options[@]}" 127.0.0.1) || { echo "$output" && return 1; }
    wait "$server"
    perftest_result "$program" <<<"$output"
}

# Takes the number out of a perftest table on standard input: the typical time of a latency test, the average rate of a
# bandwidth test.
perftest_result() { # the program
    awk -v program="$1" '
        BEGIN { latency = program ~ /_lat$/; column = latency ? 5 : 4; unit = latency ? "us" : "MB/s" }
        /^ #bytes/ { header = 1; next }
        header && $1 ~ /^[0-9]+$/ { print program ", " $1 " bytes: " $column " " unit; found = $column > 0 }
        END { exit !found }' || { echo "$1 printed no number above zero" && return 1; }
}

wait_for_listener() { # a TCP port
    local tries=0
    until ss -Hltn "sport = :$1" | grep -q .; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || { echo "nothing listens on port $1" && return 1; }
        sleep 0.1
    done
}
