#!/usr/bin/env bash
# Makes .grafana-schema/schema.json from Grafana's own types, to validate our dashboards against. There is no Grafana to
# be had from a package repository, but its types are on npm. Safe to run again: does nothing, and says nothing, when
# all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.grafana-schema
# This generator still runs on Debian 12's node (18).
packages=(@grafana/schema@13.2.3 ts-json-schema-generator@2.3.0)
wanted=$(printf '%s\n' "${packages[@]}"; cat tools/grafana_schema.ts)

is_ready() { [ -s "$folder/schema.json" ] && [ "$(cat "$folder/.set-up" 2>/dev/null)" = "$wanted" ]; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

is_ready && exit 0
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
is_ready && exit 0
if ! command -v npm >/dev/null; then
    command -v apt-get >/dev/null || {
        echo "error: npm is missing, and the schema of Grafana's dashboards comes from it; install nodejs and npm and run make again" >&2
        exit 1
    }
    echo "==> installing nodejs and npm with apt (the schema of Grafana's dashboards comes from npm)" >&2
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null
fi
echo "==> making $folder/schema.json from Grafana's types (once, about 20 s)" >&2
echo '*' >"$folder/.gitignore"
cp tools/grafana_schema.ts "$folder/schema.ts"
cat >"$folder/tsconfig.json" <<'JSON'
{"compilerOptions": {"module": "esnext", "moduleResolution": "bundler", "target": "es2022", "skipLibCheck": true}}
JSON
echo '{"private": true}' >"$folder/package.json"
(
    cd "$folder" &&
        # No lock file and no scripts of other people's packages.
        npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts "${packages[@]}" >&2 &&
        node_modules/.bin/ts-json-schema-generator --tsconfig tsconfig.json --no-type-check --path schema.ts \
            --type Checked --expose none --out schema.json.new >&2 &&
        mv schema.json.new schema.json
) || {
    echo "error: $folder: no schema of Grafana's dashboards could be made (see above); next step: check the network and run tools/setup_grafana_schema.sh" >&2
    exit 1
}
printf '%s\n' "$wanted" >"$folder/.set-up"
