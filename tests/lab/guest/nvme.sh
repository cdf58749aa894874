#!/usr/bin/env bash
# The NVMe suite, run inside a lab VM with a disk and an IOMMU: vm.sh --nvme 512 --iommu [--bad-sector N] -- guest/nvme.sh
# First the kernel has the disk: the suites of the engines that go through it. Then the disk is handed to vfio-pci, and
# the user-space driver has it. One line per check. All contents of the disk are destroyed.
#   IO_TEST               unit test binary of kvstore-io; its tests find the disk in KVASIR_IO_DEVICE and KVASIR_IO_NVME
#   NVME_TEST, NVME_IOPS  the driver's test binary `device` and its example `iops`
#   NVME_BAD_SECTOR       the sector that vm.sh's --bad-sector broke, behind the first 256 MiB
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source-path=SCRIPTDIR source=steps.sh
. "$here/steps.sh"
block=/dev/nvme0n1 generic=/dev/ng0n1

modprobe nvme
for _ in {1..50}; do
    [ ! -b $block ] || break
    sleep 0.1
done
address=$(basename "$(readlink -f /sys/class/nvme/nvme0/device)")

kernel_engine() { # its tests, by the beginning of their names
    local output
    output=$(mktemp)
    KVASIR_IO_NVME=$generic KVASIR_IO_DEVICE=$block "$IO_TEST" --test-threads=1 --nocapture "$1" 2>&1 | tee "$output"
    grep -q 'test result: ok. [1-9]' "$output" && grep '^test result' "$output"
}

fio_reads() { # the engine, the device, more options
    local iops
    iops=$(fio --name=reads --filename="$2" --ioengine="$1" --rw=randread --bs=4k --iodepth=32 --runtime=3 --time_based \
        --size=256m --fixedbufs=1 --output-format=json "${@:3}" |
        python3 -c 'import json, sys; print(round(json.load(sys.stdin)["jobs"][0]["read"]["iops"]))')
    echo "fio $1 4k randread depth 32: $iops IOPS"
}

hand_over() {
    modprobe -a vfio-pci vfio_iommu_type1
    echo vfio-pci >"/sys/bus/pci/devices/$address/driver_override"
    echo "$address" >"/sys/bus/pci/devices/$address/driver/unbind"
    echo "$address" >/sys/bus/pci/drivers_probe
    basename "$(readlink "/sys/bus/pci/devices/$address/driver")" | grep -x vfio-pci
}

# What the driver says about a device that the kernel has: the commands of `hand_over`, and it is left alone.
the_kernels_device_is_refused() {
    local output
    if output=$(KVSTORE_NVME_DEVICE=$address "$NVME_TEST" --test-threads=1 function_is_reset 2>&1); then return 1; fi
    echo "$output"
    grep 'Driver {.*driver: "nvme"' <<<"$output" && [ -b $block ]
}

# The driver's error in a process that may not what a driver must.
refused() { # a word of the error, the command that runs the test without a permission
    local output word=$1
    shift
    if output=$(KVSTORE_NVME_DEVICE=$address "$@" "$NVME_TEST" --test-threads=1 function_is_reset 2>&1); then return 1; fi
    echo "$output"
    grep ": $word {" <<<"$output"
}

driver_test() { # the name of the test
    local output
    output=$(mktemp)
    env KVSTORE_NVME_DEVICE="$address" ${NVME_BAD_SECTOR:+KVSTORE_NVME_BAD_OFFSET=$((NVME_BAD_SECTOR * 512))} \
        "$NVME_TEST" --test-threads=1 --nocapture --exact "$1" 2>&1 | tee "$output"
    if grep -q SKIPPED "$output"; then return 77; fi
    grep -q 'test result: ok. 1 passed' "$output"
}

if [ -n "${IO_TEST:-}" ]; then
    step "io_uring conforms on $block" 200 kernel_engine uring::tests::keeps_the_contract_on_a_block_device
    step "passthrough conforms on $generic" 200 kernel_engine passthrough::
fi
step "fio io_uring" 60 fio_reads io_uring $block --direct=1
step "fio io_uring_cmd" 60 fio_reads io_uring_cmd $generic --cmd_type=nvme
if [ -n "${NVME_TEST:-}" ]; then
    step "the kernel's device is refused" 30 the_kernels_device_is_refused
    step "the disk is handed to vfio-pci" 30 hand_over
    step "without huge pages: the function is reset" 60 driver_test the_function_is_reset_from_outside
    echo 64 >/proc/sys/vm/nr_hugepages
    for name in $("$NVME_TEST" --list 2>/dev/null | sed -n 's/: test$//p'); do
        step "driver: ${name//_/ }" 250 driver_test "$name"
    done
    step "another user is refused" 30 refused Permission setpriv --reuid=65534 --clear-groups
    step "little locked memory is refused" 30 refused LockedMemory \
        prlimit --memlock=65536 setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock
    [ -z "${NVME_IOPS:-}" ] || step "iops of the driver" 60 "$NVME_IOPS" "$address" 3 1 32
fi
summary
