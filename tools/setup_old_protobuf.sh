#!/usr/bin/env bash
# Unpacks an old protobuf into .old-protobuf, for the test that Rankscope runs beside a training environment that has it.
# Safe to run again: does nothing, and says nothing, when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.old-protobuf
wanted=protobuf==3.20.3

[ "$(cat "$folder/.set-up" 2>/dev/null)" != "$wanted" ] || exit 0
echo "==> fetching $wanted into $folder (once, 1 MB)" >&2
mkdir -p "$folder"
echo '*' >"$folder/.gitignore"
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --upgrade --target "$folder" "$wanted" >&2 || {
    echo "error: $folder: pip could not install $wanted (see above); next step: check the network and run tools/setup_old_protobuf.sh" >&2
    exit 1
}
printf '%s\n' "$wanted" >"$folder/.set-up"
