"""torch.profiler as the probe uses it: the user's profilers go first, recordings begin and end outside of the
optimizer's annotation, traces are written to memory, and only while enough of it is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from enum import Enum
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

from . import ring_layout
from .torch_timers import hide_from_dynamo

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UserProfilers:
    """Notices the user's own profilers, and lets them go first: two at a time do not work, the second one raises.

    The functions of torch.autograd.profiler that all profilers of torch call are wrapped for that."""

    def __init__(self, module: Any, give_way: Callable[[], None]) -> None:
        """`give_way` ends our own recording."""
        self._module = module
        self._give_way = give_way
        self._prepared = False
        self._ours = threading.local()  # `calling` is set while the probe calls
        for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
            if hasattr(module, name):
                setattr(module, name, self._noticing(getattr(module, name), name != "_disable_profiler"))

    def _noticing(self, original: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not getattr(self._ours, "calling", False):
                self._prepared = begins
                if begins:
                    self._give_way()
            return original(*args, **kwargs)

        return hide_from_dynamo(wrapper)

    @contextlib.contextmanager
    def as_ours(self) -> Iterator[None]:
        self._ours.calling = True
        try:
            yield
        finally:
            self._ours.calling = False

    def active(self) -> bool:
        return (
            self._prepared
            or bool(getattr(self._module, "_is_profiler_enabled", False))
            or bool(self._module.torch.autograd._profiler_enabled())
        )


class AfterStep:
    """Runs an action when the annotation `Optimizer.step#…` has been closed: optimizer hooks run inside it, and a trace
    that ended there would show that annotation, and so the last step, with a wrong end.

    record_function is patched for as long as a capture takes."""

    def __init__(self, record_function: Any) -> None:
        self._record_function = record_function
        self._original: Optional[Callable[..., Any]] = None
        self._patched: Optional[Callable[..., Any]] = None
        self._action: Optional[Callable[[], None]] = None
        self._thread_id = 0
        self.works = False

    def install(self) -> None:
        if self._patched is not None:
            return
        original = self._original = self._record_function.__exit__

        def __exit__(annotation: Any, *args: Any) -> Any:  # noqa: N807 - stands in for the class' own
            result = original(annotation, *args)
            action = self._action
            if action is not None and threading.get_ident() == self._thread_id:
                self._action = None
                self.works = True
                action()
            return result

        self._patched = hide_from_dynamo(__exit__)
        self._record_function.__exit__ = self._patched

    def remove(self) -> None:
        self._action = None
        # If somebody has wrapped ours meanwhile, it stays, and does nothing.
        if self._patched is not None and self._record_function.__exit__ is self._patched:
            self._record_function.__exit__ = self._original
        self._patched = None

    @property
    def is_waiting(self) -> bool:
        return self._action is not None

    def then(self, action: Callable[[], None]) -> None:
        self._thread_id = threading.get_ident()
        self._action = action


class ProfilerState(Enum):
    STOPPED = 0
    PREPARED = 1
    STARTED = 2


class Profile:
    """One recording. All but `write` on one thread."""

    def __init__(self, torch: Any, users: UserProfilers, options: Dict[str, bool]) -> None:
        self._torch = torch
        self._users = users
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.with_stack = bool(options.get("with_stack"))
        self._profile = torch.profiler._KinetoProfile(activities=activities, **options)
        self._annotation: Any = None
        self._state = ProfilerState.STOPPED

    def prepare(self) -> None:
        """The warm-up: what is slow about starting is done, nothing is recorded yet."""
        with self._users.as_ours():
            self._state = ProfilerState.PREPARED
            self._profile.prepare_trace()

    def start(self) -> None:
        if self._state is ProfilerState.STOPPED:
            self.prepare()
        with self._users.as_ours():
            self._state = ProfilerState.STARTED
            self._profile.start_trace()

    def annotate(self, step: int) -> None:
        """From here on it is this step."""
        self.end_annotation()
        self._annotation = self._torch.autograd.profiler.record_function("ProfilerStep#{}".format(step))
        self._annotation.__enter__()

    def end_annotation(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def stop(self) -> None:
        self.end_annotation()
        with self._users.as_ours():
            if self._state is ProfilerState.PREPARED:
                # Only what has been started can be stopped.
                self._profile.start_trace()
            if self._state is not ProfilerState.STOPPED:
                self._profile.stop_trace()
        self._state = ProfilerState.STOPPED

    def abandon(self) -> None:
        """Stop by all means: a process that ends with a profiler enabled dies of SIGSEGV (seen, torch 2.13)."""
        if self._state is ProfilerState.STOPPED:
            return
        try:
            self.stop()
        except Exception:
            self._state = ProfilerState.STOPPED
            if self._torch.autograd._profiler_enabled():
                with self._users.as_ours():
                    self._torch.autograd._disable_profiler()

    def write(self) -> int:
        """A descriptor of the trace, in memory and sealed: a container may have no writable disk, or a small one, and
        nothing is left behind. Once only."""
        # libkineto writes PATH.tmp and renames it, or, formerly, PATH: both are links to the memory.
        folder = _private_folder()
        fd = os.memfd_create(ring_layout.TRACE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            path = os.path.join(folder, "trace.json")
            for name in (path, path + ".tmp"):
                os.symlink("/proc/self/fd/{}".format(fd), name)
            self._profile.export_chrome_trace(path)
            if os.fstat(fd).st_size == 0:
                raise OSError("torch wrote no trace; its own message stands before this one")
            seal(fd)
            return fd
        except BaseException:
            os.close(fd)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sealed(content: bytes) -> int:
    """A descriptor of memory that holds the content."""
    fd = os.memfd_create(ring_layout.TRACE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        seal(fd)
        return fd
    except BaseException:
        os.close(fd)
        raise


def seal(fd: int) -> None:
    """What has been written stays as it is."""
    seals = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW | ring_layout.F_SEAL_WRITE | ring_layout.F_SEAL_SEAL
    fcntl.fcntl(fd, ring_layout.F_ADD_SEALS, seals)


def _private_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="rankscope-")
    except OSError:
        return tempfile.mkdtemp(prefix="rankscope-", dir="/dev/shm")


def timed_ns(action: Callable[[], Any]) -> int:
    start_ns = time.monotonic_ns()
    action()
    return time.monotonic_ns() - start_ns


def write_windows(profiles: Sequence[Profile]) -> int:
    """A descriptor of several windows of one capture: the traces one after the other, then their sizes. Once only."""
    packed = os.memfd_create(ring_layout.TRACE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        sizes = [_append(profile, packed) for profile in profiles]
        end = b"".join(map(ring_layout.WINDOW_BYTES.pack, sizes)) + ring_layout.WINDOWS.pack(
            len(sizes), ring_layout.WINDOWS_MARK
        )
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


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def memory_left_bytes() -> Optional[int]:
    """Of the container or of the machine, whichever has less. None where neither can be read."""
    known = [left for left in (_left_in_cgroup("/sys/fs/cgroup"), _left_in_machine()) if left is not None]
    return min(known) if known else None


def _left_in_machine() -> Optional[int]:
    found = _fields("/proc/meminfo").get("MemAvailable:")
    return None if found is None else found * 1024


def _left_in_cgroup(folder: str) -> Optional[int]:
    """As a container sees its own, in both versions of control groups. Files that can be dropped are not counted."""
    for limit, usage, stat, dropped in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit_bytes, used_bytes = _number(os.path.join(folder, limit)), _number(os.path.join(folder, usage))
        if limit_bytes is not None and used_bytes is not None:
            return limit_bytes - used_bytes + _fields(os.path.join(folder, stat)).get(dropped, 0)
    return None


def _number(path: str) -> Optional[int]:
    try:
        with open(path, "rb") as file:
            text = file.read(64).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: str) -> Dict[str, int]:
    try:
        with open(path, "rb") as file:
            lines = [line.split() for line in file.read(1 << 16).decode("ascii", "replace").splitlines()]
    except OSError:
        return {}
    return {parts[0]: int(parts[1]) for parts in lines if len(parts) >= 2 and parts[1].isdigit()}
