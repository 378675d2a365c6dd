"""Against Holistic Trace Analysis, which runs in an environment of its own on the same files: with its rules our
columns give its figures, and without them only what its rules leave out or round away is different."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rankscope.analysis.traces.breakdown import break_down, device_rows
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import ABSENT, Category
from tests.integration import trace_variants
from tests.integration.hta_rules import hta_breakdown, is_finer_than_microseconds, profiler_steps
from tests.integration.trace_variants import varied
from tests.shared_data import H200, ROOT, shared

pytestmark = pytest.mark.acceptance

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Compared:
    files: Mapping[str, list[Path]]
    by_hta: Results

    def disagreements(self, group: str) -> list[str]:
        return [line for file in self.files[group] for line in disagreements(file, self.by_hta[str(file)])]

    def given(self, group: str, key: str) -> list[Any]:
        """What HTA has to say of a group's traces, without those where it fails or has nothing."""
        return [found for file in self.files[group] if (found := self.by_hta[str(file)].get(key)) is not None]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """All traces through HTA in one process: it takes seconds to be imported."""
    made = subprocess.run([ROOT / "tools" / "setup_hta.sh"], capture_output=True, text=True, timeout=280)
    if made.returncode:
        pytest.skip(f"no Holistic Trace Analysis to compare with: {made.stderr.strip()[-300:]}")
    folder = tmp_path_factory.mktemp("traces")
    files = {"real": sorted(H200.glob("*.json.gz")), "varied": [], "borrowed": []}
    real = trace_variants.thinned(trace_variants.load(H200 / "nccl_world1_3steps.json.gz"))
    files["varied"] = [
        write(folder, f"{number}-{'-'.join(change.__name__ for change in changes)}", varied(real, changes))
        for number, changes in enumerate(trace_variants.VARIANTS)
    ]
    files["random"] = [
        write(folder, f"random-{seed}", content) for seed, content in enumerate(trace_variants.random_traces(40))
    ]
    with contextlib.suppress(pytest.skip.Exception):
        pair = sorted(shared("hta_pair").glob("*.json.gz"))
        borrowed = trace_variants.load(pair[1])
        files["borrowed"] = pair + [
            write(folder, f"pair-{number}", varied(borrowed, changes))
            for number, changes in enumerate(trace_variants.MICROSECOND_VARIANTS)
        ]
    done = subprocess.run(
        [ROOT / ".venv-hta" / "bin" / "python", ROOT / "tools" / "hta_breakdown.py", *chain(*files.values())],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("HTA_")},
    )
    return Compared(files, {result["file"]: result for result in map(json.loads, done.stdout.splitlines())})


def write(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def disagreements(file: Path, hta: Mapping[str, Any]) -> list[str]:
    """In words: where we differ by more than a microsecond or 0.01 percentage point."""
    if "error" in hta:
        return []
    ours = hta_breakdown(read_trace(file.read_bytes()))
    found = []
    for key in ("span_us", "compute_us", "non_compute_us", "idle_us"):
        if abs(getattr(ours, key) - hta[key]) > 1:
            found.append(f"{file.name}: {key} {getattr(ours, key)}, by HTA {hta[key]}")
    expected = hta["overlap_percent"]
    # Where all communication is shorter than a microsecond, HTA divides by a length that rounding made negative.
    if expected is None or ours.overlap_percent is None:
        return found
    if abs(ours.overlap_percent - expected) > 0.01:
        found.append(f"{file.name}: overlap {ours.overlap_percent} %, by HTA {expected} %")
    return found


def test_real_traces_break_down_as_by_hta(compared: Compared) -> None:
    assert len(compared.given("real", "span_us")) >= 8
    assert compared.disagreements("real") == []


def test_htas_own_traces_and_variants_break_down_as_by_hta(compared: Compared) -> None:
    shared("hta_pair")
    assert len(compared.given("borrowed", "overlap_percent")) == 2 + len(trace_variants.MICROSECOND_VARIANTS)
    assert compared.disagreements("borrowed") == []


def test_variants_of_a_real_trace_break_down_as_by_hta(compared: Compared) -> None:
    assert len(compared.given("varied", "span_us")) == len(trace_variants.VARIANTS)
    assert len(compared.given("varied", "overlap_percent")) >= 4
    assert compared.disagreements("varied") == []


def test_small_random_traces_break_down_as_by_hta(compared: Compared) -> None:
    assert len(compared.given("random", "span_us")) > 25
    assert compared.disagreements("random") == []


def test_without_htas_rules_figures_differ_only_by_rounding(compared: Compared) -> None:
    """Of traces without steps to leave out and without waits that HTA takes for work."""
    judged = 0
    for file in compared.files["varied"] + compared.files["borrowed"]:
        hta, trace = compared.by_hta[str(file)], read_trace(file.read_bytes())
        waits = trace.of(Category.SYNC, Category.GPU_ANNOTATION) & (trace.stream != ABSENT)
        ours = break_down(trace)
        if "error" in hta or ours is None or profiler_steps(trace) > 1 or waits.any():
            continue
        # Each event loses less than two microseconds, and its neighbours' gaps gain them.
        most_us = 1 + 2 * len(device_rows(trace)) * is_finer_than_microseconds(trace)
        assert abs(ours.span_ns / 1000 - hta["span_us"]) <= 2
        assert abs(ours.idle_ns / 1000 - hta["idle_us"]) <= most_us, file.name
        judged += 1
    assert judged >= 3
