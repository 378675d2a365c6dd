from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.daemon.gpu.attribution import Pod
from rankscope.daemon.gpu.collector import GpuCollector
from rankscope.daemon.gpu.readings import GpuSnapshot, GpuState, SourceState
from rankscope.daemon.samples import GpuSample, ProbeFacts, Problem, RankKey
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.v1.window_pb2 import SOURCE_GPU, RankWindow
from tests.unit.daemon import gpu_makers
from tests.unit.daemon import window_makers as make
from tools.daemon_samples import gpu_uuid

RANK = make.rank(0)


def proc(folder: Path, *pids: int) -> Path:
    for pid in pids:
        (folder / str(pid)).mkdir(exist_ok=True)
    return folder


def collected(collector: GpuCollector, window: int = 0) -> GpuSample:
    sample = collector.collect([RANK], make.span(window))[RANK.key]
    assert isinstance(sample, GpuSample)
    return sample


def test_a_window_has_its_own_means_and_counter_increases(tmp_path: Path) -> None:
    def reading(seconds: float, watts: float, throttled: float, clock: float) -> GpuSnapshot:
        gpu = gpu_makers.gpu(
            0,
            RANK.pid,
            power_watts=watts,
            sm_clock_hertz=clock,
            sm_clock_max_hertz=2e9,
            tensor_active_ratio={"any": 0.5},
            throttled_seconds={"power_cap": throttled},
        )
        return gpu_makers.snapshot(gpu, seconds=seconds)

    source = gpu_makers.FakeGpus(reading(1, 100, 5.0, 1e9), reading(2, 300, 5.5, 2e9))
    collector = GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))
    first = collected(collector)
    assert (first.power_watts, first.throttled_seconds, first.sm_clock_ratio) == (200, {"power_cap": 0.5}, 0.75)
    assert first.estimated_flops_per_second == pytest.approx(0.5 * 0.75 * 989e12)
    source.snapshots += [reading(3, 500, 6.0, 1e9), reading(4, 700, 7.0, 1e9)]
    second = collected(collector, 1)
    assert (second.power_watts, second.throttled_seconds) == (600, {"power_cap": 1.5})
    # A window that is shorter than the interval: the latest figures, and counters that stand still.
    third = collected(collector, 2)
    assert (third.power_watts, third.throttled_seconds) == (700, {"power_cap": 0.0})


def test_a_counter_that_began_anew_counts_from_there(tmp_path: Path) -> None:
    source = gpu_makers.FakeGpus()
    collector = GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))
    for window, seconds in enumerate((50.0, 0.25)):
        gpu = gpu_makers.gpu(0, RANK.pid, throttled_seconds={"hw_thermal": seconds})
        source.snapshots.append(gpu_makers.snapshot(gpu, seconds=2 * window + 1))
        sample = collected(collector, window)
    assert sample.throttled_seconds == {"hw_thermal": 0.25}


def test_a_window_has_its_new_errors(tmp_path: Path) -> None:
    def reading(seconds: float, corrected: int, uncorrected: int, xids: dict[int, int]) -> GpuSnapshot:
        ecc = {
            ("volatile", "corrected"): corrected,
            ("volatile", "uncorrected"): uncorrected,
            ("aggregate", "corrected"): 1000 + 2 * corrected,
        }
        gpu = gpu_makers.gpu(0, RANK.pid, ecc_errors=ecc, xid_errors=xids, remapping_pending=uncorrected > 0)
        return gpu_makers.snapshot(gpu, seconds=seconds)

    def errors(sample: GpuSample) -> tuple[int | None, int | None, int | None, bool | None]:
        return sample.ecc_corrected_errors, sample.ecc_uncorrected_errors, sample.xids, sample.row_remap_pending

    source = gpu_makers.FakeGpus(reading(1, 40, 0, {31: 2}), reading(2, 40, 0, {31: 2}))
    collector = GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))
    assert errors(collected(collector)) == (0, 0, 0, False)
    source.snapshots += [reading(3, 50, 1, {31: 2}), reading(4, 52, 1, {31: 2, 63: 1, 94: 1})]
    assert errors(collected(collector, 1)) == (12, 1, 2, True)
    # A reading of a moment in which the GPU did not answer takes nothing away.
    source.snapshots += [
        reading(5, 53, 1, {31: 2, 63: 1, 94: 1}),
        gpu_makers.snapshot(gpu_makers.gpu(0, RANK.pid), seconds=6),
    ]
    assert errors(collected(collector, 2)) == (1, 0, 0, True)
    # The driver was loaded again: its counters began at zero.
    source.snapshots += [reading(7, 53, 1, {}), reading(8, 3, 0, {})]
    assert errors(collected(collector, 3))[:2] == (3, 0)


def test_errors_that_nothing_reads_are_absent_and_not_zero(tmp_path: Path) -> None:
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(gpu_makers.gpu(0, RANK.pid), seconds=1))
    sample = collected(GpuCollector(source, proc_root=proc(tmp_path, RANK.pid)))
    assert (sample.ecc_corrected_errors, sample.ecc_uncorrected_errors, sample.xids) == (None, None, None)
    assert sample.row_remap_pending is None


def test_ecc_errors_fall_back_to_the_aggregate_count(tmp_path: Path) -> None:
    snapshots = [
        gpu_makers.snapshot(gpu_makers.gpu(0, RANK.pid, ecc_errors={("aggregate", "corrected"): count}), seconds=count)
        for count in (1, 3)
    ]
    sample = collected(GpuCollector(gpu_makers.FakeGpus(*snapshots), proc_root=proc(tmp_path, RANK.pid)))
    assert (sample.ecc_corrected_errors, sample.ecc_uncorrected_errors) == (2, None)


@pytest.mark.parametrize("state", [SourceState.HANGING, SourceState.FAILED, SourceState.NO_DRIVER])
def test_a_failed_source_attributes_no_gpu_but_keeps_counters(state: SourceState, tmp_path: Path) -> None:
    gpu = gpu_makers.gpu(0, RANK.pid, state=GpuState.HANGING)
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(gpu, state=state, seconds=1))
    collector = GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))
    assert collector.collect([RANK], make.span()) == {}
    assert not collector.status.fresh and len(collector.status.gpus) == 1


def test_a_single_hanging_gpu_does_not_affect_the_others(tmp_path: Path) -> None:
    hanging = gpu_makers.gpu(1, state=GpuState.HANGING)
    both = gpu_makers.snapshot(gpu_makers.gpu(0, RANK.pid), hanging, state=SourceState.HANGING, seconds=1)
    collector = GpuCollector(gpu_makers.FakeGpus(both), proc_root=proc(tmp_path, RANK.pid))
    assert collected(collector).uuid == gpu_uuid(0)
    assert collector.status.fresh


def test_old_readings_are_not_taken_for_new(tmp_path: Path) -> None:
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(gpu_makers.gpu(0, RANK.pid), seconds=1))
    collector = GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))
    assert collector.collect([RANK], make.span())
    assert not collector.collect([RANK], make.span(20))
    assert not collector.status.fresh


def test_one_ended_process_does_not_imply_another_pid_namespace(tmp_path: Path) -> None:
    """Gone once is gone; gone twice is another namespace, and then nothing says whose GPU it is."""
    gpu = gpu_makers.gpu(3, RANK.pid, 999_999)
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(gpu_makers.gpu(0), gpu, seconds=1))
    collector = GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))
    assert collected(collector).uuid == gpu.uuid
    second = collector.collect([RANK], make.span(1))[RANK.key]
    assert isinstance(second, Problem) and second.kind == "pid_namespace"


class FakePods:
    def __init__(self, pods: Mapping[str, Pod]) -> None:
        self._pods = pods

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def latest(self) -> Mapping[str, Pod]:
        return self._pods


def test_the_kubelet_names_the_pod_of_the_gpu(tmp_path: Path) -> None:
    pods = FakePods({gpu_uuid(0): Pod("trainer-0", "research")})
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(gpu_makers.gpu(0, RANK.pid), seconds=1))
    sample = collected(GpuCollector(source, pods=pods, proc_root=proc(tmp_path, RANK.pid)))
    assert (sample.pod_name, sample.namespace) == ("trainer-0", "research")


def test_a_rank_on_two_gpus_has_no_figures(tmp_path: Path) -> None:
    gpus = [gpu_makers.gpu(index, RANK.pid, power_watts=100.0) for index in range(2)]
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(*gpus, seconds=1))
    sample = collected(GpuCollector(source, proc_root=proc(tmp_path, RANK.pid)))
    assert (sample.gpus, sample.uuid, sample.power_watts) == (2, None, None)
    assert sample.problem is not None and sample.problem.kind == "several_gpus"


def test_a_state_is_logged_once_and_missing_gpus_never_warn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = gpu_makers.FakeGpus(GpuSnapshot("nvml", SourceState.NO_DRIVER, "no driver; no next step"))
    collector = GpuCollector(source)
    for window in range(5):
        collector.collect([], make.span(window))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    source.snapshots.append(GpuSnapshot("nvml", SourceState.HANGING, "it hangs"))
    collector.collect([], make.span(6))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def window_of(sample: GpuSample, facts: ProbeFacts | None = None) -> RankWindow:
    steps = make.steps(1.0, 1.0, facts=facts)
    return assemble(
        RANK, "n", make.span(), 1, RankSamples(steps, gpu=sample), lambda name: 1e15 if name == "G" else None
    )


def test_the_window_carries_identity_usage_and_source() -> None:
    sample = GpuSample(1, True, "GPU-1", "G", power_watts=5.0, sm_active_ratio=float("nan"), memory_used_bytes=7)
    window = window_of(replace(sample, throttled_seconds={"power_cap": 0.5}, pod_name="p", namespace="n"))
    assert (window.identity.gpu_uuid, window.identity.gpu_model) == ("GPU-1", "G")
    assert (window.identity.pod_name, window.identity.namespace) == ("p", "n")
    assert window.gpu.shared and window.gpu.power_watts == 5.0 and window.gpu.memory_used_bytes == 7
    assert not window.gpu.HasField("sm_active_ratio") and not window.gpu.HasField("utilization_ratio")
    assert window.gpu.throttled_seconds == {"power_cap": 0.5}
    assert window.sources["gpu"] == SOURCE_GPU


def test_a_window_carries_only_known_and_sane_error_counts() -> None:
    usage = window_of(
        GpuSample(1, ecc_uncorrected_errors=2, ecc_corrected_errors=0, xids=3, row_remap_pending=False)
    ).gpu
    assert (usage.ecc_uncorrected_errors, usage.ecc_corrected_errors, usage.xids) == (2, 0, 3)
    assert usage.HasField("ecc_corrected_errors") and usage.HasField("row_remap_pending")
    assert not usage.row_remap_pending
    absurd = window_of(GpuSample(1, ecc_uncorrected_errors=2**64, ecc_corrected_errors=-1)).gpu
    assert [field.name for field, _ in absurd.ListFields()] == ["gpus"]


def test_the_gpus_peak_gives_the_mfu_without_a_declared_one() -> None:
    window = window_of(GpuSample(1, uuid="GPU-1", model="G"), ProbeFacts(model_flops_per_step=5e14))
    assert (window.peak_flops_per_second, window.sources["peak_flops_per_second"]) == (1e15, SOURCE_GPU)
    assert window.figures["mfu_ratio"] == pytest.approx(0.5)
    declared = window_of(GpuSample(1, model="G"), ProbeFacts(model_flops_per_step=5e14, peak_flops_per_second=2e15))
    assert declared.figures["mfu_ratio"] == pytest.approx(0.25)


def test_the_problem_of_a_gpu_reaches_the_window(tmp_path: Path) -> None:
    from rankscope.daemon.sampler import Sampler

    gpus = [gpu_makers.gpu(index, RANK.pid) for index in range(2)]
    source = gpu_makers.FakeGpus(gpu_makers.snapshot(*gpus, seconds=1))
    parts = make.collectors(RANK)
    parts = replace(parts, registered=(*parts.registered, GpuCollector(source, proc_root=proc(tmp_path, RANK.pid))))
    sampled = Sampler(parts, make.FakeClock()).sample(make.span())
    key: RankKey = RANK.key
    assert [problem.kind for problem in sampled.samples[key].problems] == ["several_gpus"]
    assert sampled.collectors["gpu"].success
