#!/usr/bin/env bash
# Installs what the RDMA lab needs on a Debian machine: QEMU, what makes its kernel and initramfs, and perftest.
# Does nothing where all is there. Prints `SKIPPED: reason` and exits with 77 where it cannot be had.
set -euo pipefail

skip() {
    echo "SKIPPED: $*"
    exit 77
}

# A command, and the package that brings it. The guest runs on the host's own files, so what the suite calls inside
# the VM is needed here too.
needs="qemu-system-x86_64 qemu-system-x86
busybox busybox-static
cpio cpio
modprobe kmod
xz xz-utils
zstd zstd
flock util-linux
ip iproute2
rdma iproute2
ss iproute2
ibv_devinfo ibverbs-utils
ib_write_bw perftest"

missing=()
while read -r command package; do
    command -v "$command" >/dev/null || missing+=("$package")
done <<<"$needs"
# Without its driver for Soft-RoCE libibverbs lists no device.
compgen -G "/usr/lib/*/libibverbs/librxe-*.so" >/dev/null || missing+=(ibverbs-providers)
# A busybox that needs shared libraries cannot start in an initramfs that has none.
! ldd "$(command -v busybox)" 2>/dev/null | grep -q '=>' || missing+=(busybox-static)
[ ${#missing[@]} -eq 0 ] || mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

[ "$(uname -m)" = x86_64 ] || skip "the lab's VM is x86-64, this machine is $(uname -m)"
[ ${#missing[@]} -gt 0 ] || exit 0
command -v apt-get >/dev/null || skip "these packages are not here, and neither is apt-get: ${missing[*]}"
[ "$(id -u)" = 0 ] || skip "these packages are not here, and only root can install them: ${missing[*]}"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt-get update -q >"$log" 2>&1 || true
# Some images carry a qemu-utils newer than any QEMU that their sources offer; it conflicts with that QEMU and has to
# step back to the same version.
candidate() { apt-cache policy "$1" | awk '$1 == "Candidate:" { print $2 }'; }
if [[ " ${missing[*]} " == *" qemu-system-x86 "* ]]; then
    missing+=(seabios)
    installed=$(dpkg-query -W -f '${Version}' qemu-utils 2>/dev/null || true)
    emulator=$(candidate qemu-system-x86)
    if [ -n "$installed" ] && [ -n "$emulator" ] && dpkg --compare-versions "$installed" gt "$emulator"; then
        missing+=("qemu-utils=$emulator")
    fi
fi
echo "installing ${missing[*]}"
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends --allow-downgrades "${missing[@]}" \
    >>"$log" 2>&1 || skip "apt-get cannot install ${missing[*]}: $(grep '^E:' "$log" | tail -1)"
