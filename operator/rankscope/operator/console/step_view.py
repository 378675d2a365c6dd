"""Answers with the picture of one step: columns in microseconds, and what they show in plain words."""

from __future__ import annotations

from rankscope.analysis.quantities import count, quantity
from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import MESSAGES
from rankscope.analysis.step_graph.step_picture import Focus, OperationName, StepPicture
from rankscope.analysis.verdicts.verdict import percent, ranks
from rankscope.operator.console.answers import (
    PictureBars,
    PictureFocus,
    PicturePath,
    StepAnswer,
    StepPictureAnswer,
)
from rankscope.operator.console.history import RunView


def step_answer(view: RunView) -> StepAnswer:
    picture = view.state.picture
    return StepAnswer(view.name, None if picture is None else _picture(picture))


def _picture(picture: StepPicture) -> StepPictureAnswer:
    bars, path, focus = picture.bars, picture.path, picture.focus
    return StepPictureAnswer(
        step=picture.step,
        step_us=_microseconds(picture.step_ns),
        sentence=_sentence(picture),
        detail=_detail(picture),
        ranks=picture.ranks.tolist(),
        stages=picture.stages.tolist(),
        operations=[_name(operation) for operation in picture.operations],
        bars=PictureBars(
            row=bars.row.tolist(),
            operation=bars.operation.tolist(),
            own_us=_column(bars.own_ns),
            start_us=_column(bars.start_ns),
            arrived_us=_column(bars.arrived_ns),
            stop_us=_column(bars.stop_ns),
            bytes=bars.bytes.tolist(),
            awaited=bars.awaited.tolist(),
        ),
        path=PicturePath(path.row.tolist(), _column(path.start_ns), _column(path.stop_ns), path.is_own.tolist()),
        focus=None if focus is None else _focus(focus),
        note=_note(picture),
    )


def _focus(focus: Focus) -> PictureFocus:
    return PictureFocus(
        rank=focus.rank,
        operation=_name(focus.operation),
        start_us=_microseconds(focus.start_ns),
        stop_us=_microseconds(focus.stop_ns),
        end_us=_microseconds(focus.end_ns),
        excess_us=_microseconds(focus.excess_ns),
        waiting=list(focus.waiting),
        late_start_us=_column(focus.late_start_ns),
        late_stop_us=_column(focus.late_stop_ns),
    )


def _sentence(picture: StepPicture) -> str:
    focus = picture.focus
    if focus is None:
        return f"Step {picture.step:,} takes {_time(picture.step_ns)}. {_shares(picture)}"
    against = "earlier in the run" if focus.is_compared_with_past else "its peers"
    sentence = (
        f"Rank {focus.rank} works {_time(focus.excess_ns)} longer than {against} before this {_name(focus.operation)}"
    )
    if focus.waiting:
        sentence += f"; {_waiting(focus.waiting)} for it"
    if focus.waiting_meanwhile:
        sentence += f"{' and' if focus.waiting else ';'} {_waiting(focus.waiting_meanwhile)} meanwhile"
    return sentence + "."


def _detail(picture: StepPicture) -> str:
    """What the step costs; empty if nobody is late."""
    if picture.focus is None or picture.lost_ns <= 0:
        return ""
    usual = "as before" if picture.focus.is_compared_with_past else "as its peers"
    return (
        f"Step {picture.step:,} takes {_time(picture.step_ns)}, of which {_time(picture.lost_ns)} would come back if "
        f"rank {picture.focus.rank} worked {usual}. {_shares(picture)}"
    )


def _shares(picture: StepPicture) -> str:
    own = picture.own_share
    return f"Of its critical path, {percent(own)} is own work of ranks and {percent(1 - own)} is communication."


def _note(picture: StepPicture) -> str:
    missing = []
    if picture.ranks_left_out:
        missing.append(count(picture.ranks_left_out, "rank"))
    if picture.bars_left_out:
        missing.append(f"the {count(picture.bars_left_out, 'shortest operation', 'shortest operations')}")
    return f"Not drawn: {' and '.join(missing)}." if missing else ""


def _waiting(numbers: tuple[int, ...]) -> str:
    return f"{ranks(numbers)} {'wait' if len(numbers) > 1 else 'waits'}"


def _name(operation: OperationName) -> str:
    """`tensor all_reduce of 2`, `pipeline send`"""
    kind = "" if operation.group is GroupKind.UNKNOWN else f"{operation.group.value} "
    return f"{kind}{operation.kind.label}" + ("" if operation.kind in MESSAGES else f" of {operation.size}")


def _time(nanoseconds: int) -> str:
    return quantity(nanoseconds / 1000, "us")


def _microseconds(nanoseconds: int) -> int:
    return round(nanoseconds / 1000)


def _column(nanoseconds: Ints) -> list[int]:
    column: list[int] = ((nanoseconds + 500) // 1000).tolist()
    return column
