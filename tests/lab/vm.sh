#!/usr/bin/env bash
# Runs one command in a throw-away VM with Debian's stock kernel, which has the modules that this machine may lack
# (Soft-RoCE, NVMe, VFIO), and exits with the command's code.
#   vm.sh [options] -- COMMAND [ARGUMENT…]
#     --memory MIB      2048          --cpus N          2
#     --timeout S       300           --nvme MIB        an NVMe disk, /dev/nvme0n1
#     --bad-sector N    that disk's sector of 512 bytes that cannot be read
#     --iommu           an Intel IOMMU, for vfio-pci
#     --nic NETDEV      a virtio NIC on that QEMU netdev (`user,restrict=on`); repeatable: eth0, eth1, …
#     --share FOLDER    writable in the guest too, at the same path; repeatable
#     --project FOLDER  the folder that is writable and the command's working folder; the repository
#     --install         installs what is needed first (install.sh)
# The host's files are the guest's, read-only. QEMU emulates the CPU (TCG), which needs no privilege and no KVM but is
# slow: times and bandwidths inside mean something only as ratios. KVASIR_LAB_ACCEL and KVASIR_LAB_CPU are QEMU's
# -accel and -cpu for machines that have better. Exit codes of its own: 64 usage, 77 `SKIPPED: reason`, 124 out of
# time, 125 the guest ended without an answer (its console is printed).
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 64
}

memory=2048 cpus=2 seconds=300 nvme=0 bad_sector="" iommu=no project=$here/../.. install=no
nics=() shares=()
while [ $# -gt 0 ]; do
    case $1 in
    --iommu) iommu=yes && shift && continue ;;
    --install) install=yes && shift && continue ;;
    --) shift && break ;;
    esac
    [ $# -ge 2 ] || usage
    case $1 in
    --memory) memory=$2 ;;
    --cpus) cpus=$2 ;;
    --timeout) seconds=$2 ;;
    --nvme) nvme=$2 ;;
    --bad-sector) bad_sector=$2 ;;
    --nic) nics+=("$2") ;;
    --share) shares+=("$(readlink -f "$2")") ;;
    --project) project=$2 ;;
    *) usage ;;
    esac
    shift 2
done
[ $# -gt 0 ] || usage

[ $install = no ] || "$here/install.sh"
kernel=$("$here/kernel.sh") || { code=$? && echo "$kernel" && exit $code; }
shares=("$(readlink -f "$project")" "${shares[@]}")

# The job folder carries the command in, and the exit code and the kernel's console out.
job=$(mktemp -d)
emulator=
# shellcheck disable=SC2317 # the trap calls it
finish() {
    [ -z "$emulator" ] || kill "$emulator" 2>/dev/null || true
    rm -rf "$job"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cp "$here/guest/boot" "$job/boot"
printf '%s\n' "${shares[@]}" >"$job/shares"
echo "$kernel/lib/modules" >"$job/modules"
printf 'cd %q && exec ' "${shares[0]}" >"$job/command"
printf '%q ' "$@" >>"$job/command"

folder() { # the tag in the guest, the path on the host, more options
    arguments+=(-virtfs "local,mount_tag=$1,path=$2,security_model=none,multidevs=remap${3:-}")
}
append="console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off tsc=reliable"
# shellcheck disable=SC2054 # the commas are QEMU's
arguments=(
    -M q35,kernel-irqchip=split -accel "${KVASIR_LAB_ACCEL:-tcg,thread=multi}" -cpu "${KVASIR_LAB_CPU:-max}"
    -smp "$cpus" -m "$memory" -nodefaults -display none -no-reboot
    -serial "file:$job/console" -chardev stdio,id=output,signal=off -device virtio-serial -device virtserialport,chardev=output
    -kernel "$kernel/vmlinux" -initrd "$kernel/initrd.gz"
)
folder host / ,readonly=on
folder job "$job"
for index in "${!shares[@]}"; do folder "share$index" "${shares[index]}"; done
for index in "${!nics[@]}"; do
    # The two ends of a wire name different sockets, so that their addresses differ too.
    mac=$(printf '%s %s' "$index" "${nics[index]}" | md5sum | sed 's/\(..\)\(..\)\(..\).*/52:54:00:\1:\2:\3/')
    arguments+=(-netdev "${nics[index]},id=nic$index" -device "virtio-net-pci,netdev=nic$index,mac=$mac,host_mtu=9000")
done
if [ $iommu = yes ]; then
    arguments+=(-device "intel-iommu,intremap=on,caching-mode=on")
    append+=" intel_iommu=on"
fi
if [ "$nvme" -gt 0 ]; then
    truncate -s "${nvme}M" "$job/nvme"
    disk="driver=raw,node-name=disk,discard=unmap,cache.no-flush=on,file.driver=file,file.filename=$job/nvme"
    arguments+=(-blockdev "$disk,file.discard=unmap,file.cache.no-flush=on")
    node=disk
    if [ -n "$bad_sector" ]; then
        # A filter that fails each read which touches the sector with EIO; the event `none` is always on.
        rule="inject-error.0.event=none,inject-error.0.iotype=read,inject-error.0.errno=5"
        arguments+=(-blockdev "driver=blkdebug,node-name=bad,image=disk,$rule,inject-error.0.sector=$bad_sector")
        node=bad
    fi
    arguments+=(-device "nvme,serial=lab0,drive=$node")
fi

# QEMU's output port closes when its standard input does, so that is a pipe that nobody writes into.
mkfifo "$job/stdin"
exec 8<>"$job/stdin"
# In the background, so that a signal to this script ends the VM at once; and the VM dies with the script if that is
# killed outright.
setpriv --pdeathsig TERM timeout -k 5 "$seconds" qemu-system-x86_64 "${arguments[@]}" -append "$append" <&8 &
emulator=$!
ended=0
wait "$emulator" || ended=$?
emulator=
[ ! -s "$job/code" ] || exit "$(cat "$job/code")"
tail -n 40 "$job/console" >&2 || true
if [ "$ended" -eq 124 ]; then
    echo "vm.sh: the command has not ended in $seconds s" >&2
    exit 124
fi
echo "vm.sh: the guest ended without an answer (QEMU: $ended); the end of its console is above" >&2
exit 125
