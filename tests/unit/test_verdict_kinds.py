"""Everything that lists verdicts has the kinds of the enum."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict, headline
from rankscope.operator.kube.crds import KINDS, definition
from rankscope.v1 import job_service_pb2

ROOT = Path(__file__).resolve().parents[2]
NAMES = [kind.value for kind in Kind]


def _schema(kind: str) -> dict[str, Any]:
    made = next(definition(one) for one in KINDS if one.kind == kind)
    schema: dict[str, Any] = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return schema


def test_protobuf_enums_have_the_same_members() -> None:
    for ours, theirs in (
        (Kind, job_service_pb2.VerdictKind),
        (Severity, job_service_pb2.Severity),
        (Confidence, job_service_pb2.Confidence),
    ):
        prefix = "VERDICT_KIND" if ours is Kind else ours.__name__.upper()
        assert theirs.keys() == [f"{prefix}_UNSPECIFIED", *(f"{prefix}_{name}" for name in ours.__members__)]


def test_custom_resources_take_the_same_kinds() -> None:
    verdict = _schema("TrainingRun")["status"]["properties"]["verdict"]["properties"]
    assert sorted(verdict["kind"]["enum"]) == sorted(NAMES)
    assert sorted(verdict["severity"]["enum"]) == sorted(one.value for one in Severity)
    captures = _schema("ProfilingPolicy")["spec"]["properties"]["automaticCaptures"]["properties"]
    assert sorted(captures["on"]["items"]["enum"]) == sorted(NAMES)


def test_the_documents_list_the_same_kinds() -> None:
    section = (ROOT / "docs" / "concepts.md").read_text().partition("\n## Verdicts\n")[2].partition("\n## ")[0]
    table = section.partition("|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == NAMES


def test_every_kind_has_a_headline_without_gaps() -> None:
    for kind in Kind:
        text = headline(Verdict(kind, "a reason", culprits=(1, 2), stage=3))
        assert text and not re.search(r"[{}]|None", text)
    assert headline(Verdict(Kind.HANG, "", culprits=(1,))).startswith("the job hangs: rank 1 never entered")
    assert (
        headline(Verdict(Kind.SLOW_STAGE, "", culprits=(2, 3), stage=1)) == "pipeline stage 1 is slow (ranks 2 and 3)"
    )
    assert headline(Verdict(Kind.SLOW_RANK, "", culprits=(2, 3))) == "ranks 2 and 3 are slow"
