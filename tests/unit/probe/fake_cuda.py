"""A CUDA device that is not there: streams that work off what a host enqueues, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

MS = 1_000_000


class Stream:
    def __init__(self, device: FakeCuda, number: int) -> None:
        self._device = device
        self.cuda_stream = number
        self.done_ns = 0

    def enqueue(self, milliseconds: float = 0.0, not_before_ns: int = 0) -> int:
        """Work that begins when the stream gets there; returns when it will be done."""
        start_ns = max(self.done_ns, self._device.now_ns, not_before_ns)
        self.done_ns = start_ns + int(milliseconds * MS)
        return self.done_ns

    @property
    def reached_ns(self) -> int:
        return max(self.done_ns, self._device.now_ns)


class Event:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.passed_ns: int | None = None
        device.events_made += 1

    def record(self, stream: Stream) -> None:
        assert not self._device.capturing, "an event in a captured graph"
        self.passed_ns = stream.reached_ns
        self._device.events_recorded += 1

    def query(self) -> bool:
        assert not self._device.capturing, "asked during a capture"
        assert self.passed_ns is not None
        return self._device.now_ns >= self.passed_ns

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "read before it has passed"
        assert self.passed_ns is not None and end.passed_ns is not None
        return (end.passed_ns - self.passed_ns) / MS


class FakeCuda:
    """The part of torch.cuda that the probe uses. `synchronize` is missing on purpose."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.capturing = False
        self.events_made = 0
        self.events_recorded = 0
        self.main = Stream(self, 1)
        self.side = Stream(self, 2)
        self.current = self.main
        self.Event: Callable[..., Event] = lambda enable_timing: Event(self)

    def pass_time(self, milliseconds: float) -> None:
        self.now_ns += int(milliseconds * MS)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing
