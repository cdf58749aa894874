#!/usr/bin/env bash
# Checks the package and the image's root of a built binary: check.sh BINARY.
# The package is equal when it is made twice, its files are there and its units are sound; the binary runs with nothing around it
# but what the image's `minimal` stage has.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
binary=$(readlink -f "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
mkdir "$scratch/a" "$scratch/b" "$scratch/files"

package=$("$here/deb.sh" "$binary" "$scratch/a") || { code=$? && echo "$package" && exit $code; }
again=$(umask 077 && "$here/deb.sh" "$binary" "$scratch/b")
cmp "$package" "$again"
echo "package: $(stat -c %s "$package") bytes, equal when it is made again: $(sha256sum "$package" | cut -c 1-16)"
if dpkg-deb -c "$package" | grep -vE '^(drwxr-xr-x|-rwxr-xr-x|-rw-r--r--) root/root '; then
    echo "check.sh: files of the package have other modes or owners" >&2 && exit 1
fi
dpkg-deb -x "$package" "$scratch/files"
"$scratch/files/usr/bin/kvasir" config check "$scratch/files/etc/kvasir/kvasir.toml" >/dev/null
[ "$(find "$scratch/files/usr/share/man" -name 'kvasir*.1.gz' | wc -l)" -gt 20 ]
[ -s "$scratch/files/usr/share/bash-completion/completions/kvasir" ]
if command -v systemd-analyze >/dev/null; then
    # The paths of the units are those after the installation.
    sed -i "s|/usr/bin/kvasir|$scratch/files/usr/bin/kvasir|" "$scratch"/files/usr/lib/systemd/system/*.service
    # Of an unknown key or value systemd only warns.
    told=$(systemd-analyze verify --man=no --recursive-errors=no "$scratch"/files/usr/lib/systemd/system/*.service 2>&1) ||
        { echo "$told" && exit 1; }
    if grep 'kvasir-.*\.service' <<<"$told"; then exit 1; fi
    sed 's/^NoNewPrivileges=/NoNewPriviliges=/' "$scratch/files/usr/lib/systemd/system/kvasir-store.service" >"$scratch/planted.service"
    if systemd-analyze verify --man=no --recursive-errors=no "$scratch/planted.service" 2>/dev/null; then
        echo "check.sh: systemd does not see a planted mistake" >&2 && exit 1
    fi
    echo "units: systemd finds no mistake"
else
    echo "SKIPPED: the units; no systemd-analyze"
fi

"$here/../image/collect.sh" "$binary" "$scratch/image"
if [ "$(id -u)" = 0 ]; then
    chroot "$scratch/image" /usr/local/bin/kvasir --version
    chroot "$scratch/image" /usr/local/bin/kvasir config explain gateway.listen >/dev/null
    echo "image: the binary runs among $(find "$scratch/image" -type f | wc -l) files"
else
    echo "SKIPPED: the image's root; no right to chroot"
fi
