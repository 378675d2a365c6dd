"""Several windows of one capture in one piece of memory, as the daemon fetches it."""

from __future__ import annotations

import os
from typing import Sequence

from . import layout
from .profiling import Profile, seal


def write_windows(profiles: Sequence[Profile]) -> int:
    """A descriptor of all their traces, one after the other, and of the sizes that tell them apart. Once only."""
    packed = os.memfd_create(layout.TRACE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        sizes = [_append(profile, packed) for profile in profiles]
        end = b"".join(map(layout.WINDOW_BYTES.pack, sizes)) + layout.WINDOWS.pack(len(sizes), layout.WINDOWS_MARK)
        os.write(packed, end)
        seal(packed)
        return packed
    except BaseException:
        os.close(packed)
        raise


def _append(profile: Profile, packed: int) -> int:
    trace = profile.write()
    try:
        size = left = os.fstat(trace).st_size
        os.lseek(trace, 0, os.SEEK_SET)
        while left > 0:
            left -= os.sendfile(packed, trace, None, left)  # lets others run, unlike a copy by Python
        return size
    finally:
        os.close(trace)
