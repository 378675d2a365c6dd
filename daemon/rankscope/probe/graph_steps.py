"""Steps inside CUDA graphs. While a graph is captured its optimizer runs in Python once and nothing on the device; each
replay is a step, and no hook of the optimizer runs."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, List

from .failure import disable
from .torch_timers import hide_from_dynamo

WRAPPED = ("capture_begin", "capture_end", "replay")


class GraphSteps:
    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing
        self._captured: List[Any] = []  # references to graphs that are being captured now, by any thread
        # By graph, a reference to an optimizer that stepped while it was captured.
        self._optimizers: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()

    def watch(self, graph_class: Any, began: Callable[[], None], stepped: Callable[[Any], None]) -> None:
        """Calls `began` when a capture begins or ends, and `stepped` with the optimizer after a replay of its step."""
        begin, end, original = (getattr(graph_class, name) for name in WRAPPED)
        optimizers = self._optimizers

        def note(graph: Any, is_begun: bool) -> None:
            """Of a capture, that it begins or ends."""
            try:
                began()
                self._captured[:] = [other for other in self._captured if other() not in (graph, None)]
                if is_begun:
                    optimizers.pop(graph, None)
                    self._captured.append(weakref.ref(graph))
            except Exception as error:
                disable(error)

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = begin(graph, *args, **kwargs)
            note(graph, is_begun=True)
            return result

        @functools.wraps(end)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            note(graph, is_begun=False)
            return end(graph, *args, **kwargs)

        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if optimizers:
                optimizer = optimizers.get(graph)
                if optimizer is not None:
                    stepped(optimizer() or graph)
            return result

        graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end
        graph_class.replay = hide_from_dynamo(replay, with_callees=False)

    def takes(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is being captured, and does not run now."""
        if not self._captured or not self._is_capturing():
            return False
        # Two threads hardly ever capture at the same time: the last one to begin is taken.
        graph = self._captured[-1]()
        if graph is not None:
            self._optimizers.setdefault(graph, weakref.ref(optimizer))
        return True
