#!/usr/bin/env bash
# Makes a Debian package of a built binary: deb.sh BINARY FOLDER. Prints the package's path.
# Equal binaries make equal packages: times are those of the last commit (SOURCE_DATE_EPOCH, if set), owners are root, files are sorted.
set -euo pipefail
umask 022
here=$(dirname "$(readlink -f "$0")")
binary=$(readlink -f "$1")
mkdir -p "$2"
out=$(readlink -f "$2")
for tool in dpkg-deb objdump strip; do
    command -v $tool >/dev/null || { echo "SKIPPED: no $tool" && exit 77; }
done
version=$("$binary" --version | cut -d ' ' -f 2)
architecture=$(dpkg --print-architecture)
# Sources without a history have the time of one of their files.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$here" log -1 --format=%ct 2>/dev/null || stat -c %Y "$here/deb.sh")}

root=$(mktemp -d)
chmod 755 "$root"
trap 'rm -rf "$root"' EXIT
install -D "$binary" "$root/usr/bin/kvasir"
strip --strip-debug "$root/usr/bin/kvasir"
install -D -m 644 "$here/../../config/kvasir.example.toml" "$root/etc/kvasir/kvasir.toml"
for unit in gateway store control; do
    install -D -m 644 "$here/kvasir-$unit.service" "$root/usr/lib/systemd/system/kvasir-$unit.service"
done
install -d "$root/usr/share/man/man1" "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" \
    "$root/usr/share/fish/vendor_completions.d" "$root/usr/share/doc/kvasir" "$root/DEBIAN"
"$binary" man "$root/usr/share/man/man1"
gzip -9n "$root"/usr/share/man/man1/*
"$binary" completions bash >"$root/usr/share/bash-completion/completions/kvasir"
"$binary" completions zsh >"$root/usr/share/zsh/vendor-completions/_kvasir"
"$binary" completions fish >"$root/usr/share/fish/vendor_completions.d/kvasir.fish"
install -m 644 "$here/../../../LICENSE" "$root/usr/share/doc/kvasir/copyright"

# The newest symbol of the C library that the binary uses.
libc=$(objdump -T "$binary" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1 | cut -d _ -f 2)
cat >"$root/DEBIAN/control" <<CONTROL
Package: kvasir
Version: $version
Architecture: $architecture
Maintainer: The Kvasir authors <kvasir@localhost>
Section: net
Priority: optional
Depends: libc6 (>= $libc), libgcc-s1, passwd
Recommends: ca-certificates
Suggests: libibverbs1, ibverbs-providers
Description: data-plane appliance for LLM inference clusters
 An OpenAI gateway with KV-aware routing, KV blocks that move over shared memory, RDMA and TCP, and
 tiers for them in host memory, on SSD, on other nodes and in object storage.
CONTROL
echo /etc/kvasir/kvasir.toml >"$root/DEBIAN/conffiles"
# A user without rights of its own runs the services; nothing is started by the installation.
cat >"$root/DEBIAN/postinst" <<'SCRIPT'
#!/bin/sh
set -e
if [ "$1" = configure ] && ! getent passwd kvasir >/dev/null; then
    useradd --system --user-group --home-dir /var/lib/kvasir --shell /usr/sbin/nologin kvasir
fi
SCRIPT
chmod 755 "$root/DEBIAN/postinst"
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
package=$out/kvasir_${version}_$architecture.deb
dpkg-deb --root-owner-group -Zxz --build "$root" "$package" >/dev/null
echo "$package"
