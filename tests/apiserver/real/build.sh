#!/usr/bin/env bash
# Builds a real kube-apiserver 1.20.2 from Debian's source package and, if asked, unpacks Debian's etcd beside it.
#
#   build.sh APISERVER [ETCD]
#
# APISERVER and ETCD are the paths that the two binaries get. A binary that is there already and runs is left as it is.
# Nothing is installed and the machine's own apt lists and sources are only read: the packages are fetched by a private apt state,
# from the Debian mirror that the machine is configured with, and unpacked under the work folder. Root is not needed.
#
# WORK     folder for the downloads, the toolchain, the source and Go's build cache (1.6 GB while it builds); kept and used again when it is
#          named here; without it a new folder under TMPDIR, removed at the end
# GO_FLAGS_FAST=0   compiles Kubernetes' packages with optimisation (15 % more processor time; the server starts no faster)
#
# Exit: 0 built (or there already), 77 with a line 'SKIPPED: ...' if something that it needs can't be had, else the failed step's status.
set -euo pipefail

suite=bookworm
go=golang-1.19
version=1.20.2
# What the source's own version script finds in its git-archive marks.
commit=faecb196815e248d3ecfb03c680a4507229c2a56

skip() { echo "SKIPPED: $*"; exit 77; }
say() { echo "build.sh: ${SECONDS} s: $*" >&2; }

[ $# -ge 1 ] && [ $# -le 2 ] || { echo "usage: $0 APISERVER [ETCD]" >&2; exit 2; }
apiserver=$(realpath -m -- "$1")
etcd=${2:+$(realpath -m -- "$2")}

have_apiserver() { [ -x "$apiserver" ] && [ "$("$apiserver" --version 2>/dev/null)" = "Kubernetes v$version" ]; }
have_etcd() { [ -z "$etcd" ] || { [ -x "$etcd" ] && ETCD_UNSUPPORTED_ARCH=$(dpkg --print-architecture) "$etcd" --version >/dev/null 2>&1; }; }

for tool in apt-get dpkg dpkg-deb tar gzip flock realpath; do
    command -v "$tool" >/dev/null || skip "$tool is not on this machine"
done
mkdir -p "$(dirname "$apiserver")" ${etcd:+"$(dirname "$etcd")"}
exec 9>"$apiserver.lock"
flock 9
if have_apiserver && have_etcd; then
    say "$apiserver is there already"
    exit 0
fi

if [ -n "${WORK:-}" ]; then
    mkdir -p "$WORK"
    work=$(realpath -- "$WORK")
else
    work=$(mktemp -d "${TMPDIR:-/tmp}/kube-apiserver-build.XXXXXX")
    trap 'rm -rf -- "$work"' EXIT
fi
free=$(df --output=avail -k "$work" | tail -1)
[ "$free" -gt 2500000 ] || skip "2.5 GB are needed under $work, $((free / 1024)) MiB are free"

# --- A private apt: its own lists, cache and one sources file, the machine's mirror.
mkdir -p "$work"/apt/lists/partial "$work"/apt/cache/archives/partial "$work"/debs
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] && signed="[signed-by=$keyring] " || signed=
apt() {
    local command=$1
    shift
    "$command" -q -o Dir::Etc::sourcelist="$work/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$work/apt/lists" \
        -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User= -o APT::Update::Error-Mode=any -o Acquire::Retries=3 "$@"
}
found_source() { apt apt-cache showsrc --only-source kubernetes 2>/dev/null | grep -q "really$version-"; }
update() {
    local uri
    # A mirror of which the machine takes a suite may have this one: the first that has it is used.
    while read -r uri; do
        printf 'deb %s%s %s main\ndeb-src %s%s %s main\n' "$signed" "$uri" "$suite" "$signed" "$uri" "$suite" >"$work/apt/sources.list"
        if apt apt-get update >"$work/apt/update.log" 2>&1 && found_source; then
            return 0
        fi
        say "no source of kubernetes $version in $suite at one of the machine's mirrors"
    done < <(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 2>/dev/null | awk '!seen[$0]++')
    return 1
}
fetched() { compgen -G "$work/debs/$1" >/dev/null; }
wanted=()
fetched 'etcd-server_*.deb' || [ -z "$etcd" ] || have_etcd || wanted+=(etcd-server)
if ! have_apiserver; then
    for p in "$go-go" "$go-src" golang-github-modern-go-reflect2-dev; do
        fetched "${p}_*.deb" || wanted+=("$p")
    done
    fetched 'kubernetes_*.orig.tar.gz' || wanted+=(source)
fi
if [ ${#wanted[@]} -gt 0 ]; then
    update || skip "the machine's Debian mirrors do not give the source of kubernetes $version of $suite: $(tail -1 "$work/apt/update.log" 2>/dev/null)"
    for p in "${wanted[@]}"; do
        # Fetched aside, then moved: what lies in debs/ is whole and its hash was checked.
        rm -rf "$work/part"
        mkdir "$work/part"
        cd "$work/part"
        if [ "$p" = source ]; then
            apt apt-get source --download-only --only-source kubernetes >"$work/apt/fetch.log" 2>&1 || skip "the source of kubernetes could not be fetched: $(tail -1 "$work/apt/fetch.log")"
        else
            apt apt-get download "$p" >"$work/apt/fetch.log" 2>&1 || skip "the package $p could not be fetched: $(tail -1 "$work/apt/fetch.log")"
        fi
        mv -- * "$work/debs/"
    done
fi
cd "$work"

if ! have_etcd; then
    rm -rf "$work/etcd"
    dpkg -x "$work"/debs/etcd-server_*.deb "$work/etcd"
    cp "$work/etcd/usr/bin/etcd" "$etcd.part"
    mv "$etcd.part" "$etcd"
    have_etcd || { say "$etcd does not run"; exit 1; }
fi
if have_apiserver; then
    exit 0
fi

say "unpacking"
# --- The toolchain, unpacked: Debian's Go finds its parts by links that are relative, so it runs from any folder.
if [ ! -e "$work/root.done" ]; then
    rm -rf "$work/root"
    for p in "$go-go" "$go-src" golang-github-modern-go-reflect2-dev; do
        mkdir -p "$work/root"
        dpkg-deb --fsys-tarfile "$work"/debs/"${p}"_*.deb | tar -xf - -C "$work/root" --no-same-owner --exclude='*/testdata' --exclude='*_test.go' \
            --exclude='*/go-*/test' --exclude='*/go-*/misc' --exclude='*/go-*/api' --exclude='*/share/doc' --exclude='*/pkg/linux_*/cmd'
    done
    touch "$work/root.done"
fi
goroot=$work/root/usr/lib/go-${go#golang-}

# --- The source. Debian's own patches are to kubectl alone and left out, as is all that isn't compiled.
src=$work/gopath/src/k8s.io/kubernetes
if [ ! -e "$work/src.done" ]; then
    rm -rf "$src"
    mkdir -p "$src"
    tar -xzf "$work"/debs/kubernetes_*.orig.tar.gz -C "$src" --strip-components=1 --no-same-owner --wildcards \
        --exclude='*_test.go' --exclude='*/testdata' --exclude='BUILD' --exclude='OWNERS' \
        'kubernetes*/api' 'kubernetes*/cmd' 'kubernetes*/pkg' 'kubernetes*/plugin' 'kubernetes*/staging' 'kubernetes*/third_party' 'kubernetes*/vendor'
    # The vendored reflect2 1.0.1 starts with Go 1.19, then ends the server with SIGSEGV at the first custom resource definition.
    # The whole folder is replaced: a file of the older one that stayed would define the same names.
    rm -rf "$src/vendor/github.com/modern-go/reflect2"
    cp -r "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$src/vendor/github.com/modern-go/"
    touch "$work/src.done"
fi
cd "$src"

# Go's settings of the caller have no say. GOGC: the compiler's own collector costs a tenth of the time, memory is there.
# CGO_ENABLED=0: a static binary and no C compiler.
mkdir -p "$work/tmp"
go() {
    nice -n 19 env -i PATH="$goroot/bin:/usr/bin:/bin" HOME="$work" TMPDIR="$work/tmp" GOROOT="$goroot" GOPATH="$work/gopath" GOCACHE="$work/gocache" \
        GO111MODULE=off GOENV=off GOFLAGS= CGO_ENABLED=0 GOGC=800 ${GOMAXPROCS:+GOMAXPROCS="$GOMAXPROCS"} "$goroot/bin/go" "$@"
}

# --- The one generated file that the source does not hold and the server needs, by the makefile's own rule for it (KUBE_OPENAPI),
# with its check: the generator's report must be the one that the source expects.
generated=pkg/generated/openapi/zz_generated.openapi.go
if [ ! -s "$generated" ]; then
    say "generating the OpenAPI definitions"
    go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    packages=$(find -L cmd pkg plugin vendor/k8s.io -name '*.go' -not -path 'vendor/k8s.io/code-generator/*' -not -path 'vendor/k8s.io/sample-apiserver/*' -print0 \
        | xargs -0 grep -l '^// *+k8s:' | xargs grep -l '+k8s:openapi-gen=' | xargs -n 1 dirname | LC_ALL=C sort -u | sed 's,^,k8s.io/kubernetes/,' | paste -sd ,)
    nice -n 19 env -i PATH="$goroot/bin:/usr/bin:/bin" HOME="$work" GOROOT="$goroot" GOPATH="$work/gopath" GO111MODULE=off CGO_ENABLED=0 "$work/openapi-gen" \
        --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt \
        -r "$work/violations" || { rm -f "$generated"; exit 1; }
    diff "$work/violations" api/api-rules/violation_exceptions.list || { rm -f "$generated"; say "the generator's report is not the expected one"; exit 1; }
fi

# --- The server. providerless leaves the in-tree cloud providers out (a quarter of the packages). The import paths of the vendored packages
# begin with k8s.io/kubernetes/vendor too, so the compiler's flags reach all but the standard library, whose archives come compiled with Debian's Go.
say "compiling (3 processor minutes)"
flags="-dwarf=false -N -l"
[ "${GO_FLAGS_FAST:-1}" = 1 ] || flags="-dwarf=false"
x=
for package in client-go/pkg/version component-base/version; do
    for pair in gitVersion=v$version gitMajor=1 gitMinor=20 gitCommit=$commit gitTreeState=archive buildDate=2021-01-13T00:00:00Z; do
        x+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.$pair"
    done
done
go build -tags providerless -gcflags="k8s.io/...=$flags" -ldflags="-s -w$x" -o "$apiserver.part" ./cmd/kube-apiserver
mv "$apiserver.part" "$apiserver"
have_apiserver || { say "$apiserver says another version: $("$apiserver" --version 2>&1 | head -1)"; exit 1; }
say "built $apiserver, $(stat -c %s "$apiserver") bytes"
