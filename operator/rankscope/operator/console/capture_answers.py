"""A capture in the console's answers and in `rankscope capture --json`: structs, sentences, and how they are made.

docs/captures.md describes the keys. None is what was not measured, or what is not there. Text of containers and daemons
is made printable here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from google.protobuf.message import Message

from rankscope.analysis.quantities import count, quantity
from rankscope.analysis.traces.summary_records import TraceSummary
from rankscope.analysis.verdicts.verdict import Kind, Verdict, headline
from rankscope.analysis.verdicts.verdict import ranks as ranks_text
from rankscope.common.text import printable
from rankscope.operator.correlation.job_service import excesses_of, judgement_of, verdict_of
from rankscope.v1 import capture_service_pb2 as pb

# Of a list: kernels, findings, notes.
MAX_TEXTS = 64
_NAME_CHARACTERS = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class StepTimes(msgspec.Struct):
    before_seconds: float | None
    during_seconds: float | None
    after_seconds: float | None


class RankTraceSummary(TraceSummary, frozen=True):
    rank: int


class RankExcess(msgspec.Struct):
    """The self time of a rank less that of the median of the other recorded ranks: mean per step, with its interval."""

    rank: int
    steps: int
    excess_seconds: float
    low_seconds: float
    high_seconds: float


class JoinSummary(msgspec.Struct):
    clock_residual_micros: float
    collectives_matched: int
    last_arrivals: dict[str, int]  # rank to how often it came last
    verdict: str
    culprits: list[int]
    reason: str
    confidence: str
    impact_ratio: float | None  # share of the steps that would come back
    excesses: list[RankExcess]  # the largest first


class CaptureSummary(msgspec.Struct):
    sentence: str
    verdict: str | None  # on the job, when the capture was asked for
    judgement: str | None  # whether the recording confirms or contradicts the verdict, or is too short to tell
    findings: list[str]  # in sentences, the most worthwhile first
    join: JoinSummary | None
    ranks: list[RankTraceSummary]


class CapturedRank(msgspec.Struct):
    rank: int
    node: str
    pid: int | None
    backend: str | None
    state: str
    progress: str  # what it does now, or why it delivered nothing
    error: str | None
    file: str | None
    more_files: list[str]  # of the second and later windows
    bytes: int
    uri: str | None
    start_unix_ms: int | None
    steps: int | None
    step_times: StepTimes | None
    notes: list[str]
    summary: TraceSummary | None


class CaptureAnswer(msgspec.Struct):
    id: str
    job: str
    state: str
    is_final: bool
    reason: str
    requested_unix_ms: int
    requested_by: str
    ranks: list[CapturedRank]
    start_skew_ms: float | None
    summary: CaptureSummary
    notes: list[str]


def capture_answer(
    capture: pb.Capture,
    files: Mapping[int, Sequence[str]] | None = None,
    download_errors: Mapping[int, str] | None = None,
) -> CaptureAnswer:
    """`files` are the downloaded files, by rank, first window first; without them, the paths at the daemon."""
    ranks = [_rank(entry, files, (download_errors or {}).get(entry.rank, "")) for entry in capture.ranks]
    summaries = [(entry.rank, entry.summary) for entry in capture.ranks if entry.HasField("summary")]
    return CaptureAnswer(
        id=printable(capture.id),
        job=printable(capture.job),
        state=state_word(capture.state),
        is_final=capture.state in FINAL,
        reason=printable(capture.reason),
        requested_unix_ms=capture.requested_unix_millis,
        requested_by=printable(capture.requested_by),
        ranks=ranks,
        start_skew_ms=_value(capture, "start_skew_millis"),
        summary=CaptureSummary(
            sentence=sentence(capture),
            verdict=printable(headline(_live_verdict(capture))) if capture.HasField("verdict") else None,
            judgement=judgement_of(capture) or None,
            findings=[*findings(capture), *slowdowns(capture)],
            join=JoinSummary(**_join(capture.join)) if capture.HasField("join") else None,
            ranks=[RankTraceSummary(rank=rank, **_fields(summary)) for rank, summary in summaries],
        ),
        notes=_printable_list(capture.notes),
    )


def _rank(entry: pb.RankCapture, files: Mapping[int, Sequence[str]] | None, download_error: str) -> CapturedRank:
    if files is None:
        names = [entry.artifact, *(window.artifact for window in entry.more_windows)] if entry.artifact else []
    else:
        names = list(files.get(entry.rank, ()))
    return CapturedRank(
        rank=entry.rank,
        node=printable(entry.node),
        pid=entry.pid or None,
        backend=printable(entry.backend) or None,
        state=state_word(entry.state),
        progress=what_happened(entry),
        error=printable(entry.error) or download_error or None,
        file=printable(names[0]) if names else None,
        more_files=_printable_list(names[1:]),
        bytes=entry.bytes,
        uri=printable(entry.uri) or None,
        start_unix_ms=_value(entry, "start_unix_millis"),
        steps=_value(entry, "steps"),
        step_times=StepTimes(**_fields(entry.step_times)) if entry.HasField("step_times") else None,
        notes=_printable_list(entry.notes),
        summary=TraceSummary(**_fields(entry.summary)) if entry.HasField("summary") else None,
    )


def _join(join: pb.JoinSummary) -> dict[str, Any]:
    last_arrivals = {str(rank): number for rank, number in sorted(join.last_arrivals.items())}
    excesses = [RankExcess(**asdict(excess)) for excess in excesses_of(join)]
    return {
        **_fields(join, without=("excesses",)),
        "culprits": sorted(join.culprits),
        "last_arrivals": last_arrivals,
        "excesses": excesses,
    }


def _fields(message: Message, without: Sequence[str] = ()) -> dict[str, Any]:
    """A flat message but for the fields in `without`; the field names are the keys."""
    names = [field.name for field in message.DESCRIPTOR.fields if field.name not in without]
    return {name: _plain(message, name) for name in names}


def _plain(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {printable(str(key)): number for key, number in sorted(value.items())[:MAX_TEXTS]}
    if field.type == field.TYPE_STRING:
        return _printable_list(value) if field.is_repeated else printable(value)
    return list(value) if field.is_repeated else _value(message, name)


def _printable_list(texts: Sequence[str]) -> list[str]:
    return [printable(text) for text in texts[:MAX_TEXTS]]


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    return None if field.has_presence and not message.HasField(name) else getattr(message, name)


# Words and sentences.

# A process that CUPTI stays attached to is 19 to 31 % slower; a smaller difference is mostly a busy machine.
SLOWER_RATIO = 1.15
_BEHIND = {
    pb.CAPTURE_STATE_ACCEPTED: "waits for the process",
    pb.CAPTURE_STATE_ARMED: "has its orders; all begin together",
    pb.CAPTURE_STATE_RUNNING: "records",
    pb.CAPTURE_STATE_WRITTEN: "recorded; being checked and analysed",
}
FINAL = frozenset({pb.CAPTURE_STATE_ANALYSED, pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED})


def state_word(state: int) -> str:
    """`armed`"""
    names: dict[int, str] = {value.number: value.name for value in pb.CaptureState.DESCRIPTOR.values}
    return names.get(state, "CAPTURE_STATE_UNSPECIFIED").removeprefix("CAPTURE_STATE_").lower()


def delivered(capture: pb.Capture) -> list[pb.RankCapture]:
    return [entry for entry in capture.ranks if entry.state == pb.CAPTURE_STATE_ANALYSED]


def is_trace(entry: pb.RankCapture) -> bool:
    """Not stack samples."""
    return entry.artifact.endswith(".json.gz")


def what_happened(entry: pb.RankCapture) -> str:
    """The cause of a failure, or what the rank waits for."""
    return printable(entry.error) or _BEHIND.get(entry.state, "")


def notes(capture: pb.Capture) -> list[str]:
    """Each note once, with its ranks; notes on the whole capture first."""
    said: dict[str, list[int]] = {}
    for entry in capture.ranks:
        for note in entry.notes:
            said.setdefault(printable(note), []).append(entry.rank)
    return [*(printable(note) for note in capture.notes), *(f"{ranks_text(who)}: {note}" for note, who in said.items())]


def outcome(capture: pb.Capture) -> str:
    """`4 of 4 ranks delivered, 3 steps each, begun within 2 ms of each other`"""
    here = delivered(capture)
    words = [f"{len(here)} of {count(len(capture.ranks), 'rank')} delivered"]
    steps = {entry.steps if entry.HasField("steps") else None for entry in here}
    known = sorted(number for number in steps if number is not None)
    if known and steps == set(known):
        words.append(f"{count(known[0], 'step')} each" if len(known) == 1 else f"{known[0]} to {known[-1]} steps")
    if capture.HasField("start_skew_millis"):
        words.append(f"begun within {quantity(capture.start_skew_millis / 1000, 's')} of each other")
    return ", ".join(words)


def findings(capture: pb.Capture) -> list[str]:
    """The verdict on the job, what the recording says about it, and the findings of the traces; empty if nothing was
    analysed."""
    with_findings = [entry for entry in delivered(capture) if entry.summary.findings]
    if not with_findings and not capture.HasField("join"):
        return []
    said = []
    if capture.HasField("verdict"):
        said.append(f"the verdict on the job was: {printable(headline(_live_verdict(capture)))}")
    # A judgement has the comparison of the ranks in it.
    said += [text for text in [judgement_of(capture) or _comparison(capture.join)] if text]
    shown = _shown_rank(capture, with_findings)
    if shown is not None:
        said.append(f"rank {shown.rank}: {printable(shown.summary.findings[0])}")
        # What to change about a slow rank is what the verdict names. Where the recording does not tell who waited, a
        # faster link may be the advice for a rank that waits.
        if not _accused(capture) and capture.join.verdict != Kind.INSUFFICIENT_DATA.value:
            said += [f"rank {shown.rank}: {printable(advice)}" for advice in shown.summary.advice[:1]]
    return said


def _shown_rank(capture: pb.Capture, entries: Sequence[pb.RankCapture]) -> pb.RankCapture | None:
    """The culprit. Without one, the rank that waited least: the communication of the others is mostly waiting, and what
    would speed it up is not theirs to change. None if only ranks that wait for a culprit were recorded."""
    accused = _accused(capture) or capture.join.culprits
    if accused:
        return next((entry for entry in entries if entry.rank in accused), None)
    return max(entries, key=lambda entry: (capture.join.last_arrivals.get(entry.rank, 0), -entry.rank), default=None)


def _live_verdict(capture: pb.Capture) -> Verdict:
    return verdict_of(capture.verdict)


def _accused(capture: pb.Capture) -> tuple[int, ...]:
    verdict = _live_verdict(capture)
    return verdict.culprits if verdict.kind is Kind.SLOW_RANK else ()


def slowdowns(capture: pb.Capture) -> list[str]:
    """`ranks 0 and 2 took longer for a step after the capture: …`; empty if none did."""
    slower = [
        entry
        for entry in capture.ranks
        if entry.step_times.HasField("before_seconds")
        and entry.step_times.HasField("after_seconds")
        and entry.step_times.after_seconds > SLOWER_RATIO * entry.step_times.before_seconds
    ]
    if not slower:
        return []
    worst = max(slower, key=lambda entry: entry.step_times.after_seconds / entry.step_times.before_seconds).step_times
    who = ranks_text([entry.rank for entry in slower])
    return [
        f"{who} took longer for a step after the capture: {quantity(worst.before_seconds, 's')} before, "
        f"{quantity(worst.after_seconds, 's')} in the seconds after"
    ]


def sentence(capture: pb.Capture) -> str:
    """The main sentence, for scripts and reports."""
    return "; ".join([outcome(capture), *findings(capture)[: 2 if capture.HasField("verdict") else 1]])


def _comparison(join: pb.JoinSummary) -> str:
    """About what was recorded: a few steps do not prove how the job behaves all day. Empty without a comparison."""
    if not join.verdict:
        return ""
    reason = printable(join.reason)
    try:
        kind = Kind(join.verdict)
    except ValueError:
        return f"{printable(join.verdict)}: {reason}"
    if kind is Kind.INSUFFICIENT_DATA:
        excesses = excesses_of(join)
        if not excesses:
            return f"the ranks cannot be compared: {reason}"
        clear = [excess.sentence([each.rank for each in excesses]) for excess in excesses if excess.is_clear]
        text = clear[0] if clear else "between the recorded ranks no difference is clear"
        return f"{text}; of the job this tells nothing more: {reason}"
    if kind is Kind.HEALTHY:
        # The reason names a rank that is always last, but hardly slower.
        return f"in these steps {reason if reason.startswith('rank ') else 'no rank stands out'}"
    culprits = tuple(sorted(join.culprits))
    text = headline(Verdict(kind=kind, reason=reason, culprits=culprits))
    # The reason may begin with the rank's name, which the line already has.
    unsure = " (low confidence)" if join.confidence == "low" else ""
    return f"in these steps {text}{unsure}" + _because(
        reason.removeprefix(f"{ranks_text(culprits)}: ") if culprits else reason
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


# Names of files.


def artifact_name(capture: pb.Capture, entry: pb.RankCapture, window: int = 0) -> str:
    """A job's name may contain anything, including `../`: characters that are special in a path or a shell are
    removed."""
    kind = "folded.gz" if entry.artifact.endswith(".folded.gz") else "json.gz"
    which = f".window{window + 1}" if window else ""
    return f"{stem(capture)}-rank{entry.rank}{which}.{kind}"


def stem(capture: pb.Capture) -> str:
    return f"{safe_name(capture.job)}-{safe_name(capture.id)}"


def safe_name(text: str) -> str:
    """One safe path component."""
    return _UNSAFE.sub("_", text)[:_NAME_CHARACTERS].lstrip(".-") or "job"
