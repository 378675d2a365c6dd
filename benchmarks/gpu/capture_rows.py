"""What one capture showed, as rows of the report: each row a measurement beside what it has to be."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.capturing import Captured, capture, during_millis, libkineto_said, step_times
from benchmarks.gpu.jobs import TrainingJob
from benchmarks.gpu.reporting import Report
from benchmarks.running import RunningDaemon
from rankscope.analysis.models.device_peaks import peak_flops_per_second
from tools.jobs.shapes import SHAPES

MFU_TOLERANCE = 0.03
AFTER_AT_MOST = 1.02
SKEW_AT_MOST_MS = 50.0
CPU_PEAK_FLOPS = 1e11


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


def advice(rig: Rig, label: str, one: Captured) -> None:
    summary = (one.ranks[0].get("summary") or {}) if one.ranks else {}
    rig.report.add(f"{label}: advice of the summary", "; ".join(summary.get("advice") or ()) or "none")


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
