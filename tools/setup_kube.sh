#!/usr/bin/env bash
# A real kube-apiserver, etcd and kubectl for the operator's tests. Honours KUBEBUILDER_ASSETS; else builds Kubernetes 1.20
# once from Debian's own source into a cache folder that all checkouts share: six minutes on two cores, nothing the next time.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '==> %s\n' "$*"; }
stop() { printf 'error: %s\n' "$*" >&2; exit 1; }

version=1.20.2
cache=${RANKSCOPE_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankscope/kube-$version-$(dpkg --print-architecture)}

if [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$KUBEBUILDER_ASSETS/kube-apiserver" ] && [ -x "$KUBEBUILDER_ASSETS/etcd" ]; then
    say "kube-apiserver and etcd of KUBEBUILDER_ASSETS ($KUBEBUILDER_ASSETS)"
    exit 0
fi
# One that was built without it says v0.0.0, and helm installs nothing there. Go's strings have a length, which stays.
name_version() {
    local told
    told=$("$1" --version)
    told=${told#Kubernetes }
    case $told in
    v$version*) return ;;
    esac
    [ "$(printf %.14s "$told")" = v0.0.0-master+ ] || stop "$1 is Kubernetes $told, not v$version; next step: remove it"
    LC_ALL=C sed "s/v0\.0\.0-master+/v$version+build./g" "$1" >"$1.named"
    chmod 755 "$1.named"
    mv -f "$1.named" "$1"
}
if [ -x "$cache/kube-apiserver" ] && [ -x "$cache/etcd" ]; then
    name_version "$cache/kube-apiserver"
    exit 0
fi
command -v apt-get >/dev/null || stop "no kube-apiserver: set KUBEBUILDER_ASSETS to a folder with kube-apiserver and etcd"

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9  # two checkouts that are set up at once build it once
[ -x "$cache/kube-apiserver" ] && [ -x "$cache/etcd" ] && exit 0
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

say "fetching the sources of Kubernetes $version and its Go with apt (100 MB)"
# An apt of its own: other releases than this machine's, from the mirror that this machine's apt names, and nothing installed.
mirror=$(apt-get indextargets --format '$(REPO_URI)|$(ORIGIN)|$(RELEASE)' | grep -E '\|Debian\|' | grep -v security | head -1 | cut -d'|' -f1)
[ -n "$mirror" ] || mirror=$(grep -rhoE '^(URIs: |deb (\[[^]]*\] )?)[^ ]+' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | grep -v security | sed -E 's/^(URIs: |deb (\[[^]]*\] )?)//' | head -1)
[ -n "$mirror" ] || stop "apt names no Debian mirror: set KUBEBUILDER_ASSETS to a folder with kube-apiserver and etcd"
mkdir -p "$work"/apt/{lists/partial,archives/partial} "$work/sources"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
cat >"$work/apt/sources.list" <<LIST
deb [signed-by=$keyring] $mirror bullseye main
deb [signed-by=$keyring] $mirror bookworm main
deb-src [signed-by=$keyring] $mirror bookworm main
LIST
own_apt() {
    apt-get -qq -o Dir::Etc::sourcelist="$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$work/apt/lists" \
        -o Dir::Cache::archives="$work/apt/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root "$@"
}
own_apt update
(
    cd "$work/sources"
    own_apt download golang-1.15-go golang-1.15-src etcd-server
    own_apt source --download-only kubernetes
)
for package in "$work"/sources/*.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
mkdir -p "$work/go/src/k8s.io/kubernetes"
tar -xf "$work"/sources/kubernetes_*.orig.tar.* -C "$work/go/src/k8s.io/kubernetes" --strip-components=1

# Debian's Go looks for its library beside itself and in /usr/share, which is not installed here.
goroot=$work/unpacked/usr/lib/go-1.15
for link in "$goroot"/*; do
    [ -L "$link" ] || continue
    target=$(readlink "$link")
    case $target in
    ../../share/*) : ;;
    *) ln -sfn "$work/unpacked/usr/share/go-1.15/$(basename "$link")" "$link" ;;
    esac
done
export GOROOT=$goroot GOPATH=$work/go GOCACHE=$work/cache GO111MODULE=off GOPROXY=off CGO_ENABLED=0 GOFLAGS=
go=$goroot/bin/go
cd "$work/go/src/k8s.io/kubernetes"

say "generating its OpenAPI definitions"
"$go" build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rlE '^// \+k8s:openapi-gen=' --include=doc.go --include='*.go' vendor/k8s.io staging/src/k8s.io pkg 2>/dev/null \
    | xargs -n1 dirname | sort -u | grep -vE '/(testdata|test|_examples)(/|$)' | sed -E 's#^vendor/##; s#^staging/src/##; s#^pkg#k8s.io/kubernetes/pkg#' | sort -u | paste -sd, -)
mkdir -p pkg/generated/openapi
"$work/openapi-gen" --logtostderr --go-header-file hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi \
    -p k8s.io/kubernetes/pkg/generated/openapi -i "$packages" -r "$work/violations" --output-base "$work/go/src"

say "building kube-apiserver $version (six minutes on two cores)"
flags="-s -w"
for setting in gitVersion=v$version gitMajor=1 gitMinor=20 gitTreeState=clean; do
    for package in component-base/version client-go/pkg/version; do
        flags="$flags -X k8s.io/kubernetes/vendor/k8s.io/$package.$setting"
    done
done
"$go" build -ldflags "$flags" -o "$work/kube-apiserver" ./cmd/kube-apiserver
name_version "$work/kube-apiserver"
install -m 755 "$work/unpacked/usr/bin/etcd" "$cache/etcd"
install -m 755 "$work/kube-apiserver" "$cache/kube-apiserver"
say "kube-apiserver $version and etcd: $cache"
