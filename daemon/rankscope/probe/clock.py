"""Marks on a device's timeline, and on the host's. A mark never waits for the device.

A mark on CUDA is an event recorded on the current stream; two of them are compared once both have happened. Nothing is
recorded or queried while a CUDA graph is being captured: an event would become part of the graph, and a query would end
the capture with an error."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Optional

MAX_KEPT = 512  # events in store, per device


class Mark:
    """A moment on a stream of a device."""

    __slots__ = ("device", "event", "stream")

    def __init__(self, event: Any, device: int, stream: int) -> None:
        self.event = event
        self.device = device
        self.stream = stream


class CudaClock:
    """Events are kept and used again: making one costs more than recording it."""

    def __init__(self, cuda: Any) -> None:
        self._new = functools.partial(cuda.Event, enable_timing=True)
        self._current_device: Callable[[], int] = cuda.current_device
        self._current_stream: Callable[[], Any] = cuda.current_stream
        self._is_capturing: Callable[[], bool] = cuda.is_current_stream_capturing
        self._kept: Dict[int, List[Any]] = {}
        self._captures = 0

    def watch_graph_captures(self, graph_class: Any) -> None:
        """Another thread may capture: its graph must not be disturbed by a question from this one."""
        begin, end = graph_class.capture_begin, graph_class.capture_end

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._captures += 1
            try:
                return begin(graph, *args, **kwargs)
            except BaseException:
                self._captures -= 1
                raise

        @functools.wraps(end)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(graph, *args, **kwargs)
            finally:
                self._captures = max(0, self._captures - 1)

        graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end

    @property
    def is_free(self) -> bool:
        return not self._captures and not self._is_capturing()

    def mark(self) -> Optional[Mark]:
        """None while a graph is being captured."""
        if not self.is_free:
            return None
        device = self._current_device()
        stream = self._current_stream()
        kept = self._kept.get(device)
        event = kept.pop() if kept else self._new()
        event.record(stream)
        return Mark(event, device, stream.cuda_stream)

    def has_passed(self, mark: Mark) -> bool:
        return self.is_free and bool(mark.event.query())

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two marks of one device that both have passed."""
        return float(start.event.elapsed_time(end.event)) * 1e-3

    def release(self, mark: Mark) -> None:
        kept = self._kept.setdefault(mark.device, [])
        if len(kept) < MAX_KEPT:
            kept.append(mark.event)
