"""GPU counters as the daemon exports them, against nvidia-smi in the same second and against work whose size is known.

    python3 -m benchmarks.gpu.counters [--stub] [--out FOLDER] [--budget SECONDS] [--only NAME,…] [--provoke-xid]

See README.md beside this for what has to be on PYTHONPATH. `--stub` tries the script without a GPU, on a library that
only looks like the driver's: it shows that the script works, and nothing about GPUs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu import nvml_facts
from benchmarks.gpu.comparing import LAG_SECONDS, Load, mean
from benchmarks.gpu.counter_rows import (
    ESTIMATE,
    TENSOR,
    Rig,
    against_smi,
    energy,
    show,
    tell_attribution,
    tell_load,
    throttling,
)
from benchmarks.gpu.jobs import training
from benchmarks.gpu.observing import observing, scrape, smi_fields
from benchmarks.gpu.reporting import Report, output_of
from benchmarks.running import RunningDaemon, cpu_seconds, daemon, wait_until

HERE = Path(__file__).resolve().parent
FLAGS = ("--metrics-detail", "full", "--window-seconds", "1", "--captures", "false")
PLAN = (
    *("idle:6", "bf16-1024:6", "bf16-4096:6", "bf16-8192:6", "idle:4", "bf16-16384:7", "idle:4"),
    *("fp32-8192:6", "fp16-8192:5", "int8-8192:5", "fp64-4096:5"),
)
TRANSFORMER_TOLERANCE = 0.08
COST_SECONDS = 10.0
RUN_ID = "known-loads"
STUB = "RANKSCOPE_NVML_STUB"
UNKNOWN_ADDRESS = 1 << 46
XID_SECONDS = 20.0


@contextlib.contextmanager
def loading(*plan: str) -> Iterator[subprocess.Popen[str]]:
    """Known work in a process that looks like the only rank of a job."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
    }
    environment["TORCHELASTIC_RUN_ID"] = RUN_ID
    command = [sys.executable, str(HERE / "loads.py"), *plan]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def follow(process: subprocess.Popen[str], report: Report) -> list[Load]:
    """The loads as they went, once all are over."""
    assert process.stdout is not None
    loads, started = [], 0.0
    for line in process.stdout:
        said = json.loads(line)
        if said["event"] == "start":
            started = said["unix"]
        elif said["event"] == "end":
            loads.append(Load(said["kind"], started, said["unix"], [tuple(chunk) for chunk in said["chunks"]]))
        else:
            report.add(f"load {said['kind']}", f"could not run: {said['why']}")
    return loads


def driver(rig: Rig) -> None:
    """What NVML answers and costs, with nothing going on and under load; what GPM says over windows of any length."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    idle = nvml_facts.ask_all(handle)
    rig.report.raw["nvml_idle"] = idle
    refused = [name for name, one in idle.items() if "Error" in one["answer"]]
    costly = sorted(idle.items(), key=lambda item: -item[1]["median_us"])[:8]
    rig.report.add("NVML calls that are refused", ", ".join(refused) or "none")
    rig.report.add("costliest NVML calls", ", ".join(f"{name} {one['median_us']:.0f} µs" for name, one in costly))
    with loading("bf16-8192:14") as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.5)
        windows = nvml_facts.gpm_windows(handle)
        busy = nvml_facts.ask_all(handle)
    rig.report.raw["gpm"], rig.report.raw["nvml_busy"] = windows, busy
    told = [f"{one['lasted']:.2f} s {one['any_tensor']:.2f}" for one in windows["windows"] if "any_tensor" in one]
    rig.report.add("GPM tensor % of one load by length of window", ", ".join(told))
    rig.report.add(
        "GPM cost", f"sample {windows['sample_get_us']:.0f} µs, metrics {windows['metrics_get_us']:.0f} µs a call"
    )
    clock = windows["sm_clock_mhz"]
    rig.report.add(
        "SM clock under it, 60 samples in 2 s", f"{clock['least']} – {clock['most']}, mean {clock['mean']:.0f} MHz"
    )


def known_loads(rig: Rig) -> None:
    with daemon(*FLAGS, environment=rig.environment) as watching:
        wait_for_gpu(watching)
        with loading(*PLAN) as process, observing(watching, rig.fields) as observed:
            loads = follow(process, rig.report)
            time.sleep(2.5)  # until the last of it has been shown
    rig.report.raw["loads"] = [asdict(replace(load, chunks=load.chunks[:2])) for load in loads]
    rig.report.raw["observed"] = {
        "scrapes": [asdict(one) for one in observed.scrapes[::4]],
        "nvidia_smi": [asdict(one) for one in observed.smis],
        "problems": observed.problems[:20],
    }
    for load in loads:
        tell_load(rig, observed, load)
    against_smi(rig, observed, loads)
    throttling(rig, observed, loads)
    energy(rig, observed)
    while_it_ran = observed.scrapes_between(*loads[-1].steady)
    exclusive = [labels for one in while_it_ran for labels, _ in one.all("rankscope_rank_info")]
    uuids = {labels.get("gpu", "") for labels in exclusive if RUN_ID in labels.get("run", "")}
    tell_attribution(rig, "one rank alone", while_it_ran, uuids, shared=0.0)


def wait_for_gpu(watching: RunningDaemon) -> None:
    def is_up() -> bool:
        return scrape(watching).value("rankscope_gpu_up") == 1

    began = time.monotonic()
    try:
        wait_until(is_up, "the daemon exported a GPU", 20)
    except RuntimeError as error:
        states = scrape(watching).all("rankscope_gpu_source_state")
        raise RuntimeError(f"{error}; sources: {states}; after {time.monotonic() - began:.0f} s") from error


def transformer(rig: Rig) -> None:
    shape, backend = ("cpu-large", "gloo") if rig.stub else ("large", "nccl")
    with daemon(*FLAGS, environment=rig.environment) as watching:
        wait_for_gpu(watching)
        with training(shape, backend, 1, {}, cpu=rig.stub) as job, observing(watching, ()) as observed:
            began = time.time()
            time.sleep(LAG_SECONDS + 5)
            ended = time.time()
            millis = job.steps().between(began, ended)
            by_torch = job.info()["counted_flops_per_step"]
    counted = job.shape.executed_flops_per_step
    measured = counted * len(millis) / (float(millis.sum()) / 1e3)
    estimate = mean(observed.values(ESTIMATE, began + LAG_SECONDS, ended))
    tensor = mean(observed.values(TENSOR, began + LAG_SECONDS, ended, pipe="any"))
    ratio = estimate / measured if estimate is not None else None
    rig.report.add(
        f"transformer ({shape}), estimate ÷ counted FLOPs over time",
        f"{show(estimate, 1, 1e-12)} / {measured / 1e12:.3g} TFLOP/s = {show(ratio, 3)}; tensor {show(tensor, 3)}, "
        f"step {float(millis.mean()):.2f} ms, {counted / 1e12:.4g} TFLOP "
        f"(torch's FlopCounterMode: {by_torch / 1e12:.4g})",
        f"within {TRANSFORMER_TOLERANCE:.0%}",
        ratio is not None and abs(ratio - 1) <= TRANSFORMER_TOLERANCE,
    )


def sharing(rig: Rig) -> None:
    shape = "cpu-small" if rig.stub else "medium"
    with daemon(*FLAGS, environment=rig.environment) as watching:
        wait_for_gpu(watching)
        with training(shape, "gloo", 2, {}, cpu=rig.stub) as job, observing(watching, ()) as observed:
            job.name(watching)
            time.sleep(LAG_SECONDS + 2)
            pids = {str(job.info(rank)["pid"]) for rank in range(2)}
    last = observed.scrapes[-1].all("rankscope_rank_info")
    mine = [labels for labels, _ in last if labels.get("pid") in pids]
    rig.report.add("two ranks on one GPU: ranks found", f"{len(mine)} of 2", "2", len(mine) == 2)
    uuids = {labels.get("gpu", "") for labels in mine}
    tell_attribution(rig, "two ranks on one GPU", observed.scrapes[-4:], uuids, shared=1.0)


def cost(rig: Rig) -> None:
    """One daemon reads the GPUs and one does not, side by side, with no rank about."""
    plain = ("--captures", "false", "--metrics-detail", "full")
    with daemon(*plain, environment=rig.environment) as reading, daemon(*plain, "--gpu", "false") as other:
        wait_for_gpu(reading)
        time.sleep(2)
        used = [cpu_seconds(one.process.pid) for one in (reading, other)]
        before, began = scrape(reading), time.monotonic()
        time.sleep(COST_SECONDS)
        after, lasted = scrape(reading), time.monotonic() - began
        used = [cpu_seconds(one.process.pid) - was for one, was in zip((reading, other), used, strict=True)]
    polls = _grown(before.value("rankscope_gpu_polls_total"), after.value("rankscope_gpu_polls_total"))
    seconds = _grown(before.value("rankscope_gpu_poll_seconds_total"), after.value("rankscope_gpu_poll_seconds_total"))
    each = seconds / polls if polls and seconds is not None else None
    rig.report.add("reading the GPU once", f"{show(each, 2, 1e3)} ms, {show(polls, 0)} readings in {lasted:.0f} s")
    rig.report.add(
        "CPU of the daemon with GPUs, and without",
        f"{used[0] / lasted:.2%} and {used[1] / lasted:.2%} of a core: {(used[0] - used[1]) / lasted:.2%} for the GPU",
    )
    gpu_series = sum(name.startswith("rankscope_gpu") for name in after.series)
    rig.report.add("series of the GPU, full detail", str(gpu_series))


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def xid(rig: Rig) -> None:
    """A kernel of a process of its own writes where nothing is: the driver ends that process and reports XID 31."""
    kernel = 'extern "C" __global__ void f(long long at) { *(volatile int*)at = 1; }'
    code = (
        f"import cupy; cupy.RawKernel({kernel!r}, 'f')((1,), (1,), ({UNKNOWN_ADDRESS},)); "
        "cupy.cuda.runtime.deviceSynchronize()"
    )
    with daemon(*FLAGS, environment=rig.environment) as watching:
        wait_for_gpu(watching)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        give_up_at = time.monotonic() + XID_SECONDS
        found: list[tuple[dict[str, str], float]] = []
        while not found and time.monotonic() < give_up_at:
            found = scrape(watching).all("rankscope_gpu_xid_errors_total")
            time.sleep(0.2)
        up = scrape(watching).value("rankscope_gpu_up")
    last = done.stderr.strip().splitlines()[-1:] or ["no error"]
    counts = {labels["xid"]: value for labels, value in found}
    rig.report.add(
        "XID of a bad write", f"{counts}, GPU up {up}; the process: {last[0][:120]}", "counted", bool(counts)
    )


# In the order of what must not be missing when time runs out, with the seconds they take.
PARTS: dict[str, tuple[Callable[[Rig], None], float]] = {
    "loads": (known_loads, 90),
    "transformer": (transformer, 35),
    "sharing": (sharing, 35),
    "cost": (cost, 20),
    "driver": (driver, 30),
    "xid": (xid, 25),
}


def use_stub() -> None:
    """Restarts with the stub in the place of the driver's library."""
    from tools.nvml_stub import Script, build_stub

    if STUB in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-stub-"))
    environment = Script(folder / "script", **{"gpus": 1, "gpu.gpm.5": 0.2}).environment(build_stub(folder))
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu.counters", *sys.argv[1:]], environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", action="store_true", help="a library that looks like the driver's")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--budget", type=float, default=200.0, help="seconds; parts that would not fit are left out")
    parser.add_argument("--only", default=",".join(name for name in PARTS if name != "xid"), help=", ".join(PARTS))
    parser.add_argument("--provoke-xid", action="store_true", help="also have a process write where it may not")
    asked = parser.parse_args()
    if asked.stub:
        use_stub()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    title = "GPU counters (dry run against a stub: only shows that the script works)" if asked.stub else "GPU counters"
    report = Report(title, asked.out, "counters", asked.budget, judged=not asked.stub)
    rig = Rig(report, asked.stub, smi_fields(), {STUB: os.environ[STUB]} if STUB in os.environ else {})
    report.raw["nvidia_smi_fields"] = rig.fields
    report.raw["nvidia_smi_q"] = output_of(["nvidia-smi", "-q", "-i", "0"])
    try:
        for name in (*asked.only.split(","), *(["xid"] if asked.provoke_xid else [])):
            function, seconds = PARTS[name]
            report.part(name, partial(function, rig), seconds)
    finally:
        missed = report.finish()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
