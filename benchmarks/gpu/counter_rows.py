"""What the daemon exported during known work, as rows of the report: each a measurement beside what it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.comparing import QUANTITIES, Load, compare, compare_moving_clock, integral, mean
from benchmarks.gpu.observing import Observed, Scrape
from benchmarks.gpu.reporting import Report

MATMULS = ("bf16-1024", "bf16-4096", "bf16-8192", "bf16-16384", "fp16-8192", "fp64-4096")
ESTIMATE_TOLERANCE = 0.05
NEAR_ZERO = 0.01
MIN_SECONDS = 1.5
ESTIMATE = "rankscope_gpu_estimated_flops_per_second"
TENSOR = "rankscope_gpu_tensor_active_ratio"


@dataclass
class Rig:
    report: Report
    stub: bool
    fields: tuple[str, ...]
    environment: dict[str, str]  # of the daemon


def tell_load(rig: Rig, observed: Observed, load: Load) -> None:
    start, end = load.steady

    def seen(name: str, **labels: str) -> float | None:
        return mean(observed.values(name, start, end, **labels))

    tensor, active = seen(TENSOR, pipe="any"), seen("rankscope_gpu_sm_active_ratio")
    estimate, measured = seen(ESTIMATE), load.flops_per_second
    clock, power = seen("rankscope_gpu_clock_hertz", clock="sm"), seen("rankscope_gpu_power_watts")
    pipes = {pipe: seen(TENSOR, pipe=pipe) for pipe in ("hmma", "imma", "dfma")}
    pipes |= {pipe: seen("rankscope_gpu_pipe_active_ratio", pipe=pipe) for pipe in ("fp64", "fp32", "fp16")}
    shown = ", ".join(f"{pipe} {value:.3f}" for pipe, value in pipes.items() if value is not None and value > 0.001)
    text = f"tensor {show(tensor, 3)}, SM active {show(active, 3)}, {shown or 'no pipe busy'}; "
    text += f"{show(clock, 0, 1e-6)} MHz, {show(power, 0)} W"
    if end - start < MIN_SECONDS:
        return  # a pause between others
    if load.kind == "idle":
        near = tensor is not None and active is not None and max(tensor, active) <= NEAR_ZERO
        rig.report.add("idle", text, f"tensor and SM active ≤ {NEAR_ZERO}", near)
    elif load.kind.startswith("fp32"):
        text += f", {show(measured, 1, 1e-12)} TFLOP/s measured"
        rig.report.add(load.kind, text, f"tensor ≤ {NEAR_ZERO}", tensor is not None and tensor <= NEAR_ZERO)
    elif load.kind.startswith("int8"):
        text += f", {show(measured, 1, 1e-12)} TOP/s measured, estimate {show(estimate, 1, 1e-12)} TFLOP/s"
        rig.report.add(load.kind, text, "integers are no FLOPs", estimate is not None and estimate <= 1e12)
    else:
        ratio = estimate / measured if estimate is not None and measured else None
        text = f"{show(estimate, 1, 1e-12)} / {show(measured, 1, 1e-12)} TFLOP/s = {show(ratio, 3)}; {text}"
        strict = load.kind in MATMULS
        rig.report.add(
            f"{load.kind}: estimate ÷ measured",
            text,
            f"within {ESTIMATE_TOLERANCE:.0%}" if strict else "",
            (ratio is not None and abs(ratio - 1) <= ESTIMATE_TOLERANCE) if strict else None,
        )


def show(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "none" if value is None else f"{value * scale:.{digits}f}"


def against_smi(rig: Rig, observed: Observed, loads: list[Load]) -> None:
    if not observed.smis:
        rig.report.add("against nvidia-smi", "not compared: it is not here or does not answer", "compared", False)
        return
    took = mean([one.took_seconds for one in observed.smis])
    rig.report.add("nvidia-smi asked", f"{len(observed.smis)} times, {show(took, 3)} s each")
    for quantity in QUANTITIES:
        found = compare(quantity, observed, loads)
        if quantity.smi not in rig.fields:
            rig.report.add(f"{quantity.name} against nvidia-smi", f"not compared: it does not tell {quantity.smi}")
            continue
        text = f"{found.agreed} of {found.compared} agree"
        text += f", {found.moving} left out while it moved" if found.moving else ""
        text += f"; largest difference {found.largest / quantity.scale:g} ({found.example})" if found.compared else ""
        rig.report.add(f"{quantity.name} against nvidia-smi", text, quantity.target, 0 < found.compared == found.agreed)
    if observed.clocks:
        tell_moving_clock(rig, observed, loads)


def tell_moving_clock(rig: Rig, observed: Observed, loads: list[Load]) -> None:
    clock = compare_moving_clock(observed, loads)
    rig.report.add(
        "SM clock, nvidia-smi between two equal readings of NVML",
        f"{clock.same} of {clock.bracketed} agree",
        "equal",
        0 < clock.bracketed == clock.same,
    )
    rig.report.add(
        "SM clock, what the daemon showed is what NVML had just before",
        f"{clock.among} of {clock.shown}; NVML's own range within a second: median {clock.jitter_mhz[0]:g}, at most "
        f"{clock.jitter_mhz[1]:g} MHz",
        "nearly all",
        clock.shown > 0 and clock.among >= 0.95 * clock.shown,
    )


def throttling(rig: Rig, observed: Observed, loads: list[Load]) -> None:
    for load in loads:
        start, end = load.steady
        # Steady borders: both counters lag by the same.
        if load.kind not in ("bf16-16384", "idle", "bf16-1024") or end - start < MIN_SECONDS:
            continue
        lasted = end - start
        ours = observed.values("rankscope_gpu_throttled_seconds_total", start, end, reason="power_cap")
        smis = [one for one in observed.smis if start <= one.unix_seconds <= end]
        bits = [int(one.number("clocks_event_reasons.active") or 0) & 4 for one in smis]
        counter = "clocks_event_reasons_counters.sw_power_cap"
        counted = [value for one in smis if (value := one.number(counter)) is not None]
        text = f"{show(ours[-1] - ours[0] if ours else None, 2)} s of {lasted:.1f} s by the daemon"
        if bits:
            text += f"; nvidia-smi: cap active in {sum(map(bool, bits))} of {len(bits)} samples"
        if len(counted) > 1:
            text += f", its counter grew by {(counted[-1] - counted[0]) / 1e6:.2f} s"
        is_capped = bool(bits) and all(bits)
        met = (bool(ours) and ours[-1] - ours[0] >= 0.7 * lasted) if is_capped else None
        rig.report.add(f"held down by the power cap, {load.kind}", text, "≥ 70 % of the time" if is_capped else "", met)


def energy(rig: Rig, observed: Observed) -> None:
    joules = [
        (one.unix_seconds, value)
        for one in observed.scrapes
        if (value := one.value("rankscope_gpu_energy_joules_total")) is not None
    ]
    watts = [
        (one.unix_seconds, value)
        for one in observed.scrapes
        if (value := one.value("rankscope_gpu_power_watts")) is not None
    ]
    if len(joules) < 8 or len(watts) < 8:
        rig.report.add("energy against power", "too few readings", "within 5 %", False)
        return
    grown, summed = joules[-1][1] - joules[0][1], integral(watts)
    smi = [(one.unix_seconds, watt) for one in observed.smis if (watt := one.number("power.draw")) is not None]
    by_smi = (
        f"; by nvidia-smi's power {integral(smi):.0f} J over {smi[-1][0] - smi[0][0]:.0f} s" if len(smi) > 1 else ""
    )
    ratio = grown / summed if summed else None
    rig.report.add(
        "energy counter ÷ power over time",
        f"{grown:.0f} / {summed:.0f} J = {show(ratio, 3)} over {joules[-1][0] - joules[0][0]:.0f} s{by_smi}",
        "within 5 %",
        ratio is not None and abs(ratio - 1) <= 0.05,
    )


def tell_attribution(rig: Rig, label: str, scrapes: Sequence[Scrape], uuids: set[str], shared: float) -> None:
    known = {labels["gpu"] for one in scrapes for labels, _ in one.all("rankscope_gpu_info")}
    said = [value for one in scrapes if (value := one.value("rankscope_gpu_shared")) is not None]
    rig.report.add(
        f"{label}: whose GPU",
        f"ranks are on {sorted(uuids)}, GPUs are {sorted(known)}, shared {said[:1]}",
        "the GPU's uuid, shared or not",
        len(uuids) == 1 and uuids == known and said != [] and set(said) == {shared},
    )
