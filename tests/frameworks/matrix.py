"""Which frameworks are tried, and what has to be true of each. Tests and docs/frameworks.md are made from this table.

To add a framework: a loop in `tools/jobs/frameworks.py` or `cpu_frameworks.py`, a row here, and
`python -m tests.frameworks.matrix` for the page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rankscope.analysis.verdicts.verdict import Kind
from tools import acceptance_results

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "frameworks.md"
NONE, HOST, INPUT, BACKWARD = "none", "host", "input", "backward"
FAULTS = (HOST, INPUT, BACKWARD)
JOB = "cpu_frameworks.py"
DDP_TIMERS, BLOCKING_CALLS = "ddp timers", "blocking calls"
# Figures of a cell.
STEP_TIME, ALARM, IMPACT = "step time, off the job's own clock", "alarm after the fault", "impact, off the true one"


@dataclass(frozen=True)
class Framework:
    """One row. Every job runs four ranks over gloo, and rank 2 is the one with the fault."""

    key: str
    title: str
    source: str  # of the wait, as the window names it
    loop: tuple[str, ...] = ()  # of the job, with its arguments; by default its name is the key
    package: str = ""  # what has to be installed beyond torch, by the name it is imported by
    kind: Kind = Kind.SLOW_RANK
    stage: int | None = None
    peers: tuple[int, ...] = (0, 1, 3)  # who does the same work as the slow rank
    blind: str = ""  # why the wait cannot be measured; then the window has to say so, and no verdict may be wrong
    note: str = ""  # what a reader has to know

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the job's script."""
        return self.loop or (self.key,)

    @property
    def faults(self) -> tuple[str, ...]:
        return (HOST,) if self.blind else FAULTS

    @property
    def names_line(self) -> bool:
        """Stages run different code, so a slow one is not compared line by line."""
        return self.kind is Kind.SLOW_RANK


def _compiled(what: str, title: str, source: str, blind: str = "") -> Framework:
    loop, note = ("compiled", what, "aot_eager"), "backend aot_eager"
    return Framework(f"compiled_{what}", f"`torch.compile` of {title}", source, loop, blind=blind, note=note)


_ALSO_DDP = "wraps the model in DDP"
_IN_GRAPH = "the compiled graph calls collectives without Python"
_SKIPPED = "the scaler skips every tenth step of the job"
_STAGES = "stages run different code, so the verdict names the stage and no line"

MATRIX: tuple[Framework, ...] = (
    Framework("ddp", "DDP", DDP_TIMERS),
    Framework("ddp_no_sync", "DDP, `no_sync` accumulation", DDP_TIMERS),
    Framework("fsdp1", "FSDP1", BLOCKING_CALLS),
    Framework("fsdp2", "FSDP2 (`fully_shard`)", BLOCKING_CALLS),
    Framework("hsdp", "HSDP (FSDP2, 2 × 2 mesh)", BLOCKING_CALLS),
    Framework("tensor_parallel", "tensor parallel (DTensor)", BLOCKING_CALLS, ("tp",)),
    Framework(
        "pipeline_stages",
        "pipeline (`torch.distributed.pipelining`), 4 stages",
        BLOCKING_CALLS,
        ("pipeline", "4"),
        kind=Kind.SLOW_STAGE,
        stage=2,
        note=_STAGES,
    ),
    Framework("pipeline_replicas", "pipeline, 2 stages × 2 replicas", BLOCKING_CALLS, ("pipeline", "2"), peers=(3,)),
    Framework("handwritten", "hand-written, flat buffer and `all_reduce`", BLOCKING_CALLS, ("hand",)),
    Framework("amp", "DDP, AMP with GradScaler", DDP_TIMERS, note="every tenth step is skipped by the scaler"),
    Framework("two_optimizers", "DDP, two models and optimizers (GAN)", DDP_TIMERS),
    _compiled("ddp", "DDP", DDP_TIMERS),
    _compiled("fsdp2", "FSDP2", BLOCKING_CALLS),
    _compiled("tensor_parallel", "tensor parallel", "", blind=_IN_GRAPH),
    _compiled("handwritten", "the hand-written loop", BLOCKING_CALLS),
    Framework("hf_trainer", "Hugging Face Trainer", DDP_TIMERS, ("hf",), package="transformers", note=_ALSO_DDP),
    Framework("accelerate", "Accelerate", DDP_TIMERS, package="accelerate", note=_ALSO_DDP),
    Framework("lightning", "Lightning", DDP_TIMERS, package="pytorch_lightning", note=_ALSO_DDP),
    *(
        Framework(
            f"deepspeed_zero{stage}",
            f"DeepSpeed ZeRO-{stage}",
            BLOCKING_CALLS,
            ("deepspeed_zero", str(stage)),
            package="deepspeed",
        )
        for stage in (1, 2, 3)
    ),
)


def cells() -> list[tuple[Framework, str]]:
    return [(framework, fault) for framework in MATRIX for fault in (NONE, *framework.faults)]


def name_of(framework: Framework, fault: str, figure: str) -> str:
    """Of a measured figure of a cell."""
    return f"{framework.key}, {fault}: {figure}"


def table() -> str:
    """The table of docs/frameworks.md, with the outcome of every cell."""
    lines = ["| framework | step time off by | wait | verdict | source of wait | note |", "|---|---|---|---|---|---|"]
    results = acceptance_results.load().get("frameworks")
    values = {row["name"]: row["value"] for row in results["measured"]} if results else {}
    failed = {test.rpartition("[")[2].rstrip("]") for test in results["failed"]} if results else set()

    def outcome(row: Framework, fault: str) -> str:
        name = "healthy" if fault == NONE else fault
        if f"{row.key}-{fault}" in failed:
            return f"{name} FAILED"
        if name_of(row, fault, STEP_TIME) not in values:
            return f"{name} not run"
        seconds = values.get(name_of(row, fault, ALARM))
        return name if seconds is None else f"{name} {seconds:.0f} s"

    for row in MATRIX:
        package = f" (`{row.package}`)" if row.package else ""
        cells = ", ".join(outcome(row, fault) for fault in (*row.faults, NONE))
        errors = [values[name] for fault in (*row.faults, NONE) if (name := name_of(row, fault, STEP_TIME)) in values]
        step = f"{max(errors):.1%}" if errors else "not run"
        if row.blind:
            wait, verdict = f"not supported: {row.blind}", f"abstains or names rank 2 by its stacks: {cells}"
        else:
            place = "rank 2" if row.names_line else f"stage {row.stage}"
            wait, verdict = "measured", f"`{row.kind.value}` of {place}: {cells}"
        lines.append(f"| {row.title}{package} | {step} | {wait} | {verdict} | {row.source or 'none'} | {row.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(acceptance_results.write_or_check(PAGE, table()))
