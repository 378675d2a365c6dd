"""Runs to compare, from files and directories: which of them are traces, which lists of step times."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.analysis.robust import Floats
from rankscope.cli.comparing.numbers import StepFileError, by_step, read_csv, read_json, read_json_lines, read_text

_HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Runs:
    names: tuple[str, ...]
    seconds: tuple[Floats, ...]
    notes: tuple[str, ...]


def read_runs(paths: Sequence[Path], column: str | None, unit: str | None) -> Runs:
    """Each file of step times is a run; traces in one directory are the ranks of one run."""
    names: list[str] = []
    runs: list[Floats] = []
    notes: list[str] = []
    for path in paths:
        try:
            _read_path(path, column, unit, names, runs, notes)
        except UnicodeDecodeError:
            raise StepFileError(f"{path}: not text: neither step times nor a trace") from None
        except (EOFError, zlib.error):
            raise StepFileError(f"{path}: the gzip file is damaged or cut off") from None
        except OSError as error:
            raise StepFileError(f"{error.filename or path}: {error.strerror or error}") from None
    for name, run in zip(names, runs, strict=True):
        if len(run) == 0:
            raise StepFileError(f"{name}: holds no step times")
    return Runs(tuple(names), tuple(runs), tuple(notes))


def _read_path(
    path: Path, column: str | None, unit: str | None, names: list[str], runs: list[Floats], notes: list[str]
) -> None:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise StepFileError(f"{path}: the directory is empty")
    traces = []
    for file in files:
        kind = _kind_of(file)
        if kind == "trace":
            traces.append(file)
            continue
        names.append(str(file))
        if kind == "csv":
            runs.append(read_csv(file, column, unit))
        elif kind == "json lines":
            runs.append(read_json_lines(file, column, unit))
        else:
            runs.append(read_json(file, column, unit) if kind == "json" else read_text(file, unit))
    if traces:
        names.append(str(path))
        runs.append(_steps_of_traces(path, traces, notes))


def _steps_of_traces(path: Path, files: list[Path], notes: list[str]) -> Floats:
    from rankscope.analysis.traces.steps import find_steps
    from rankscope.cli.traces.files import load_traces

    loaded = load_traces(files)
    if not loaded.traces:
        broken = loaded.broken[0]
        raise StepFileError(f"{broken.path}: {broken.reason}")
    notes += [f"{broken.path} was left out: {broken.reason}" for broken in loaded.broken]
    ranks = []
    for one in loaded.traces:
        steps = find_steps(one.trace)
        # Where an optimizer's end marks a step, the trace cut the first one short.
        first = 1 if steps.source == "Optimizer.step" else 0
        seconds = (steps.end_ns - steps.start_ns)[first:] / 1e9
        ranks.append({int(n): float(s) for n, s in zip(steps.number[first:], seconds, strict=True) if s > 0})
    run = by_step(ranks)
    if len(run) == 0:
        raise StepFileError(f"{path}: the trace shows no steps; call profiler.step() in the loop")
    return run


def _kind_of(path: Path) -> str:
    head = _head(path)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        raise StepFileError(f"{path}: the file is empty")
    if b"\0" in head:
        raise StepFileError(f"{path}: a binary file; step times are text, CSV or JSON, traces JSON")
    if text[:1] in (b"{", b"["):
        return _kind_of_json(text)
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith(b"#")), b"").strip()
    try:
        float(first)
    except ValueError:
        has_words = first[:1].isalpha() or first[:1] in b"\"'_"
        if any(mark in first for mark in (b",", b";", b"\t")) or (has_words and b" " not in first):
            if not has_words:
                raise StepFileError(f"{path}: CSV without a header; add a line that names its columns") from None
            return "csv"
    return "text"


def _kind_of_json(text: bytes) -> str:
    if b'"traceEvents"' in text or text[:64].replace(b" ", b"").startswith((b'[{"ph"', b'[{"name"')):
        return "trace"
    line, _, rest = text.partition(b"\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        kineto = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
        return "trace" if any(word in text for word in kineto) else "json"
    return "json lines" if rest.strip() else "json"


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES) if head[:2] == b"\x1f\x8b" else head
