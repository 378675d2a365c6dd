#!/usr/bin/env bash
# Type-checks console/ and builds it into operator/rankscope/operator/console/static, which is committed: an
# installation needs no node. With --check, fails where the committed files are not what would be built.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup_console.sh
built=operator/rankscope/operator/console/static
cd console
npx --no-install tsc --noEmit
if [ "${1:-}" != --check ]; then
    npx --no-install vite build --logLevel warn
    exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
npx --no-install vite build --logLevel warn --outDir "$fresh" --emptyOutDir
diff -r "$fresh" "../$built" >/dev/null || {
    echo "error: $built is not what console/ builds; run make console" >&2
    exit 1
}
