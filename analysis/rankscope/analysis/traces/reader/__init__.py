"""From the bytes of a trace file to columns: any formatting, any size, damage mended or refused with its place."""

from __future__ import annotations

from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import TraceError

__all__ = ["TraceError", "read_trace"]
