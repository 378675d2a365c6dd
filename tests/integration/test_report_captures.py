"""1,000 captures, made of the shipped traces, read by the workers of an Indexed Job and by one process."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared_data import ROOT
from tests.support.measuring import Measured

MAIN = (sys.executable, "-m", "rankscope.cli.main", "report", "captures")
TRACES = ROOT / "tests" / "data" / "h200"
SOURCES = [f"ddp_straggler_rank{rank}" for rank in range(4)]
CAPTURES, RUNS, SHARDS = 1000, 50, 4
_DURATION = re.compile(rb'"dur": ?([0-9.]+)')


def write_captures(folder: Path) -> None:
    """Of one to four ranks each, with kernels that are up to a tenth shorter than recorded."""
    chosen = random.Random(28)
    texts = [gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()) for name in SOURCES]
    for number in range(CAPTURES):
        capture = folder / f"run-{number % RUNS}" / f"c{number}"
        capture.mkdir(parents=True)
        for rank in sorted(chosen.sample(range(4), chosen.choice((1, 1, 1, 1, 2, 4)))):
            factor = chosen.uniform(0.9, 1.0)
            text = _DURATION.sub(lambda found, by=factor: b'"dur": %.3f' % (float(found[1]) * by), texts[rank])
            (capture / f"rank-{rank}.json.gz").write_bytes(gzip.compress(text, 1))


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_four_shards_of_1000_captures_equal_one_process(tmp_path: Path, measured: Measured) -> None:
    captures, parts, joined = tmp_path / "captures", tmp_path / "parts", tmp_path / "report.json"
    write_captures(captures)
    words = [str(captures), "--shards", str(SHARDS), "--parts", str(parts), "--output", str(joined)]
    began = time.monotonic()
    workers = [
        subprocess.Popen(
            [*MAIN, *words], env=os.environ | {"JOB_COMPLETION_INDEX": str(index)}, stdout=subprocess.DEVNULL
        )
        for index in range(SHARDS)
    ]
    assert [worker.wait() for worker in workers] == [0] * SHARDS
    sharded_seconds = time.monotonic() - began
    began = time.monotonic()
    alone = subprocess.run([*MAIN, str(captures), "--json"], check=True, stdout=subprocess.PIPE).stdout
    alone_seconds = time.monotonic() - began
    assert json.loads(alone)["captures"] == CAPTURES
    assert joined.read_bytes() == alone
    measured("1,000 captures: four shards against one process", sharded_seconds / alone_seconds, "ratio", at_most=1.0)
