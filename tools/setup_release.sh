#!/usr/bin/env bash
# Makes .venv-release with the tools of a release: uv (locks dependencies) and pip-audit. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv-release/.set-up
if [ -e "$stamp" ] && [ "$stamp" -nt tools/release-requirements.txt ]; then exit 0; fi
echo "==> making .venv-release (uv and pip-audit)"
"${PYTHON:-python3}" -m venv .venv-release
.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/release-requirements.txt
touch "$stamp"
