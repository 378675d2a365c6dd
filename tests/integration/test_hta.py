"""Our breakdown against Holistic Trace Analysis, which runs in an environment of its own on the same files."""

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

from rankscope.analysis.traces.breakdowns.breakdown import break_down
from rankscope.analysis.traces.reading.reader import read_trace
from tests.integration import trace_variants
from tests.integration.trace_variants import varied
from tests.shared_data import H200, ROOT, shared

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
    ours = break_down(read_trace(file.read_bytes(), name=file.name))
    assert ours is not None
    found = []
    for key in ("span", "compute", "non_compute", "idle"):
        ours_us = getattr(ours, f"{key}_ns") / 1000
        if abs(ours_us - hta[f"{key}_us"]) > 1:
            found.append(f"{file.name}: {key} {ours_us} µs, by HTA {hta[f'{key}_us']} µs")
    expected = hta["overlap_percent"]
    # HTA knows nothing of gloo, where it has no overlap and we have. And where all communication is shorter than a
    # microsecond, it divides by a length that rounding made negative; there we have none.
    if expected is None or (ours.communication_ns <= 0 and ours.overlap_ratio is None):
        return found
    if ours.overlap_ratio is None or abs(100 * ours.overlap_ratio - expected) > 0.01:
        found.append(f"{file.name}: overlap {ours.overlap_ratio}, by HTA {expected} %")
    return found


def test_real_traces_break_down_as_by_hta(compared: Compared) -> None:
    assert len(compared.given("real", "span_us")) == 3
    assert compared.disagreements("real") == []


def test_hta_s_own_traces_and_variants_of_them_break_down_as_by_hta(compared: Compared) -> None:
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
