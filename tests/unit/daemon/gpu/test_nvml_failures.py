"""A driver that is missing, fails, hangs, loses a GPU or is reloaded: told as a state, and over when it is over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope.daemon.gpu import nvml_calls
from rankscope.daemon.gpu.readings import GpuSnapshot, GpuState, SourceState
from tests.unit.daemon.gpu.stubbed_source import PATIENCE_SECONDS, Stubbed
from tools.nvml_stub import Script

Start = Callable[..., Stubbed]


def test_a_node_without_the_library_has_no_driver(stubbed: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_calls, "PLACES", ("libnvidia-ml-is-not-here.so.1",))
    started = stubbed()
    snapshot = started.until(lambda now: now.state is SourceState.NO_DRIVER)
    assert "libnvidia-ml-is-not-here" in snapshot.reason
    assert snapshot.gpus == ()
    monkeypatch.undo()  # a driver is installed; the script is not there in the environment any more either
    started.until(lambda now: "error 9" in now.reason)


@pytest.mark.parametrize(
    ("lines", "state", "says"),
    [
        ({"init_error": 9}, SourceState.NO_DRIVER, "load the NVIDIA driver"),
        ({"init_error": 18}, SourceState.FAILED, "reboot"),
        ({"init_error": 999}, SourceState.FAILED, "/dev/nvidia*"),
        ({"gpus": 0}, SourceState.NO_GPU, "lists no GPU"),
    ],
)
def test_says_why_there_are_no_gpus_and_finds_them_later(
    stubbed: Start, script: Script, lines: dict[str, int], state: SourceState, says: str
) -> None:
    script.set(lines)
    started = stubbed()
    assert says in started.until(lambda now: now.state is state).reason
    script.set(dict.fromkeys(lines))
    assert started.until_ok().gpus[0].state is GpuState.OK
    assert started.library.stub_initialized() == 1


def test_a_lost_gpu_does_not_affect_the_others(stubbed: Start, script: Script) -> None:
    script.set({"gpus": 3})
    started = stubbed()
    uuid = started.until_ok().gpus[1].uuid
    script.set({"gpu.1.lost": 1, "xids": "1:79"})
    lost = started.until_gpu(GpuState.LOST, 1)
    assert (lost.uuid, lost.temperature_celsius, lost.utilization_ratio) == (uuid, None, None)
    snapshot = started.until(lambda now: any(gpu.xid_errors == {79: 1} for gpu in now.gpus if gpu.uuid == uuid))
    assert snapshot.state is SourceState.OK
    assert {gpu.state for gpu in snapshot.gpus if gpu.uuid != uuid} == {GpuState.OK}
    assert any("lost GPUs" in problem for problem in snapshot.problems)
    # Even after the library was reopened, which does not hand out this GPU, it is not forgotten.
    opened = started.calls("nvmlInitWithFlags")
    started.until(lambda _: started.calls("nvmlInitWithFlags") > opened)
    snapshot = started.until_ok()
    assert [(gpu.state, gpu.xid_errors) for gpu in snapshot.gpus if gpu.uuid == uuid] == [(GpuState.LOST, {79: 1})]
    # The others are still listened to.
    script.set({"xids": "1:79,2:31"})
    started.until(lambda now: any(gpu.xid_errors == {31: 1} for gpu in now.gpus))
    script.set({"gpu.1.lost": None})
    back = started.until_gpu(GpuState.OK, 1)
    assert (back.uuid, back.temperature_celsius, back.xid_errors) == (uuid, 65.0, {79: 1})


def test_the_xid_wait_does_not_spin_with_a_lost_gpu(stubbed: Start, script: Script) -> None:
    script.set({"gpus": 2})
    started = stubbed(lost_retry_seconds=(600.0, 600.0))
    started.until_ok()
    script.set({"gpu.1.lost": 1})
    started.until_gpu(GpuState.LOST, 1)
    started.until(lambda _: started.calls("nvmlEventSetCreate") >= 2)  # a new set, without the lost one
    waits = started.calls("nvmlEventSetWait_v2")
    started.until_ok(10)
    assert started.calls("nvmlEventSetWait_v2") - waits < 500
    script.set({"xids": "0:13"})
    started.until(lambda now: now.gpus[0].xid_errors == {13: 1})


def test_a_gpu_of_which_nothing_can_be_read_has_failed(stubbed: Start, script: Script) -> None:
    started = stubbed()
    started.until_ok()
    script.set({"driver_error": 999})
    snapshot = started.until(lambda now: now.state is SourceState.FAILED)
    assert [gpu.state for gpu in snapshot.gpus] == [GpuState.FAILED]
    script.set({"driver_error": None})
    assert started.until_ok().gpus[0].state is GpuState.OK


def test_a_reloaded_driver_is_read_again_without_losing_counts(stubbed: Start, script: Script) -> None:
    script.set({"gpus": 2, "xids": "0:31,0:31,1:63"})
    started = stubbed()
    started.until(lambda now: len(now.gpus) == 2 and now.gpus[1].xid_errors == {63: 1})
    throttled = started.until(lambda now: now.gpus[0].throttled_seconds["power_cap"] > 0).gpus[0]
    script.set({"reload": 1, "init_error": 9})
    gone = started.until(lambda now: now.state is SourceState.NO_DRIVER)
    assert [gpu.state for gpu in gone.gpus] == [GpuState.FAILED, GpuState.FAILED]
    assert gone.gpus[0].xid_errors == {31: 2}
    script.set({"init_error": None})
    back = started.until_ok().gpus[0]
    assert back.xid_errors == {31: 2}
    assert back.throttled_seconds["power_cap"] >= throttled.throttled_seconds["power_cap"]
    # The event set went with the driver: a new one hears this.
    script.set({"xids": "0:31,0:31,1:63,0:31"})
    started.until(lambda now: bool(now.gpus) and now.gpus[0].xid_errors == {31: 3})


def test_a_hanging_call_silences_only_its_own_gpu(stubbed: Start, script: Script) -> None:
    script.set({"gpus": 3})
    started = stubbed(hang_seconds=0.5)
    started.until_ok()
    script.set({"gpu.1.hang.nvmlDeviceGetClockInfo": 1})

    def is_told(now: GpuSnapshot) -> bool:
        """When this machine stands still, other calls hang for a moment."""
        said = "GPU 1" in now.reason and "nvmlDeviceGetClockInfo has not returned" in now.reason
        return now.state is SourceState.HANGING and now.gpus[1].state is GpuState.HANGING and said

    snapshot = started.until(is_told)
    assert snapshot.gpus[1].temperature_celsius is None
    script.set({"gpu.2.temperature": 81, "xids": "0:48"})
    started.until(lambda now: now.gpus[2].temperature_celsius == 81.0)
    started.until(lambda now: now.gpus[0].xid_errors == {48: 1})
    script.set({"gpu.1.hang.nvmlDeviceGetClockInfo": None})
    assert started.until_ok(5).gpus[1].state is GpuState.OK
    assert started.library.stub_initialized() == 1  # it was not opened again meanwhile


def test_a_library_that_hangs_when_opened_blocks_nobody(stubbed: Start, script: Script) -> None:
    script.set({"hang.nvmlInitWithFlags": 1})
    started = stubbed(opening_seconds=600.0)  # `start` returns while the call does not
    assert started.source.latest().state is SourceState.STARTING
    started.source._opening_seconds = 0.5
    assert "opening NVML" in started.until(lambda now: now.state is SourceState.HANGING).reason
    script.set({"hang.nvmlInitWithFlags": None})
    started.until_ok()


def test_a_process_ends_at_once_while_a_call_hangs(stub_library: Path, script: Script) -> None:
    script.set({"hang.nvmlDeviceGetPowerUsage": 1})
    program = """
from rankscope.daemon.gpu.nvml import NvmlSource
import time
source = NvmlSource(0.05, hang_seconds=0.2)
source.start()
while source.latest().state.value != "hanging":
    time.sleep(0.02)
source.close()
print("closed", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=script.environment(stub_library),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


def test_a_driver_without_events_is_read_all_the_same(stubbed: Start, script: Script) -> None:
    script.set({"error.nvmlEventSetCreate": 3})
    started = stubbed()
    started.until(lambda now: any("XID errors: not reported" in problem for problem in now.problems))
    assert started.until_ok().gpus[0].temperature_celsius == 65.0
    assert started.calls("nvmlEventSetCreate") < 5  # it does not insist
