#!/usr/bin/env bash
# Makes .venv-hta with Holistic Trace Analysis, to compare our numbers and speed with. It has a virtual environment of
# its own because it is no dependency of ours. Safe to run again: does nothing, and says nothing, when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.venv-hta
# What our numbers are held against. Its own requirements pull in jupyterlab, which no analysis needs, so they are
# named here: what it imports, in the versions that a fresh install gets.
packages=(
    HolisticTraceAnalysis==0.5.0
    networkx==3.4.2
    'numpy==2.4.6; python_version >= "3.11"'
    'numpy==2.2.6; python_version < "3.11"'
    'pandas==3.1.1; python_version >= "3.11"'
    'pandas==2.3.3; python_version < "3.11"'
    plotly==7.1.0
    psutil==7.2.2
    pydot==4.0.1
    PyYAML==6.0.3
)
wanted=$(printf '%s\n' "${packages[@]}")

is_ready() { [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.set-up" 2>/dev/null)" = "$wanted" ]; }

is_ready && exit 0
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9  # a test and a benchmark may both want it
is_ready && exit 0
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
echo "==> making $folder with Holistic Trace Analysis, to compare with (once, about 40 s)" >&2
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
echo '*' >"$folder/.gitignore"
"$folder/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps "${packages[@]}" \
    narwhals packaging pyparsing python-dateutil six pytz tzdata >&2 || {
    echo "error: $folder: pip could not install Holistic Trace Analysis (see above); next step: check the network and run tools/setup_hta.sh" >&2
    exit 1
}
printf '%s\n' "$wanted" >"$folder/.set-up"
