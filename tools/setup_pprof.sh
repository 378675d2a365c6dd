#!/usr/bin/env bash
# The pprof tool of Go, for the test of exported profiles: from Go if it is installed, else Debian's, in a cache folder that
# all checkouts share. Nothing is installed, and no root is needed. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${RANKSCOPE_PPROF_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankscope/pprof-$(uname -m)}
[ ! -x "$cache/pprof" ] || exit 0
mkdir -p "$cache"
if go=$(command -v go) && own=$("$go" tool -n pprof 2>/dev/null) && [ -x "$own" ]; then
    install -m 755 "$own" "$cache/pprof"
    exit 0
fi
work=$(mktemp -d "$cache/unpacking.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "==> fetching Go's pprof with apt (60 MB)" >&2
# shellcheck source=tools/debian_packages.sh
source tools/debian_packages.sh
unpack_packages "$work" --with-dependencies golang-go
install -m 755 "$work"/files/usr/lib/go-*/pkg/tool/*/pprof "$cache/pprof.new"
mv -f "$cache/pprof.new" "$cache/pprof"
