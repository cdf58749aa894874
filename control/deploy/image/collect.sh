#!/usr/bin/env bash
# Collects what the binary needs into a folder that can be the root of an image: collect.sh BINARY FOLDER.
# The binary, the libraries that it is linked with, their loader, certificate authorities, and a folder for temporary files.
set -euo pipefail
binary=$1 folder=$2
install -D "$binary" "$folder/usr/local/bin/kvasir"
install -d -m 1777 "$folder/tmp"
# `ldd` prints `NAME => PATH (ADDRESS)`, and the loader as `PATH (ADDRESS)`; the kernel's own library has no path.
ldd "$binary" | grep -o '/[^ ]*' | sort -u | while read -r library; do
    install -D "$library" "$folder$library"
done
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
    install -D -m 644 /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/ca-certificates.crt"
fi
