"""The documents' commands, as a reader types them: each block without a mark (tests/doc_commands.py) is executed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.doc_commands import ROOT, Block, blocks
from tests.shared_data import H200
from tests.unit.analysis.collectives.flight_recorder.made_dumps import hung_job
from tests.unit.analysis.collectives.test_timings import NCCL_TESTS
from tests.unit.analysis.timelines.simulation import Shape, simulate
from tests.unit.cli.test_mfu import LLAMA_3_8B

BLOCK_SECONDS = 400.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as far as commands change it, and the files that readers bring. Add those that your page names."""
    made = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "rules", made / "rules")
    (made / "deploy").symlink_to(ROOT / "deploy")
    for trace in H200.glob("*.json.gz"):
        shutil.copy(trace, made)
    shutil.copy(H200 / "nccl_world1_3steps.json.gz", made / "trace.json.gz")
    (made / "traces").mkdir()
    for rank in (0, 1):
        shutil.copy(H200 / f"gloo_2ranks_rank{rank}.json.gz", made / "traces" / f"rank{rank}.json.gz")
    (made / "all_reduce_perf.txt").write_text(NCCL_TESTS)
    (made / "dumps").mkdir()
    for rank, dump in hung_job().items():
        (made / "dumps" / f"fr_{rank}").write_bytes(dump)
    (made / "config.json").write_text(json.dumps(LLAMA_3_8B))
    steps = random.Random(1)
    for name, milliseconds in (("before", 300), ("after", 306)):
        (made / f"{name}.txt").write_text("\n".join(f"{steps.gauss(milliseconds, 15) / 1e3}" for _ in range(200)))
    timeline = pyarrow.table(simulate(Shape(stages=2, replicas=2, micro_batches=4), 10, seed=1))
    pyarrow.parquet.write_table(timeline, made / "trace.parquet")
    pyarrow.csv.write_csv(timeline, made / "trace.csv")
    (made / "meta.yaml").write_text("pp_size: 2\ndp_size: 2\n")
    return made


def run(block: Block, folder: Path) -> str:
    tools = [Path(sys.executable).parent, ROOT / ".prometheus" / "bin", os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(map(str, tools)), "COLUMNS": "140", "HOME": str(folder)}
    command = ["bash", "-euo", "pipefail", "-c", block.script]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (
        f"{block} ended with {done.returncode}. Correct it, add the files it needs to the fixture `folder`, or write "
        f"`<!-- illustration: REASON -->` before it.\n{done.stdout}"
    )
    return done.stdout


@pytest.mark.parametrize("block", [block for block in blocks() if not block.mark], ids=str)
def test_a_blocks_commands_run_and_print_what_the_page_shows(block: Block, folder: Path) -> None:
    programs = {program for program, *_ in block.commands()}
    missing = {program for program in programs - {"rankscope"} if "/" not in program and not _is_there(program)}
    assert not missing, f"{block} needs {', '.join(sorted(missing))}: write `<!-- illustration: REASON -->` before it"
    printed = _words(run(block, folder))
    for line in block.output:
        assert _words(line) in printed, f"{block} shows a line that is not printed: {line}\n{printed}"


def _is_there(program: str) -> bool:
    return bool(shutil.which(program)) or (ROOT / ".prometheus" / "bin" / program).exists()


def _words(text: str) -> str:
    """Without the widths of columns and the ends of lines."""
    return re.sub(r"\s+", " ", text).strip()
