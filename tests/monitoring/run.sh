#!/usr/bin/env bash
# The Grafana dashboard and the Prometheus rules, as Prometheus' own promtool reads them: every expression of a panel and of an
# alert, and which alerts fire for what is measured.
#   tests/monitoring/run.sh [KVASIR]
# Needs Python 3, and promtool or Debian's apt-get to download it; skips with 77 without them.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
kvasir=$(readlink -f "${1:-target/debug/kvasir}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
promtool=$(command -v promtool || true)
if [ -z "$promtool" ]; then
    if ! (cd "$folder" && apt-get download prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool) >"$folder/log" 2>&1; then
        echo "SKIPPED: no promtool, and Debian's package prometheus could not be downloaded: $(tail -n 1 "$folder/log")"
        exit 77
    fi
    promtool=$folder/usr/bin/promtool
fi
"$kvasir" deploy monitoring --output "$folder" 2>/dev/null
"$promtool" check rules "$folder/rules.yaml" >"$folder/log" || { cat "$folder/log"; exit 1; }
echo "ok: $(grep -o '[0-9]* rules found' "$folder/log") in rules.yaml"
python3 - "$folder" <<'END'
"""The expressions of the dashboard's panels as rules, so that promtool reads them."""
import json
import sys

folder = sys.argv[1]
dashboard = json.load(open(f"{folder}/dashboard.json"))
panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
taken = set()
for panel in dashboard["panels"]:
    place = panel["gridPos"]
    cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
    assert not cells & taken and place["x"] + place["w"] <= 24, f"panels overlap: {panel['title']}"
    taken |= cells
assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]), "ids are not unique"
expressions = [target["expr"].replace("$__rate_interval", "1m") for panel in panels for target in panel["targets"]]
rules = [{"record": f"panel:expression{at}", "expr": expression} for at, expression in enumerate(expressions)]
json.dump({"groups": [{"name": "panels", "rules": rules}]}, open(f"{folder}/panels.yaml", "w"))
print(f"ok: {len(panels)} panels, none over another, with {len(expressions)} expressions")
END
"$promtool" check rules "$folder/panels.yaml" >"$folder/log" || { cat "$folder/log"; exit 1; }
echo "ok: promtool reads them all"
cp tests/monitoring/alerts.yaml "$folder/alerts.yaml"
"$promtool" test rules "$folder/alerts.yaml" >"$folder/log" || { cat "$folder/log"; exit 1; }
echo "ok: alerts fire for what they are about, and not beside it ($(grep -c 'alertname:' tests/monitoring/alerts.yaml) cases)"
# A mistake must be noticed.
sed -i 's/workers_ready) == 0/workers_ready) == 7/' "$folder/rules.yaml"
if "$promtool" test rules "$folder/alerts.yaml" >/dev/null 2>&1; then
    echo "the cases do not notice a wrong rule" >&2
    exit 1
fi
echo "all of it works"
