#!/usr/bin/env bash
# What builds and checks the console (TypeScript, Vite, axe-core), in console/node_modules. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if ! command -v npm >/dev/null; then
    command -v apt-get >/dev/null || {
        echo "error: npm is missing, and the console is built with it; install nodejs and npm and run make again" >&2
        exit 1
    }
    echo "==> installing nodejs and npm with apt (the console is built with them)" >&2
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null
fi
exec 9<console/package-lock.json
flock 9  # lint and the tests of the pages may both want it
if ! cmp -s console/package-lock.json console/node_modules/.set-up; then
    echo "==> fetching what builds the console (once, about 20 s)" >&2
    # Not "npm ci": it refuses a lock without the binaries of other platforms, which not every registry has.
    (cd console && npm install --no-save --ignore-scripts --silent)
    cp console/package-lock.json console/node_modules/.set-up
fi
