#!/usr/bin/env bash
# Makes .venv with the project and its development tools. Safe to run again; called by every make target.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

say() { printf '==> %s\n' "$*"; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if ! command -v "$python" >/dev/null || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    command -v apt-get >/dev/null || { echo "error: $python with its venv module is missing; install it and run make again" >&2; exit 1; }
    say "installing python3-venv with apt (the virtual environment needs it)"
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends python3 python3-venv >/dev/null
fi
# Tests compile a stand-in for the NVIDIA driver's library.
if ! command -v cc >/dev/null || ! printf '#include <stdio.h>\n' | cc -E - >/dev/null 2>&1; then
    command -v apt-get >/dev/null || { echo "error: no C compiler; install gcc and the C library's headers and run make again" >&2; exit 1; }
    say "installing gcc with apt (tests compile a stand-in for the NVIDIA driver's library)"
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: $("$python" --version) is too old; Rankscope needs Python 3.10 or newer. Next step: make PYTHON=python3.11 …" >&2
    exit 1
}
if [ ! -x .venv/bin/python ]; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
say "installing packages (torch is the large one; the first time takes a minute or two)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
# torch first and pinned, so that no other requirement can choose another build of it.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,operator]' --group dev
# A wheel brings this file along, an editable install does not; without it RANKSCOPE_PROBE=1 would do nothing here.
cp daemon/rankscope_probe.pth "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
# Where Python is told to leave no bytecode behind, every command would recompile its modules: 0.3 s each time.
.venv/bin/python -m compileall -q proto analysis daemon operator cli
say "ready: .venv/bin/rankscope"
