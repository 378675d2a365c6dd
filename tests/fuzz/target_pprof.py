"""Profiles in the pprof format, as another node sends them."""

from __future__ import annotations

import gzip

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.pprof import PprofError, pprof, read_pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack, merge
from tests.fuzz.checking import check_text

_MAIN, _LOAD = Frame("main", "/app/train.py", 10), Frame("load_image", "/app/dataset.py", 88)
_PROFILE = Profile.of(
    [
        SampledStack((_LOAD, _MAIN), 41, 4_100_000_000, 3, "MainThread", "input"),
        SampledStack((_MAIN,), 2, 200_000_000, 1, "pin", ""),
    ]
)
# Uncompressed: a change in compressed bytes would be refused by the checksum.
SEEDS = [gzip.decompress(pprof(_PROFILE)), gzip.decompress(pprof(Profile.of(())))]


def run(data: bytes) -> None:
    try:
        profile = read_pprof(gzip.compress(data, 1))
    except PprofError as error:
        check_text(str(error))
        return
    for text in (*(frame.function for frame in profile.frames), *profile.threads, *profile.phases):
        check_text(text, 512)
    merged = merge([profile, _PROFILE])
    assert merged.samples_total == profile.samples_total + _PROFILE.samples_total or profile.samples_total > 1 << 50
    merged.top()
