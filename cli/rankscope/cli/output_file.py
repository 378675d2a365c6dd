"""Writes files that the user names. A regular file is replaced only when its new content is complete; a device or a
pipe is written to, never replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from rankscope.cli.messages import CommandError, cannot_write, to_stderr

if TYPE_CHECKING:
    from rankscope.analysis.profiles.profile import Profile


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Raises OSError with the name of `path`. Links are followed by the kernel, which refuses those that another user
    left in a shared directory."""
    try:
        with contextlib.ExitStack() as stack:
            target, mode = path, None
            if os.path.lexists(path):
                through = stack.enter_context(path.open("ab"))
                status = os.fstat(through.fileno())
                target, mode = path.resolve(), stat.S_IMODE(status.st_mode)
                if not stat.S_ISREG(status.st_mode):
                    yield through
                    return
                if not _can_replace(target, status):
                    with tempfile.TemporaryFile() as whole:
                        yield whole
                        whole.seek(0)
                        through.truncate(0)
                        shutil.copyfileobj(whole, through)
                    return
            with _replacing(target, mode) as file:
                yield file
    except OSError as error:
        error.filename = str(path)
        raise


def _can_replace(target: Path, status: os.stat_result) -> bool:
    """Not if the directory is closed to us, or if the file would get another owner."""
    return os.access(target.parent, os.W_OK | os.X_OK) and status.st_uid == os.geteuid() and status.st_nlink == 1


@contextlib.contextmanager
def _replacing(target: Path, mode: int | None) -> Iterator[IO[bytes]]:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o666 & ~_umask() if mode is None else mode)
            yield file
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


@contextlib.contextmanager
def writing(option: str) -> Iterator[None]:
    """What is written in it goes to the place that an option names. Raises CommandError if that fails."""
    try:
        yield
    except OSError as error:
        raise CommandError(cannot_write(error, option)) from error


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """The whole file, and a line on stderr that says so. Raises CommandError."""
    with writing(option), open_output(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    to_stderr(f"wrote {path}")


def check_writable(option: str, path: Path) -> None:
    """Call before long work. Raises CommandError if the path cannot be written. Nothing is changed."""
    with writing(option):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            try:
                with tempfile.TemporaryFile(dir=path.parent):
                    return
            except OSError as error:
                error.filename = str(path)
                raise
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not os.access(path, os.W_OK):  # an opened pipe would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def keep_output(option: str, path: Path, content: str) -> None:
    """Like `write_output`, for what cannot be made again. If it cannot be written there, a temporary file has it."""
    try:
        write_output(option, path, content)
    except CommandError as error:
        with tempfile.NamedTemporaryFile("w", prefix="rankscope-", suffix=path.suffix, delete=False) as file:
            file.write(content)
        to_stderr(f"error: {error}; it is kept in {file.name}")


# Files of profiles. The ending of the name is the format.


FLAME_GRAPH: Final = ".html"
PPROF: Final = ".pb.gz"
SPEEDSCOPE: Final = ".json"
FOLDED: Final = ".folded"
ENDINGS: Final = (FLAME_GRAPH, PPROF, SPEEDSCOPE, FOLDED)
ENDINGS_IN_WORDS: Final = f"FILE{FLAME_GRAPH}, {PPROF}, {SPEEDSCOPE} or {FOLDED}"


def check_format(option: str, path: Path, *, is_compared: bool = False) -> None:
    """Before anything is computed. Raises CommandError."""
    ending = _ending(path)
    if ending is None:
        raise CommandError(f"{option} {path.name}: the format is not known; name {ENDINGS_IN_WORDS}")
    if is_compared and ending != FLAME_GRAPH:
        raise CommandError(f"{option} {path.name}: only a flame graph holds a comparison; name FILE{FLAME_GRAPH}")


def write_profile(
    path: Path,
    profile: Profile,
    title: str,
    *,
    reference: Profile | None = None,
    start_unix_nanos: int = 0,
    duration_nanos: int = 0,
    is_of_device: bool = False,
) -> None:
    """In a format that `check_format` accepts. `is_of_device`: the samples are kernels, and only their time counts.
    Raises OSError."""
    # A command that writes no profile should not wait for the import of protobuf.
    from rankscope.analysis.profiles.flame_graph import flame_graph, folded, speedscope
    from rankscope.analysis.profiles.pprof import DEVICE_TIME, WALL_TIME, pprof

    ending = _ending(path)
    if ending == PPROF:
        time_type = DEVICE_TIME if is_of_device else WALL_TIME
        content = pprof(profile, start_unix_nanos, duration_nanos, time_type=time_type)
    elif ending == SPEEDSCOPE:
        content = speedscope(profile, title)
    elif ending == FOLDED:
        content = folded(profile, in_nanos=is_of_device)
    else:
        content = flame_graph(profile, title, reference)
    with open_output(path) as file:
        file.write(content)


def _ending(path: Path) -> str | None:
    return next((known for known in ENDINGS if path.name.lower().endswith(known)), None)
