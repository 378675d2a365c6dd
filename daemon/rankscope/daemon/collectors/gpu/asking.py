"""Calls for one device: what it does not support is asked once, and who looks on sees which call is under way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rankscope.daemon.collectors.gpu import failing


class CallWatch:
    """The call that a thread is in. Written by that thread, read by others."""

    def __init__(self) -> None:
        self._current: tuple[str, float] | None = None

    def enter(self, name: str) -> None:
        self._current = (name, time.monotonic())

    def leave(self) -> None:
        self._current = None

    def stuck(self, seconds: float) -> str | None:
        """What has not returned for so long, in words."""
        current = self._current
        if current is None or (passed := time.monotonic() - current[1]) < seconds:
            return None
        return f"{current[0]} has not returned for {passed:.0f} s"


class Asker:
    """Raises GpuLostError and DriverGoneError; any other error makes the answer None."""

    def __init__(self, nvml: Any, handle: Any, watch: CallWatch) -> None:
        self.nvml = nvml
        self.handle = handle
        self.watch = watch
        self._unsupported: set[tuple[Any, ...]] = set()
        self._answers = 0
        self._failures: dict[str, str] = {}

    def begin(self) -> None:
        self._answers = 0
        self._failures = {}

    @property
    def failures(self) -> Mapping[str, str]:
        """Since `begin`, by call: errors that may pass."""
        return self._failures

    @property
    def nothing_works(self) -> bool:
        return bool(self._failures) and self._answers == 0

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of a function about this device; None where there is none."""
        return self.call(name, self.handle, *arguments, key=(name, *arguments))

    def call(self, name: str, *arguments: Any, key: tuple[Any, ...]) -> Any:
        if key in self._unsupported:
            return None
        self.watch.enter(name)
        try:
            answer = getattr(self.nvml, name)(*arguments)
        except self.nvml.NVMLError as error:
            self._note(name, key, error)
            return None
        finally:
            self.watch.leave()
        self._answers += 1
        return answer

    def forget_unsupported(self, *names: str) -> None:
        self._unsupported = {key for key in self._unsupported if key[0] not in names}

    def _note(self, name: str, key: tuple[Any, ...], error: Any) -> None:
        code = int(error.value)
        text = f"{name}: {error} (error {code})"
        if code in failing.DRIVER_GONE:
            raise failing.DriverGoneError(text) from error
        if code in failing.LOST:
            raise failing.GpuLostError(text) from error
        if code in failing.UNSUPPORTED:
            self._unsupported.add(key)
        elif code != failing.NOT_FOUND:
            self._failures[name] = text
