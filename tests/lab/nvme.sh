#!/usr/bin/env bash
# NVMe without an NVMe disk: builds the tests of the engines, boots the lab VM with an emulated disk behind an emulated
# IOMMU, and runs io_uring, passthrough and the user-space driver on it, beside fio. `--install` installs what is needed.
# Exit code 77: `SKIPPED: reason`.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$(readlink -f "$here/../..")
cd "$root"
[ "${1:-}" != --install ] || "$here/install.sh"
bad_sector=800000

built() { # cargo's arguments; the path of what was built
    cargo "$@" --message-format json 2>/dev/null |
        python3 -c 'import json, sys
paths = [m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")]
print(paths[-1] if paths else "")'
}

IO_TEST=$(built test -p kvstore-io --lib --no-run)
NVME_TEST=$(built test -p kvstore-nvme --test device --no-run)
NVME_IOPS=$(built build -p kvstore-nvme --example iops)
[ -n "$IO_TEST" ] && [ -n "$NVME_TEST" ] && [ -n "$NVME_IOPS" ] || { echo "the tests cannot be built" >&2 && exit 1; }
"$here/vm.sh" --nvme 512 --iommu --bad-sector $bad_sector --timeout 400 -- env IO_TEST="$IO_TEST" NVME_TEST="$NVME_TEST" \
    NVME_IOPS="$NVME_IOPS" NVME_BAD_SECTOR=$bad_sector "$here/guest/nvme.sh"
