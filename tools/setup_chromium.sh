#!/usr/bin/env bash
# Chromium for the tests of pages: this machine's if it is installed, else Debian's, unpacked into a cache folder that all
# checkouts share (105 MB to fetch). Nothing is installed, and no root is needed. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${RANKSCOPE_CHROMIUM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankscope/chromium-$(uname -m)}
[ ! -x "$cache/chromium" ] || exit 0
mkdir -p "$cache"
write_wrapper() {
    { echo '#!/bin/sh'; printf '%s\n' "$1"; } >"$cache/chromium.new"
    chmod 755 "$cache/chromium.new"
    mv -f "$cache/chromium.new" "$cache/chromium"
}
if own=$(command -v chromium || command -v google-chrome); then
    write_wrapper "$(printf 'exec %q "$@"' "$own")"
    exit 0
fi
work=$(mktemp -d "$cache/unpacking.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "==> fetching Chromium with apt (105 MB)" >&2
# shellcheck source=tools/debian_packages.sh
source tools/debian_packages.sh
unpack_packages "$work" --with-dependencies chromium
rm -rf "$cache/unpacked"
mv "$work/files" "$cache/unpacked"
library=$cache/unpacked/usr/lib
folders=$(find "$library" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
write_wrapper "$(printf 'export LD_LIBRARY_PATH=%q\nexec %q "$@"' "$folders" "$library/chromium/chromium")"
