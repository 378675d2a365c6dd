"""What is said about a capture: states, what each rank did, and the sentences at the end."""

from __future__ import annotations

from collections import Counter

from rankscope.analysis.drawing.quantities import count, quantity
from rankscope.analysis.drawing.svg import printable
from rankscope.analysis.verdict import Kind, Verdict
from rankscope.analysis.wording import ranks as ranks_text
from rankscope.cli.sentences import headline
from rankscope.v1 import capture_service_pb2 as pb

# A process that CUPTI stays attached to is 19 to 31 % slower; less than this is mostly a busy machine.
SLOWER_RATIO = 1.15
_BEHIND = {
    pb.CAPTURE_STATE_ACCEPTED: "waits for the process",
    pb.CAPTURE_STATE_ARMED: "has its orders; all begin together",
    pb.CAPTURE_STATE_RUNNING: "records",
    pb.CAPTURE_STATE_WRITTEN: "recorded; being checked and analysed",
}


def state_word(state: int) -> str:
    """`armed`"""
    names: dict[int, str] = {value.number: value.name for value in pb.CaptureState.DESCRIPTOR.values}
    return names.get(state, "CAPTURE_STATE_UNSPECIFIED").removeprefix("CAPTURE_STATE_").lower()


def elsewhere(capture_id: str) -> str:
    """What a command about it needs besides: the operator's captures are named after their namespace."""
    return " --operator HOST:PORT" if "/" in capture_id else ""


def delivered(capture: pb.Capture) -> list[pb.RankCapture]:
    return [entry for entry in capture.ranks if entry.state == pb.CAPTURE_STATE_ANALYSED]


def is_complete(capture: pb.Capture) -> bool:
    """Every rank that was asked delivered."""
    return bool(capture.ranks) and len(delivered(capture)) == len(capture.ranks)


def what_happened(entry: pb.RankCapture) -> str:
    """The cause of a failure, or what is awaited."""
    return printable(entry.error) or _BEHIND.get(entry.state, "")


def notes(capture: pb.Capture) -> list[str]:
    """Each once, with the ranks it is about; of the whole capture first."""
    said: dict[str, list[int]] = {}
    for entry in capture.ranks:
        for note in entry.notes:
            said.setdefault(printable(note), []).append(entry.rank)
    return [*(printable(note) for note in capture.notes), *(f"{ranks_text(who)}: {note}" for note, who in said.items())]


def tally(capture: pb.Capture) -> str:
    """`61 analysed, 2 running, 1 failed`"""
    states = Counter(entry.state for entry in capture.ranks)
    return ", ".join(f"{number} {state_word(state)}" for state, number in sorted(states.items(), reverse=True))


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
    """What the traces say, the most important first; empty where nothing was analysed."""
    said = [_verdict(capture.join)] if capture.HasField("join") and capture.join.verdict else []
    with_findings = [entry for entry in delivered(capture) if entry.summary.findings]
    if with_findings:
        culprit = next((one for one in with_findings if one.rank in capture.join.culprits), with_findings[0])
        said.append(f"rank {culprit.rank}: {printable(culprit.summary.findings[0])}")
    return said


def slowdowns(capture: pb.Capture) -> list[str]:
    """`ranks 0 and 2 took longer for a step after the capture: …`; empty where none did."""
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
    """The one that matters, for scripts and reports."""
    return "; ".join([outcome(capture), *findings(capture)[:1]])


def _verdict(join: pb.JoinSummary) -> str:
    """Of what was recorded: a few steps are no proof of what the job does all day."""
    reason = printable(join.reason)
    try:
        kind = Kind(join.verdict)
    except ValueError:
        return f"{printable(join.verdict)}: {reason}"
    if kind is Kind.INSUFFICIENT_DATA:
        return f"the ranks cannot be compared: {reason}"
    if kind is Kind.HEALTHY:
        return "in these steps no rank stands out"
    culprits = tuple(sorted(join.culprits))
    text = headline(Verdict(kind=kind, reason=reason, culprits=culprits))
    # The reason may begin with the rank's name, which has just been said.
    unsure = " (low confidence)" if join.confidence == "low" else ""
    return f"in these steps {text}{unsure}" + _because(
        reason.removeprefix(f"{ranks_text(culprits)}: ") if culprits else reason
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
