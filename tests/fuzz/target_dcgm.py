"""The text of another program's exporter."""

from __future__ import annotations

import math
from dataclasses import fields

from rankscope.daemon.export.gpu_metrics import gpu_metrics
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.gpu.dcgm import GPUS_READ, parse_readings
from rankscope.daemon.gpu.readings import GpuSnapshot, SourceState
from tests.fuzz.checking import check_metrics, check_text
from tests.fuzz.targets import recorded

SEEDS = recorded("dcgm")
TOKENS = [
    *(
        b"DCGM_FI_DEV_",
        b"DCGM_FI_PROF_",
        b'UUID="GPU-1"',
        b'gpu="0"',
        b'modelName="',
        b'",',
        b"} ",
        b" 1e308\n",
        b'GPU_I_ID="1"',
    ),
    *(
        b"DCGM_FI_DEV_FB_USED",
        b"DCGM_FI_DEV_FB_FREE",
        b"DCGM_FI_DEV_GPU_UTIL",
        b"\\n",
        b'\\"',
        b"\\\\",
        b" 1700000000000\n",
    ),
]
_SOURCE = GpuSnapshot("dcgm", SourceState.OK, polls_total=1, poll_seconds_total=0.5)


def run(data: bytes) -> None:
    readings = parse_readings(data.decode("utf-8", "replace"))
    assert len(readings) <= GPUS_READ
    for reading in readings:
        check_text(reading.uuid, 128)
        check_text(reading.name, 128)
        for field in fields(reading):
            value = getattr(reading, field.name)
            for number in value.values() if isinstance(value, dict) else [value]:
                assert not isinstance(number, float) or (math.isfinite(number) and number >= 0)
    for full in (False, True):
        status = GpuStatus((_SOURCE,), readings, fresh=True)
        check_metrics(gpu_metrics(status, "node", full), series=200 * max(1, len(readings)), data=data)
