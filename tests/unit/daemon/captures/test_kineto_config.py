"""What libkineto is sent: complete, checked, and never a value that would stop its parser half way."""

from __future__ import annotations

import math

import pytest

from rankscope.daemon.captures.kineto.config import configuration, log_file, written_file
from rankscope.daemon.captures.orders import MAX_RECORDING_SECONDS, CaptureError, Options

PATH = "/tmp/rankscope-c-1-rank3.json"


def test_every_option_is_said_and_nothing_else() -> None:
    text = configuration(PATH, 1_700_000_000_123, 0.4, Options(shapes=True, memory=True))
    assert text.splitlines() == [
        f"ACTIVITIES_LOG_FILE={PATH}",
        "PROFILE_START_TIME=1700000000123",
        "ACTIVITIES_DURATION_MSECS=400",
        "ACTIVITIES_WARMUP_PERIOD_SECS=0",
        "PROFILE_REPORT_INPUT_SHAPES=true",
        "PROFILE_WITH_STACK=false",
        "PROFILE_WITH_FLOPS=false",
        "PROFILE_WITH_MODULES=false",
        "PROFILE_PROFILE_MEMORY=true",
    ]
    assert text.endswith("\n")


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_RECORDING_SECONDS + 2, math.nan, math.inf])
def test_a_length_out_of_bounds_is_never_sent(seconds: float) -> None:
    with pytest.raises(ValueError, match="not fit"):
        configuration(PATH, 1_700_000_000_000, seconds, Options())


@pytest.mark.parametrize(
    "path", ["/tmp/a b.json", "/tmp/a\nPROFILE_START_TIME=1", "x.json", "/tmp/../etc/x", "/tmp//x", ""]
)
def test_an_unsafe_path_is_never_sent(path: str) -> None:
    with pytest.raises(ValueError, match="not fit"):
        configuration(path, 1_700_000_000_000, 1.0, Options())


def test_the_trace_path_has_folder_rank_and_container_pid() -> None:
    assert log_file("c-1", 3) == PATH
    assert log_file("c-1", 3, "/scratch/traces/") == "/scratch/traces/rankscope-c-1-rank3.json"
    assert written_file(PATH, 17) == "/tmp/rankscope-c-1-rank3_17.json"


@pytest.mark.parametrize(
    "folder", ["../up", "/a/../b", "/a b", "/a\nB=1", "relative", "/a/./b", "/" + "x" * 2000, "$HOME"]
)
def test_an_unusable_trace_folder_is_refused_by_name(folder: str) -> None:
    with pytest.raises(CaptureError, match=r"KINETO_ONDEMAND_TRACE_DIR=.* of rank 3 cannot be used") as error:
        log_file("c-1", 3, folder)
    assert len(str(error.value)) < 300
