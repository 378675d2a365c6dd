#!/usr/bin/env bash
# Makes .venv-frameworks with the training frameworks that tests/frameworks tries. It has a virtual environment of its
# own because none of them is a dependency of ours. Safe to run again: does nothing, and says nothing, when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.venv-frameworks
# torch is installed first and stays a constraint of everything after it: a requirement that could choose another
# build would pull gigabytes of CUDA packages.
torch=$(grep '^torch==' constraints.txt)
packages=(
    accelerate==1.15.0
    huggingface-hub==0.36.2
    pytorch-lightning==2.6.6
    tokenizers==0.22.2
    transformers==4.57.6
    'numpy==2.4.6; python_version >= "3.11"'
    'numpy==2.2.6; python_version < "3.11"'
)
# Source only; its build asks the installed torch, so it gets no build environment of its own.
deepspeed=(deepspeed==0.19.8)
build_tools=(setuptools wheel)
wanted=$(printf '%s\n' "$torch" "${packages[@]}" "${deepspeed[@]}")

is_ready() { [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.set-up" 2>/dev/null)" = "$wanted" ]; }

is_ready && exit 0
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
is_ready && exit 0
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
echo "==> making $folder with the frameworks that are tried (once, about three minutes)" >&2
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
printf '%s\n' "$torch" >"$folder/constraints.txt"
install() {
    "$folder/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
        --constraint "$folder/constraints.txt" "$@" >&2
}
install "$torch" && install "${packages[@]}" || {
    echo "error: $folder: pip could not install the frameworks (see above); next step: check the network and run tools/setup_frameworks.sh" >&2
    exit 1
}
if ! { install "${build_tools[@]}" && DS_BUILD_OPS=0 install --no-build-isolation "${deepspeed[@]}"; }; then
    echo "warning: $folder: ${deepspeed[*]} could not be built (see above); its tests are skipped" >&2
    exit 0  # not marked as set up: the next run tries again
fi
printf '%s\n' "$wanted" >"$folder/.set-up"
