#!/bin/bash
# Everything that only a GPU can show, within eight minutes; see README.md beside this.
#   benchmarks/gpu/everything.sh [--dry] [PART …]     --dry: without a GPU, to try the scripts themselves
# Parts: counters and captures, which is the default; aftermath, which alone takes over six minutes; verdicts (12 minutes for
# the whole matrix twice), foreign (needs gpu-foreign/, see README.md), hangs, bandwidth, plugin_cost, remedies, overhead and compile. Results go to $OUT (gpu-results), a table per part to the terminal. A
# part that fails or hangs does not keep the others.
set -u
cd "$(dirname "$0")/../.." || exit 1
ROOT=$PWD
OUT=${OUT:-$ROOT/gpu-results}
PYTHON=${PYTHON:-python3}
CAPTURES_SECONDS=${CAPTURES_SECONDS:-285}
COUNTERS_SECONDS=${COUNTERS_SECONDS:-180}
AFTERMATH_SECONDS=${AFTERMATH_SECONDS:-380}
VERDICTS_SECONDS=${VERDICTS_SECONDS:-840}
OVERHEAD_SECONDS=${OVERHEAD_SECONDS:-270}
COMPILE_SECONDS=${COMPILE_SECONDS:-240}
HANGS_SECONDS=${HANGS_SECONDS:-300}
FOREIGN_SECONDS=${FOREIGN_SECONDS:-560}
captures_flags=() counters_flags=(${COUNTERS_FLAGS:-}) aftermath_flags=()
verdicts_flags=(${VERDICTS_FLAGS:---repeat 2 --parallel 2}) overhead_flags=(${OVERHEAD_FLAGS:-}) compile_flags=(${COMPILE_FLAGS:-}) hangs_flags=() remedies_flags=(${REMEDIES_FLAGS:-})
foreign_flags=(${FOREIGN_FLAGS:-})
if [ "${1:-}" = --dry ]; then
    shift
    captures_flags+=(--cpu)
    counters_flags+=(--stub)
    aftermath_flags+=(--cpu)
    verdicts_flags+=(--cpu)
    overhead_flags+=(--cpu)
    compile_flags+=(--cpu)
    hangs_flags+=(--cpu)
    remedies_flags+=(--cpu)
    foreign_flags+=(--cpu)
fi
parts=("$@")
[ $# -gt 0 ] || parts=(counters captures)
for name in "${parts[@]}"; do
    case $name in counters|captures|aftermath|verdicts|foreign|hangs|bandwidth|plugin_cost|remedies|overhead|compile) ;; *) echo "$name: no such part; see $0" >&2; exit 2 ;; esac
done
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=

paths=$ROOT:$ROOT/proto:$ROOT/analysis:$ROOT/daemon:$ROOT/operator:$ROOT/cli
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
if [ -d gpu-wheels ] && found=$("$PYTHON" benchmarks/gpu/unpacking.py gpu-wheels "$unpacked"); then
    paths=$paths:$(sed -n 1p <<<"$found")
    export PATH=$(sed -n 2p <<<"$found"):$PATH
fi
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}

"$PYTHON" - <<'CHECK' || exit 1
import sys
import google.protobuf, grpc, msgspec, numpy, prometheus_client, pynvml, rich, torch
import rankscope.cli.main, rankscope.daemon.loop
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, numpy {numpy.__version__}, "
      f"grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}")
CHECK

part() {  # NAME SECONDS MODULE FLAGS…
    local name=$1 seconds=$2 began=$SECONDS status
    shift 2
    timeout --kill-after=20 $((seconds + 15)) \
        "$PYTHON" -m "$@" --out "$OUT" --budget "$seconds" >"$OUT/$name.log" 2>&1
    status=$?
    echo "$name: exit status $status after $((SECONDS - began)) s"
    if [ ! -s "$OUT/$name.md" ]; then
        echo "no table; the end of $name.log:"
        tail -c 1500 "$OUT/$name.log"
    fi
}

for name in "${parts[@]}"; do
    rm -f "$OUT/$name".{md,json,log}
    case $name in
        counters) part counters "$COUNTERS_SECONDS" benchmarks.gpu.counters "${counters_flags[@]}" ;;
        captures) rm -f "$OUT/artifacts.tar"
                  part captures "$CAPTURES_SECONDS" benchmarks.gpu.captures "${captures_flags[@]}" ;;
        aftermath) part aftermath "$AFTERMATH_SECONDS" benchmarks.gpu.aftermath "${aftermath_flags[@]}" ;;
        verdicts) rm -rf "$OUT/verdicts"
                  part verdicts "$VERDICTS_SECONDS" benchmarks.gpu.verdicts "${verdicts_flags[@]}" ;;
        foreign) rm -rf "$OUT/foreign"
                 part foreign "$FOREIGN_SECONDS" benchmarks.gpu.foreign "${foreign_flags[@]}" ;;
        hangs) rm -rf "$OUT/hangs"
               part hangs "$HANGS_SECONDS" benchmarks.gpu.hangs "${hangs_flags[@]}" ;;
        bandwidth) part bandwidth 120 benchmarks.gpu.bandwidth ;;
        plugin_cost) part plugin_cost 240 benchmarks.gpu.plugin_cost ;;
        remedies) rm -rf "$OUT/remedies"
                  part remedies 400 benchmarks.gpu.remedies "${remedies_flags[@]}" ;;
        overhead) part overhead "$OVERHEAD_SECONDS" benchmarks.gpu.overhead "${overhead_flags[@]}" ;;
        compile) part compile "$COMPILE_SECONDS" benchmarks.gpu.compiling "${compile_flags[@]}" ;;
    esac
done
for name in "${parts[@]}"; do
    [ -s "$OUT/$name.md" ] && { echo; cat "$OUT/$name.md"; }
done
exit 0
