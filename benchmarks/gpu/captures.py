"""Captures of real training on a GPU, against what the job itself records: steps, skew, collectives, MFU, and what a
capture leaves behind.

    python3 -m benchmarks.gpu.captures [--cpu] [--out FOLDER] [--budget SECONDS] [--only NAME,…]

See README.md beside this for what has to be on PYTHONPATH. `--cpu` tries the same without a GPU, on tiny models: what
only a GPU can show is then left out and said so."""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.capturing import Captured, capture, during_millis, libkineto_said, step_times
from benchmarks.gpu.jobs import TrainingJob, training
from benchmarks.gpu.reporting import Report
from benchmarks.gpu.shapes import SHAPES
from benchmarks.running import RunningDaemon, daemon
from rankscope.analysis.mfu import peak_flops_per_second
from rankscope.probe import injecting

MFU_TOLERANCE = 0.03
AFTER_AT_MOST = 1.02
SKEW_AT_MOST_MS = 50.0
POLL_SECONDS = 5.0
OURS_SECONDS = 2.0
CPU_PEAK_FLOPS = 1e11
ARTIFACTS_LIMIT_BYTES = 14 << 20

KINETO = {"KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "0"}
EVERYTHING = ("--shapes", "--stacks", "--memory", "--flops", "--modules")
TEARDOWN = {"TEARDOWN_CUPTI": "1"}
PROBE = {"RANKSCOPE_PROBE": "1", "PYTHONPATH": injecting.inject_folder()}


@dataclass
class Rig:
    report: Report
    watching: RunningDaemon
    artifacts: Path
    cpu: bool
    latencies: list[float]
    quiet_seconds: float

    def capture(self, job: TrainingJob, name: str, *flags: str) -> Captured:
        output = self.artifacts / f"{len(list(self.artifacts.iterdir())):02d}"
        one = capture(self.watching, job, name, flags, output)
        if one.latency_seconds is not None and "kineto" in {rank["backend"] for rank in one.ranks}:
            self.latencies.append(one.latency_seconds)
        self.report.raw.setdefault("captures", []).append({"run": job.run_id, **asdict(one)})
        return one

    def job_flags(self, shape: str, ranks: int, *more: dict[str, str]) -> dict[str, str]:
        declared = {"RANKSCOPE_FLOPS_PER_STEP": repr(SHAPES[shape].flops_per_step * ranks)}
        if self.cpu:
            declared["RANKSCOPE_PEAK_FLOPS"] = repr(CPU_PEAK_FLOPS)
        for one in more:
            declared |= one
        return declared

    def peak_flops(self, job: TrainingJob) -> float:
        peak = CPU_PEAK_FLOPS if self.cpu else peak_flops_per_second(job.info()["device"])
        if peak is None:
            raise ValueError(f"no peak is known of {job.info()['device']}")
        return peak

    def settle(self) -> None:
        time.sleep(self.quiet_seconds + 1.0)


def told(rig: Rig, label: str, one: Captured, backend: str, steps: int | None) -> None:
    """The rows that every capture gets."""
    if not one.delivered:
        rig.report.add(label, f"not delivered: {one.why_not}", "every rank delivers", False)
        return
    found = [(rank["backend"], rank["steps"]) for rank in one.ranks]
    text = f"{len(found)} rank(s) by {found[0][0]}, steps {[count for _, count in found]}, "
    if one.latency_seconds is not None:
        text += f"began {one.latency_seconds:.1f} s after asking, "
    sizes = [rank["bytes"] for rank in one.ranks]
    text += f"answer after {one.answered_unix_seconds - one.asked_unix_seconds:.1f} s, {max(sizes) / 1024:.0f} KiB"
    if one.kernels:
        look = one.kernels[0]
        text += f" (JSON {look['json_bytes'] / 2**20:.1f} MiB, {look['kernels']} kernels)"
    right = all(by == backend and (steps is None or count == steps) for by, count in found)
    rig.report.add(label, text, f"by {backend}" + (f", {steps} steps" if steps else ""), right)
    if len(found) > 1:
        skew = one.report.get("start_skew_ms")
        starts = [rank["start_unix_ms"] for rank in one.ranks]
        rig.report.add(
            f"{label}: start skew",
            f"{skew} ms; by the artifacts' starts {max(starts) - min(starts)} ms",
            f"< {SKEW_AT_MOST_MS:g} ms",
            skew is not None and skew < SKEW_AT_MOST_MS,
        )
    notes = [note for rank in one.ranks for note in rank.get("notes", ())] + list(one.report.get("notes", ()))
    for note in list(dict.fromkeys(notes))[:4]:
        rig.report.add(f"{label}: note", note)
    for look in one.kernels[:1]:
        if look["launches_per_step"] and sum(look["launches_per_step"]):
            shares = [
                hit / launched
                for hit, launched in zip(look["matched_per_step"], look["launches_per_step"], strict=True)
                if launched
            ]
            rig.report.add(
                f"{label}: launches with their kernel, by step",
                " ".join(f"{share:.3f}" for share in shares[:12]) + f"; launches {look['launches_per_step'][:6]}",
                "none lacks kernels against the others" if steps else "",
                (min(shares) >= 0.98 * max(shares)) if steps else None,
            )


def collectives(rig: Rig, label: str, one: Captured) -> None:
    counts = (one.ranks[0].get("summary") or {}).get("collectives") if one.ranks else None
    named = one.kernels[0]["collective_kernels"] if one.kernels else []
    more = f"; names with nccl in the trace: {', '.join(named)}" if named else ""
    rig.report.add(f"{label}: collectives in the summary", f"{counts}{more}", "some", bool(counts))


def utilisation(rig: Rig, label: str, job: TrainingJob, one: Captured) -> None:
    summary = (one.ranks[0].get("summary") or {}) if one.ranks else {}
    mfu = summary.get("mfu_ratio")
    during = during_millis(job, one)
    if mfu is None or not len(during):
        rig.report.add(f"{label}: MFU", f"summary {mfu}, steps of the script {len(during)}", "both are there", False)
        return
    flops, peak = job.shape.flops_per_step, rig.peak_flops(job)
    own = flops / (float(np.median(during)) / 1e3) / peak
    rig.report.add(
        f"{label}: MFU of the summary ÷ FLOPs over time by the script, the same steps",
        f"{mfu:.4f} / {own:.4f} = {mfu / own:.4f} (step {summary['step_seconds'] * 1e3:.3f} / "
        f"{np.median(during):.3f} ms, {len(during)} steps)",
        f"within {MFU_TOLERANCE:.0%}",
        abs(mfu / own - 1) <= MFU_TOLERANCE,
    )


def aftermath(rig: Rig, label: str, job: TrainingJob, one: Captured, target: float | None) -> float | None:
    """Step time before, during and after, by the job."""
    times = step_times(job, one, rig.quiet_seconds, rig.quiet_seconds)
    rig.report.raw.setdefault("step_times", []).append({"label": label, **asdict(times)})
    ratio = times.after_ratio
    during = f"{times.during:.3f} ms (×{times.during_ratio:.3f})" if times.during else "not seen"
    mean = f"{times.after_mean / times.before_mean:.3f}" if times.after_mean else "none"
    rig.report.add(
        f"{label}: step time after ÷ before",
        f"{ratio:.3f} (means {mean}); before {times.before:.3f} ms, during {during}, after {times.after:.3f} ms; "
        f"{times.steps} steps"
        if ratio is not None
        else "no steps after it",
        f"≤ {target}" if target else "",
        (ratio is not None and ratio <= target) if target else None,
    )
    by_daemon = one.ranks[0].get("step_times") if one.ranks else None
    if by_daemon and by_daemon.get("before_seconds"):
        rig.report.add(
            f"{label}: the same by the daemon",
            ", ".join(f"{key.split('_')[0]} {value * 1e3:.3f} ms" for key, value in by_daemon.items() if value),
        )
    return ratio


def control(rig: Rig, label: str, job: TrainingJob) -> None:
    """How much the job varies by itself: two quiet stretches without a capture in between."""
    time.sleep(rig.quiet_seconds)
    steps, now = job.steps(), time.time()
    late = steps.between(now - rig.quiet_seconds, now)
    early = steps.between(now - 2 * rig.quiet_seconds, now - rig.quiet_seconds)
    rig.report.add(
        f"{label}: the same without a capture in between",
        f"{np.median(late) / np.median(early):.3f}; step {np.median(early):.3f} ms, quartiles "
        f"{np.quantile(early, 0.25):.3f} – {np.quantile(early, 0.75):.3f}",
    )


def heard(rig: Rig, label: str, job: TrainingJob) -> None:
    lines = libkineto_said(job)
    rig.report.raw.setdefault("libkineto", {})[label] = {"telling": lines, "log": job.log(0)[-20000:]}
    late = [line for line in lines if "late" in line or "past" in line]
    if late:
        rig.report.add(f"{label}: libkineto says", " / ".join(late[:3]))


def compute_bound(rig: Rig) -> None:
    """One rank over NCCL, nothing of Rankscope's in it: by steps, by time, and with everything recorded."""
    shape, backend = ("cpu-large", "gloo") if rig.cpu else ("large", "nccl")
    with training(shape, backend, 1, rig.job_flags(shape, 1, KINETO, TEARDOWN), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, {backend}"
        one = rig.capture(job, name, "--steps", "10")
        told(rig, f"{label}, 10 steps", one, "kineto", 10)
        if one.delivered:
            collectives(rig, label, one)
            utilisation(rig, label, job, one)
        aftermath(rig, label, job, one, None if rig.cpu else AFTER_AT_MOST)
        control(rig, label, job)
        told(rig, f"{label}, 0.5 s", rig.capture(job, name, "--seconds", "0.5"), "kineto", None)
        full = rig.capture(job, name, "--seconds", "0.3", *EVERYTHING)
        told(rig, f"{label}, 0.3 s with all options", full, "kineto", None)
        aftermath(rig, f"{label}, all options", job, full, None if rig.cpu else AFTER_AT_MOST)
        heard(rig, label, job)


def launch_bound(rig: Rig) -> None:
    """The kind of job that suffers; the probe knows its step time, so recordings are short."""
    shape, backend = ("cpu-small", "gloo") if rig.cpu else ("small", "nccl")
    captures = 1 if rig.cpu else 2
    with training(shape, backend, 1, rig.job_flags(shape, 1, KINETO, TEARDOWN, PROBE), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, {backend}, with the probe"
        control(rig, label, job)
        for number in range(1, captures + 1):
            one = rig.capture(job, name, "--steps", "5")
            told(rig, f"{label}, capture {number}", one, "kineto", 5)
            if number == 1 and one.delivered:
                utilisation(rig, label, job, one)
            aftermath(rig, f"{label}, capture {number}", job, one, None if rig.cpu else AFTER_AT_MOST)
        full = rig.capture(job, name, "--steps", "3", *EVERYTHING)
        told(rig, f"{label}, 3 steps with all options", full, "kineto", 3)
        aftermath(rig, f"{label}, all options", job, full, None if rig.cpu else AFTER_AT_MOST)
        heard(rig, label, job)


def without_teardown(rig: Rig) -> None:
    if rig.cpu:
        rig.report.add("without TEARDOWN_CUPTI", "not tried: only CUDA processes are refused")
        return
    with training("small", "nccl", 1, rig.job_flags("small", 1, KINETO), cpu=False) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = "small, 1 rank, without TEARDOWN_CUPTI"
        refused = rig.capture(job, name, "--seconds", "0.3")
        was = refused.status == 1 and "TEARDOWN_CUPTI" in refused.why_not
        rig.report.add(f"{label}: refused", refused.why_not[:160], "exit status 1, says why", was)
        control(rig, label, job)
        one = rig.capture(job, name, "--seconds", "0.3", "--allow-slowdown")
        told(rig, f"{label}, --allow-slowdown", one, "kineto", None)
        aftermath(rig, label, job, one, None)
        heard(rig, label, job)


def two_ranks(rig: Rig) -> None:
    shape = "cpu-small" if rig.cpu else "medium"
    with training(shape, "gloo", 2, rig.job_flags(shape, 2, KINETO, TEARDOWN), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 2 ranks on one device, gloo"
        one = rig.capture(job, name, "--steps", "5")
        told(rig, f"{label}, 5 steps", one, "kineto", 5)
        if one.delivered:
            collectives(rig, label, one)
            join = (one.report.get("summary") or {}).get("join") or {}
            rig.report.add(
                f"{label}: joined",
                f"{join.get('verdict')}: {join.get('collectives_matched')} collectives matched, last arrivals "
                f"{join.get('last_arrivals')}, {join.get('confidence')} confidence",
                "collectives match",
                bool(join.get("collectives_matched")),
            )
        aftermath(rig, label, job, one, None)
        told(rig, f"{label}, 0.3 s", rig.capture(job, name, "--seconds", "0.3"), "kineto", None)
        heard(rig, label, job)


def by_probe(rig: Rig) -> None:
    shape, backend = ("cpu-large", "gloo") if rig.cpu else ("large", "nccl")
    with training(shape, backend, 1, rig.job_flags(shape, 1, TEARDOWN, PROBE), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, {backend}, by the probe"
        one = rig.capture(job, name, "--steps", "5")
        told(rig, f"{label}, 5 steps", one, "probe", 5)
        if one.delivered:
            collectives(rig, label, one)
            utilisation(rig, label, job, one)
        aftermath(rig, label, job, one, None if rig.cpu else AFTER_AT_MOST)
        told(rig, f"{label}, 0.3 s", rig.capture(job, name, "--seconds", "0.3"), "probe", None)


def by_stacks(rig: Rig) -> None:
    shape, backend = ("cpu-small", "gloo") if rig.cpu else ("small", "nccl")
    with training(shape, backend, 1, rig.job_flags(shape, 1), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, nothing set"
        one = rig.capture(job, name, "--seconds", "2")
        told(rig, f"{label}, 2 s", one, "stacks", None)
        aftermath(rig, label, job, one, None if rig.cpu else AFTER_AT_MOST)


# In the order of what must not be missing when time runs out; seconds on a machine with a GPU.
PARTS: dict[str, tuple[Callable[[Rig], None], float]] = {
    "compute-bound": (compute_bound, 65),
    "launch-bound": (launch_bound, 65),
    "two-ranks": (two_ranks, 40),
    "without-teardown": (without_teardown, 35),
    "probe": (by_probe, 40),
    "stacks": (by_stacks, 20),
}


def latency(rig: Rig) -> None:
    if not rig.latencies:
        rig.report.add("from asking to the first recorded step", "no capture by kineto", "some", False)
        return
    rig.report.add(
        f"from asking to the first recorded step, {len(rig.latencies)} captures by kineto",
        f"median {statistics.median(rig.latencies):.2f} s, {min(rig.latencies):.2f} – {max(rig.latencies):.2f} s",
        f"≤ {POLL_SECONDS + OURS_SECONDS:g} s",
        max(rig.latencies) <= POLL_SECONDS + OURS_SECONDS,
    )


def keep_artifacts(folder: Path, target: Path) -> None:
    """As many as come in under the limit, small ones first."""
    left = ARTIFACTS_LIMIT_BYTES
    with tarfile.open(target, "w") as archive:
        for path in sorted(folder.rglob("*.gz"), key=lambda one: one.stat().st_size):
            left -= path.stat().st_size + 1024
            if left < 0:
                break
            archive.add(path, path.relative_to(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU: to try the script itself")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--budget", type=float, default=330.0, help="seconds; parts that would not fit are left out")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    asked = parser.parse_args()
    title = "Captures (dry run without a GPU: only shows that the script works)" if asked.cpu else "Captures"
    report = Report(title, asked.out, "captures", asked.budget)
    artifacts = Path(tempfile.mkdtemp(prefix="rankscope-artifacts-"))
    # Ended by `timeout`: what there is by then is told, and nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with report.part("daemon"), daemon() as watching:
            rig = Rig(report, watching, artifacts, asked.cpu, [], 2.0 if asked.cpu else 4.0)
            for name in asked.only.split(","):
                function, seconds = PARTS[name]
                with report.part(name, seconds):
                    function(rig)
            latency(rig)
    finally:
        keep_artifacts(artifacts, asked.out / "artifacts.tar")
        shutil.rmtree(artifacts, ignore_errors=True)
        missed = report.finish()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
