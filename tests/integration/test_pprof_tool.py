from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

from rankscope.analysis.profiles.frames import KERNEL, NATIVE, Frame
from rankscope.analysis.profiles.pprof import DEVICE_TIME, pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack

MAIN = Frame("main", "/app/train.py", 10)
LOAD = Frame("load_image", "/app/dataset.py", 88)
STEP = Frame("Adam.step", "/x/site-packages/torch/optim/adam.py", 3)
PROFILE = Profile.of(
    [
        SampledStack((LOAD, MAIN), 41, 4_100_000_000, 3, "MainThread", "input"),
        SampledStack((LOAD, MAIN), 2, 200_000_000, 1, "MainThread", "input"),
        SampledStack((STEP, MAIN), 7, 700_000_000, 3, "pin", "optimizer"),
        SampledStack((), 2, 200_000_000, 3),
    ]
)


def pprof_tool() -> Path:
    """Fetched if it is missing."""
    subprocess.run([Path(__file__).parents[2] / "tools" / "setup_pprof.sh"], check=True)
    cache = os.environ.get("RANKSCOPE_PPROF_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(cache) if cache else home / "rankscope" / f"pprof-{platform.machine()}") / "pprof"


def top(profile: Path, *options: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(profile.parent), "PPROF_TMPDIR": str(profile.parent)}
    command = [pprof_tool(), "-top", *options, profile]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_go_tool_pprof_reads_the_same_totals(tmp_path: Path) -> None:
    profile = tmp_path / "profile.pb.gz"
    profile.write_bytes(pprof(PROFILE))
    samples = top(profile, "-sample_index=samples")
    assert f"of {PROFILE.samples_total} total" in samples
    assert re.search(r"^\s*43 82\.69% .* load_image$", samples, re.M)
    assert re.search(r"^\s*0 .*\s50 96\.15%\s+main$", samples, re.M)
    assert "of 5200ms total" in top(profile)
    assert re.search(r"^\s*41 .* load_image$", top(profile, "-sample_index=samples", "-tagfocus=rank=3"), re.M)
    assert re.search(r"load_image .*dataset\.py:88", top(profile, "-lines"))


def test_go_tool_pprof_shows_kernel_time_as_device_time(tmp_path: Path) -> None:
    kernel, launch = Frame("gemm", "", 0, KERNEL), Frame("cudaLaunchKernel", "", 0, NATIVE)
    profile = Profile.of([SampledStack((kernel, launch, MAIN), 3, 2_500_000), SampledStack((kernel,), 1, 500_000)])
    exported = tmp_path / "gpu.pb.gz"
    exported.write_bytes(pprof(profile, time_type=DEVICE_TIME))
    shown = top(exported, "-lines")
    assert "Type: device" in shown and "of 3ms total" in shown
    assert re.search(r"^\s*3ms .* gemm \[GPU\]$", shown, re.M)
    assert re.search(r"^\s*0 .* 2\.50ms .* main .*train\.py:10$", shown, re.M)
