#!/bin/sh
# Fetches what the daemon needs on a GPU machine that reaches no package index: wheels for x86_64 and Python 3.12 (or
# PLATFORM=aarch64, PYTHON_VERSION=3.11), into gpu-wheels/. Copy the checkout with that folder; everything.sh unpacks it.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
PLATFORM=${PLATFORM:-x86_64}
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
TARGET=${1:-gpu-wheels}
LIMIT_MIB=45

rm -rf "$TARGET"
"$PYTHON" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --implementation cp \
    --python-version "$PYTHON_VERSION" \
    --platform "manylinux_2_28_$PLATFORM" --platform "manylinux_2_27_$PLATFORM" \
    --platform "manylinux_2_17_$PLATFORM" --platform "manylinux2014_$PLATFORM" --platform "manylinux_2_5_$PLATFORM" \
    --constraint constraints.txt --dest "$TARGET" \
    grpcio grpcio-health-checking grpcio-reflection msgspec numpy nvidia-ml-py prometheus-client protobuf py-spy pyyaml rich \
    starlette uvicorn
size_mib=$(du -sm "$TARGET" | cut -f1)
"$PYTHON" benchmarks/gpu/unpacking.py --check "$TARGET" "$PYTHON_VERSION" "$PLATFORM"
echo "$TARGET: $(ls "$TARGET" | wc -l) wheels, $size_mib MiB"
if [ "$size_mib" -gt "$LIMIT_MIB" ]; then
    echo "more than $LIMIT_MIB MiB: leave something out" >&2
    exit 1
fi
