"""Which lines and branches of our own code an input reached that none before it had reached.

Python 3.12 and later say so for next to nothing (sys.monitoring: a place that is known is not reported again); before
that every line is traced, which is slow but enough to develop with."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

# The five source roots, or where a wheel was installed.
_OURS = re.compile(r"/(proto|analysis|daemon|operator|cli|site-packages)/rankscope/(?!v1/)")


class Coverage(Protocol):
    """`places` grows with every place that is new."""

    @property
    def places(self) -> int: ...

    def run(self, call: Callable[[bytes], None], data: bytes) -> None: ...

    def close(self) -> None: ...


def is_ours(file: str) -> bool:
    return _OURS.search(file) is not None


def start_coverage() -> Coverage:
    return MonitoredCoverage() if sys.version_info >= (3, 12) else TracedCoverage()


class TracedCoverage:
    """By sys.settrace: pairs of lines that follow each other in a function."""

    def __init__(self) -> None:
        self.places = 0
        self._seen: set[tuple[int, int, int]] = set()  # by id: a code's hash is that of all it holds
        self._ours: dict[str, bool] = {}

    def run(self, call: Callable[[bytes], None], data: bytes) -> None:
        sys.settrace(self._called)
        try:
            call(data)
        finally:
            sys.settrace(None)
            self.places = len(self._seen)

    def close(self) -> None:
        pass

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        ours = self._ours.get(code.co_filename)
        if ours is None:
            ours = self._ours[code.co_filename] = is_ours(code.co_filename)
        if not ours:
            return None
        seen, number, before = self._seen, id(code), 0

        def line(frame: FrameType, event: str, _: object) -> Any:
            nonlocal before
            if event == "line":
                now = frame.f_lineno
                seen.add((number, before, now))
                before = now
            return line

        return line


class MonitoredCoverage:
    """By sys.monitoring: lines, and the two ways out of every branch. It stays on from one input to the next: switched
    off and on again, the interpreter forgets what it need not report any more."""

    def __init__(self) -> None:
        self._monitoring: Any = sys.monitoring
        self._tool: int = self._monitoring.COVERAGE_ID
        self._seen: set[tuple[int, int, int]] = set()  # by id: a code's hash is that of all it holds
        self._ways: dict[tuple[int, int], int] = {}
        self._monitoring.use_tool_id(self._tool, "rankscope-fuzz")
        events = self._monitoring.events
        self._monitoring.register_callback(self._tool, events.LINE, self._line)
        # Python 3.14 tells the two ways apart itself.
        branches = [getattr(events, name) for name in ("BRANCH_LEFT", "BRANCH_RIGHT") if hasattr(events, name)]
        for event in branches or [events.BRANCH]:
            self._monitoring.register_callback(self._tool, event, self._way if branches else self._branch)
        self._monitoring.set_events(self._tool, events.LINE | sum(branches or [events.BRANCH]))

    @property
    def places(self) -> int:
        return len(self._seen)

    def run(self, call: Callable[[bytes], None], data: bytes) -> None:
        call(data)

    def close(self) -> None:
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)

    def _line(self, code: CodeType, line: int) -> Any:
        if is_ours(code.co_filename):
            self._seen.add((id(code), -1, line))
        return self._monitoring.DISABLE

    def _way(self, code: CodeType, offset: int, destination: int) -> Any:
        if is_ours(code.co_filename):
            self._seen.add((id(code), offset, destination))
        return self._monitoring.DISABLE

    def _branch(self, code: CodeType, offset: int, destination: int) -> Any:
        if not is_ours(code.co_filename):
            return self._monitoring.DISABLE
        self._seen.add((id(code), offset, destination))
        # Both ways are one instruction: it is silent when both are known.
        other = self._ways.setdefault((id(code), offset), destination)
        return None if other == destination else self._monitoring.DISABLE
