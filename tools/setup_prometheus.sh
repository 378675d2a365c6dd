#!/usr/bin/env bash
# Puts prometheus, promtool, alertmanager and amtool into .prometheus/bin, for the tests of the rules and the dashboards.
# Debian's own packages are unpacked there and nowhere else: nothing is installed, no service starts, no root is needed.
# Binaries that the machine already has (a folder in RANKSCOPE_PROMETHEUS_DIR, or the PATH) are used instead.
# Safe to run again: does nothing, and says nothing, when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.prometheus
binaries=(prometheus promtool alertmanager amtool)

# Debian names one of them differently.
names_of() { if [ "$1" = alertmanager ]; then echo "alertmanager prometheus-alertmanager"; else echo "$1"; fi; }

found_elsewhere() {
    local binary name
    for binary in "${binaries[@]}"; do
        for name in $(names_of "$binary"); do
            [ -n "${RANKSCOPE_PROMETHEUS_DIR:-}" ] && [ -x "$RANKSCOPE_PROMETHEUS_DIR/$name" ] && continue 2
            command -v "$name" >/dev/null && continue 2
        done
        return 1
    done
}

is_ready() {
    local binary
    for binary in "${binaries[@]}"; do [ -x "$folder/bin/$binary" ] || return 1; done
    [ -x "$folder/alertmanager/alertmanager" ]
}

is_ready && exit 0
found_elsewhere && exit 0
mkdir -p "$folder"
echo '*' >"$folder/.gitignore"
exec 9>"$folder/.lock"
flock 9  # two tests may both want them
is_ready && exit 0
echo "==> unpacking Prometheus and Alertmanager into .prometheus (once, a few seconds)" >&2
unpacking=$(mktemp -d "$folder/unpacking.XXXXXX")
trap 'rm -rf "$unpacking"' EXIT
# shellcheck source=tools/debian_packages.sh
source tools/debian_packages.sh
unpack_packages "$unpacking" prometheus prometheus-alertmanager || {
    echo "or name a folder with prometheus, alertmanager and their tools in RANKSCOPE_PROMETHEUS_DIR" >&2
    exit 1
}
# Debian's Alertmanager does not start without templates in /usr/share, where nothing is to be put. So its copy here looks
# for them behind a descriptor (a name of the same length, or the program would break), which a wrapper opens for it.
debian=/usr/share/prometheus/alertmanager
opened=/proc/self/fd/9/./././././././././
[ ${#debian} -eq ${#opened} ]
rm -rf "$folder/alertmanager"
mv "$unpacking/files$debian" "$folder/alertmanager"
LC_ALL=C sed "s#$debian#$opened#g" "$unpacking/files/usr/bin/prometheus-alertmanager" >"$folder/alertmanager/alertmanager"
chmod +x "$folder/alertmanager/alertmanager"
cat >"$unpacking/files/usr/bin/alertmanager" <<'WRAPPER'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/../alertmanager
exec "$here/alertmanager" "$@" 9<"$here"
WRAPPER
chmod +x "$unpacking/files/usr/bin/alertmanager"
mkdir -p "$folder/bin"
for binary in "${binaries[@]}"; do mv -f "$unpacking/files/usr/bin/$binary" "$folder/bin/$binary"; done
for binary in "${binaries[@]}"; do
    "$folder/bin/$binary" --version >/dev/null 2>&1 || {
        echo "error: $binary from Debian's package does not run on this machine; next step: name a folder with binaries that do in RANKSCOPE_PROMETHEUS_DIR" >&2
        rm -f "$folder/bin/$binary"
        exit 1
    }
done
