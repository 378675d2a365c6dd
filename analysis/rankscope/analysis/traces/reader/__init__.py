"""Reads the bytes of a trace file into columns: any formatting, any size. Damage is repaired, or rejected with its
position."""

from __future__ import annotations

from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import TraceError

__all__ = ["TraceError", "read_trace"]
