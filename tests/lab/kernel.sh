#!/usr/bin/env bash
# Prepares the kernel that the lab's VMs boot, once, and prints the folder where it is: vmlinux, initrd.gz and
# lib/modules. The kernel is Debian's own package, unpacked and not installed: this machine's may lack the modules.
#   KVASIR_LAB_CACHE        where it is kept (~/.cache/kvasir-lab; 0.5 GB)
#   KVASIR_LAB_KERNEL_DEB   another linux-image package, as a file
# Prints `SKIPPED: reason` and exits with 77 where the package cannot be had or a program that the lab needs is missing.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cache=${KVASIR_LAB_CACHE:-$HOME/.cache/kvasir-lab}
package=${KVASIR_LAB_KERNEL_DEB:-}
kernel=$cache/kernel${package:+-$(basename "$package" .deb)}

skip() {
    echo "SKIPPED: $*"
    exit 77
}

download() { # the folder to download into
    local name
    name=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/ { print $2; exit }') &&
        [ -n "$name" ] && (cd "$1" && apt-get -o APT::Sandbox::User=root download -qq "$name") 2>/dev/null
}

unpack() { # the folder to unpack into
    local folder=$1
    mkdir -p "$folder/package"
    if [ -n "$package" ]; then
        cp "$package" "$folder/package/"
    elif ! download "$folder/package"; then
        # The lists may be older than what the mirror still has.
        apt-get update -q >/dev/null 2>&1 || true
        download "$folder/package" || skip "apt-get cannot download Debian's kernel (linux-image-amd64)"
    fi
    dpkg -x "$folder"/package/*.deb "$folder"
    rm -r "$folder/package"
    depmod -b "$folder" "$(ls "$folder/lib/modules")"
}

# The compressed kernel would unpack itself inside the emulated CPU, which takes seconds. QEMU also boots the ELF
# image in it (by the PVH entry point), so that is taken out here.
extract_vmlinux() { # the compressed kernel, the ELF image
    local magic unpacker offset
    while read -r magic unpacker; do
        while IFS=: read -r offset _; do
            # What follows the image is not compressed data: the complaint about it is expected.
            tail -c +$((offset + 1)) "$1" | $unpacker >"$2" 2>/dev/null || true
            [ "$(head -c 4 "$2" | tail -c 3 | tr -d '\0')" != ELF ] || return 0
        done < <(LC_ALL=C grep -aboP "$magic" "$1" | tr '\0' '?')
    done <<<'\xfd7zXZ\x00 xz -dc --single-stream
\x28\xb5\x2f\xfd zstd -dc
\x1f\x8b\x08 gzip -dc'
    echo "no ELF image in $1" >&2
    return 1
}

pack_initramfs() { # the kernel's folder
    local folder=$1 root=$1/initramfs number=100 module file
    mkdir -p "$root/bin" "$root/modules"
    cp "$(command -v busybox)" "$root/bin/busybox"
    install -m 755 "$here/guest/init" "$root/init"
    # Numbered, so that the guest loads them in the order of their dependencies.
    for module in virtio_pci virtio_console 9pnet_virtio 9p overlay; do
        for file in $(modprobe -d "$folder" -S "$(ls "$folder/lib/modules")" --show-depends "$module" |
            awk '$1 == "insmod" { print $2 }'); do
            ! compgen -G "$root/modules/*-$(basename "${file%.xz}")" >/dev/null || continue
            number=$((number + 1))
            case $file in
            *.xz) xz -dc "$file" ;;
            *) cat "$file" ;;
            esac >"$root/modules/$number-$(basename "${file%.xz}")"
        done
    done
    (cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$folder/initrd.part"
    rm -r "$root"
    mv "$folder/initrd.part" "$folder/initrd.gz"
}

for program in qemu-system-x86_64 busybox cpio modprobe xz zstd flock dpkg apt-get; do
    command -v "$program" >/dev/null || skip "$program is not here; tests/lab/install.sh installs what the lab needs"
done
mkdir -p "$cache"
# Two VMs that start at once must not prepare it twice.
exec 9>"$cache/lock"
flock 9
if [ ! -e "$kernel/vmlinux" ]; then
    part=$kernel.part
    rm -rf "$part"
    unpack "$part"
    extract_vmlinux "$(ls "$part"/boot/vmlinuz-*)" "$part/vmlinux"
    rm -rf "$kernel"
    mv "$part" "$kernel"
fi
[ "$kernel/initrd.gz" -nt "$here/guest/init" ] || pack_initramfs "$kernel"
echo "$kernel"
