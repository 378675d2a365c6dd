from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rankscope.daemon.gpu import dcgm
from rankscope.daemon.gpu.collector import merge
from rankscope.daemon.gpu.dcgm import DcgmError, DcgmSource, fetch, parse_readings
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, SourceState
from tests.unit.daemon import gpu_makers

LABELS = 'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA A100-SXM4-80GB",Hostname="n"'
OLD = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1200
DCGM_FI_DEV_MAX_SM_CLOCK{{{LABELS}}} 1410
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 61
DCGM_FI_DEV_POWER_USAGE{{{LABELS}}} 398.504000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{LABELS}}} 5000
DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 97
DCGM_FI_DEV_FB_FREE{{{LABELS}}} 1024
DCGM_FI_DEV_FB_USED{{{LABELS}}} 3072
DCGM_FI_DEV_POWER_VIOLATION{{{LABELS}}} 2500000000
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 2
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{LABELS}}} 1
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{LABELS}}} 0
DCGM_FI_PROF_SM_ACTIVE{{{LABELS}}} 0.9
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{LABELS}}} 0.512000
DCGM_FI_PROF_DRAM_ACTIVE{{{LABELS}}} 0.25
DCGM_FI_PROF_PIPE_FP16_ACTIVE{{{LABELS}}} 0.125
"""
NEW = f"""\
DCGM_FI_DEV_SM_CLOCK_HERTZ{{{LABELS}}} 1.2e+09
DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ{{{LABELS}}} 1.41e+09
DCGM_FI_DEV_GPU_TEMP_CELSIUS{{{LABELS}}} 61
DCGM_FI_DEV_BOARD_POWER_WATTS{{{LABELS}}} 398.504
DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL{{{LABELS}}} 5
DCGM_FI_DEV_GPU_UTIL_RATIO{{{LABELS}}} 0.97
DCGM_FI_DEV_FB_CAPACITY_BYTES{{{LABELS}}} 4294967296
DCGM_FI_DEV_FB_USED_BYTES{{{LABELS}}} 3221225472
DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL{{{LABELS}}} 2.5
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 2
DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL{{{LABELS}}} 1
DCGM_FI_DEV_ROW_REMAP_FAILED{{{LABELS}}} 0
DCGM_FI_PROF_SM_UTIL_RATIO{{{LABELS}}} 0.9
DCGM_FI_PROF_TENSOR_UTIL_RATIO{{{LABELS}}} 0.512
DCGM_FI_PROF_DRAM_UTIL_RATIO{{{LABELS}}} 0.25
DCGM_FI_PROF_FP16_UTIL_RATIO{{{LABELS}}} 0.125
"""
A100 = GpuReading(
    uuid="GPU-1",
    index=0,
    name="NVIDIA A100-SXM4-80GB",
    sm_clock_hertz=1.2e9,
    sm_clock_max_hertz=1.41e9,
    temperature_celsius=61.0,
    power_watts=398.504,
    energy_joules=5.0,
    utilization_ratio=0.97,
    memory_used_bytes=3 << 30,
    memory_total_bytes=4 << 30,
    throttled_seconds={"power_cap": 2.5},
    ecc_errors={("volatile", "uncorrected"): 2},
    remapped_rows={"uncorrectable": 1},
    remapping_failed=False,
    sm_active_ratio=0.9,
    tensor_active_ratio={"any": 0.512},
    dram_active_ratio=0.25,
    pipe_active_ratio={"fp16": 0.125},
)


@pytest.mark.parametrize("text", [OLD, NEW, OLD + NEW, NEW + OLD], ids=["old", "new", "both", "both, new first"])
def test_old_and_new_names_read_the_same(text: str) -> None:
    assert parse_readings(text) == (A100,)


def test_the_newer_name_counts_where_both_are_there_and_differ() -> None:
    lines = [f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 10", f"DCGM_FI_DEV_GPU_UTIL_RATIO{{{LABELS}}} 0.9"]
    for text in ("\n".join(lines), "\n".join(reversed(lines))):
        assert parse_readings(text)[0].utilization_ratio == 0.9


def test_a_slice_of_a_gpu_is_left_out() -> None:
    sliced = f'DCGM_FI_PROF_SM_ACTIVE{{{LABELS},GPU_I_PROFILE="1g.10gb",GPU_I_ID="3"}} 0.5'
    assert parse_readings(sliced) == ()


@pytest.mark.parametrize(
    "line",
    [
        f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} NaN",
        f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} -5",
        f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 250",
        f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 9223372036854775792",  # how DCGM says that it does not know
        f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 1e400",
        f"DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} one",
        f'DCGM_FI_DEV_GPU_UTIL{{{LABELS},x="}} 5',
        'DCGM_FI_DEV_GPU_UTIL{UUID="../../etc/passwd"} 5',
        "DCGM_FI_DEV_GPU_UTIL 5",
        "DCGM_FI_DEV_GPU_UTIL{" + "x" * 100_000,
        'DCGM_FI_DEV_GPU_UTIL{UUID="' + "\\" * 5000 + '"} 5',
    ],
)
def test_what_makes_no_sense_is_not_taken_in(line: str) -> None:
    assert all(gpu.utilization_ratio is None for gpu in parse_readings(line))


def test_a_flood_of_gpus_is_bounded() -> None:
    text = "\n".join(f'DCGM_FI_DEV_GPU_TEMP{{gpu="{n}",UUID="GPU-{n}"}} 50' for n in range(5000))
    assert len(parse_readings(text)) == 256


class TestMerging:
    DRIVER = gpu_makers.snapshot(replace(gpu_makers.gpu(0), uuid="GPU-1", power_watts=100.0, energy_joules=1.0))
    DCGM = GpuSnapshot("dcgm", SourceState.OK, gpus=(A100,))

    def test_dcgm_gives_the_profile_and_the_driver_the_rest(self) -> None:
        (gpu,) = merge(self.DRIVER, self.DCGM, True).gpus
        assert gpu.tensor_active_ratio == {"any": 0.512} and gpu.sm_active_ratio == 0.9
        assert (gpu.power_watts, gpu.energy_joules, gpu.memory_used_bytes) == (100.0, 1.0, None)
        assert gpu.throttled_seconds == {}

    def test_a_gpu_that_has_gpm_takes_nothing_from_dcgm(self) -> None:
        measured = replace(self.DRIVER.gpus[0], dram_active_ratio=0.1)
        assert merge(replace(self.DRIVER, gpus=(measured,)), self.DCGM, True).gpus == (measured,)

    def test_without_a_driver_dcgm_gives_all(self) -> None:
        none = GpuSnapshot("nvml", SourceState.NO_DRIVER)
        assert merge(none, self.DCGM, False) == self.DCGM

    def test_counters_keep_their_source_when_the_driver_stops(self) -> None:
        for state in (SourceState.FAILED, SourceState.NO_DRIVER):
            stopped = replace(self.DRIVER, state=state)
            assert merge(stopped, self.DCGM, True) == stopped
        hanging = replace(self.DRIVER, state=SourceState.HANGING, gpus=())
        assert merge(hanging, self.DCGM, True) == hanging

    def test_a_broken_dcgm_changes_nothing(self) -> None:
        assert merge(self.DRIVER, replace(self.DCGM, state=SourceState.FAILED), True) == self.DRIVER


@contextmanager
def served(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_an_exporter_is_read_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "ANSWER_SECONDS", 180.0)
    with served(NEW.encode()) as url:
        source = DcgmSource(url)
        source.poll()
    assert source.latest().state is SourceState.OK
    assert source.since(0)[0].gpus == (A100,)
    source.poll()  # it is gone
    assert source.latest().state is SourceState.FAILED and "dcgm_url" in source.latest().reason


@pytest.mark.parametrize(("body", "status"), [(b"", 500), (b"", 302), (b"x" * (dcgm.ANSWER_BYTES + 1), 200)])
def test_an_answer_that_is_wrong_or_too_long_is_refused(body: bytes, status: int) -> None:
    with served(body, status) as url, pytest.raises(DcgmError):
        fetch(url)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:9400", "http://127.0.0.1:notaport/", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(DcgmError):
        fetch(url)


def test_an_exporter_that_drips_does_not_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b"x")
                        time.sleep(0.05)
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(DcgmError, match="timed out"):
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
