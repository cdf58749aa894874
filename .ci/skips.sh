#!/usr/bin/env bash
# Counts what a run of CI has skipped, by reason, and fails if something was skipped that `skips` does not name: skips.sh LOG.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
[ -s "$1" ] || { echo "skips.sh: there is no log $1" >&2 && exit 1; }
lines=$(grep -a 'SKIPPED' "$1" | sed 's/^ *//' || [ $? -eq 1 ])
[ -n "$lines" ] || { echo "nothing was skipped" && exit 0; }
while IFS=$'\t' read -r reason pattern; do
    case $reason in '#'* | '') continue ;; esac
    count=$(grep -cE -- "$pattern" <<<"$lines" || true)
    [ "$count" -eq 0 ] || printf '%5d skipped: %s\n' "$count" "$reason"
    lines=$(grep -vE -- "$pattern" <<<"$lines" || true)
done <"$here/skips"
[ -z "$lines" ] || { printf 'skipped, and not named in .ci/skips:\n%s\n' "$lines" && exit 1; }
