#!/usr/bin/env bash
# The compiler of the NCCL plugin: zig's, from the package ziglang, in a cache folder that all checkouts share. Another
# version may give other bytes, so it is this one. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.17.0
cache=${RANKSCOPE_ZIG_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankscope/zig-$version-$(uname -m)}
if [ ! -x "$cache/bin/zig-cc" ]; then
    echo "==> fetching zig with pip (90 MB)" >&2
    mkdir -p "$(dirname "$cache")"
    "${PYTHON:-python3}" -m venv --clear "$cache"
    "$cache/bin/python" -m pip install --quiet --disable-pip-version-check "ziglang==$version"
    printf '#!/bin/sh\nexec "%s/bin/python" -m ziglang cc "$@"\n' "$cache" >"$cache/bin/zig-cc.new"
    chmod +x "$cache/bin/zig-cc.new"
    mv "$cache/bin/zig-cc.new" "$cache/bin/zig-cc"
fi
if [ "${1:-}" = --print ]; then echo "$cache/bin/zig-cc"; fi
