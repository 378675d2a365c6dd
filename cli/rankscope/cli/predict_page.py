"""A forecast as one self-contained HTML page: the predictions, and a step before and after each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rankscope.analysis.plots import svg
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis, Frame, Scale, element, frame, hover, label
from rankscope.analysis.quantities import count, quantity, shorten
from rankscope.analysis.replay.prediction import Forecast, Prediction, gain_words
from rankscope.analysis.replay.step_timeline import Activity, Lane, StepTimelines, Timeline
from rankscope.cli.prediction_text import gain_unit, not_applicable, percent

# What a page shows of predictions; --with may ask for more.
MAX_AFTER = 12
_LOOKS = {
    Activity.HOST: ("host", "#a3acb5"),
    Activity.CALL: ("calls", svg.SKY),
    Activity.DEVICE_WAIT: ("waiting for the device", "#b08d57"),
    Activity.INPUT_WAIT: ("waiting for input", svg.PURPLE),
    Activity.COMPUTE: ("computation", svg.BLUE),
    Activity.COMMUNICATION: ("communication", svg.ORANGE),
    Activity.RANK_WAIT: ("waiting for other ranks", "#f3d9a4"),
    Activity.COPY: ("copies", svg.GREEN),
}
_TIME = Axis("time since the step before ended", "us")
_RANK_PIXELS = 7.0  # between two ranks
# The height of a lane and of its label, by the number of lanes.
_ROWS = ((4, 30.0, 12.0), (16, 18.0, 12.0), (10**9, 13.0, 10.0))
_FREE = "nothing"
# If the step that is drawn differs by more from the mean, the mean is given too.
_TYPICAL_RATIO = 0.02
_LANE_CHARACTERS = 18
_EXPLAINED = (
    "A step whose duration is near the mean, with all that runs in its time, also of other steps. Where events are too "
    "short to be drawn, the height of a colour is its share of the time. Point at a colour for names and durations."
)

_AHEAD = (
    "A stream without work in a picture after a change has done it before: where nothing waits for communication, "
    "computation runs ahead of it by steps."
)


def make_page(found: Forecast, headline: str, facts: Sequence[str], timelines: StepTimelines) -> str:
    sections = [Section("The replay", [f"{fact[:1].upper()}{fact[1:]}".rstrip(".") + "." for fact in facts])]
    if found.is_usable:
        sections += [*_predictions(found), _before_and_after(found, timelines), *_not_applicable(found)]
    else:
        sections.append(_recorded_and_replayed(found, timelines))
    foot = "Made by rankscope predict. What each change assumes: docs/predict.md; this page needs no network."
    return page("Rankscope prediction", sections, lead=headline, foot=foot)


def _predictions(found: Forecast) -> list[Section]:
    known = [one for one in found.predictions if one.gain_ratio is not None]
    rows = [
        [
            one.name,
            quantity((one.step_ns or 0.0) / 1000, "us"),
            f"{gain_words(one)} {gain_unit(one)}".strip(),
            "; ".join(change.remedy for change in one.changes),
            "; ".join(change.costs for change in one.changes if change.costs != _FREE) or _FREE,
        ]
        for one in known
    ]
    columns = ["change", "step", "gain", "what to do", "costs"]
    best = [known.index(found.best)] if found.best is not None else []
    table = Table(columns, rows, [False, True, True, False, False], marked=best)
    return [Section("Predictions", tables=[table])] if rows else []


def _not_applicable(found: Forecast) -> list[Section]:
    rows = [[names, reason] for reason, names in not_applicable(found).items()]
    return [Section("What does not apply", tables=[Table(["change", "reason"], rows)])] if rows else []


def _before_and_after(found: Forecast, timelines: StepTimelines) -> Section:
    before = timelines.replayed
    if before is None:
        return Section("One step")
    # A step of another batch cannot be compared with one of this.
    useful = [one for one in found.worthwhile if one.name in timelines.of_changes]
    shown = [(one, timelines.of_changes[one.name]) for one in useful[:MAX_AFTER]]
    everything = [before, *(after for _, after in shown)]
    legend = _present(everything)
    longest = max(one.duration_ns for one in everything)
    said = [_EXPLAINED, *_left_out(timelines, everything)]
    if any(set(before.lanes) - set(after.lanes) for _, after in shown):
        said.append(_AHEAD)
    if len(useful) > len(shown):
        said.append(f"{count(len(useful) - len(shown), 'prediction')} with a smaller gain left out.")
    return Section(
        "One step before and after" if shown else "One step",
        said,
        plots=[_draw(_title("Before", before, found.step_ns), before, before.lanes, longest, legend)],
        choices=[
            (
                f"{one.name} −{percent(one.gain)}",
                _draw(
                    _title(f"With {one.name}", after, one.step_ns or 0.0),
                    after,
                    _lanes([before, after]),
                    longest,
                    saved=(before.duration_ns, _gain(found, one)),
                ),
            )
            for one, after in shown
        ],
    )


def _recorded_and_replayed(found: Forecast, timelines: StepTimelines) -> Section:
    known = [
        (what, one, mean_ns)
        for what, one, mean_ns in (
            ("Recorded", timelines.recorded, found.recorded_step_ns),
            ("Replayed", timelines.replayed, found.replayed_step_ns),
        )
        if one is not None
    ]
    everything = [one for _, one, _ in known]
    longest = max((one.duration_ns for one in everything), default=1)
    lanes = _lanes(everything)
    plots = [
        _draw(_title(what, one, mean_ns), one, lanes, longest, () if index else _present(everything))
        for index, (what, one, mean_ns) in enumerate(known)
    ]
    return Section("One step as recorded and as replayed", [_EXPLAINED, *_left_out(timelines, everything)], plots=plots)


def _title(what: str, timeline: Timeline, mean_ns: float) -> str:
    far = abs(timeline.duration_ns - mean_ns) > _TYPICAL_RATIO * mean_ns
    mean = f"; the mean is {_text(mean_ns)}" if far else ""
    return f"{what}: step {timeline.step}, {_text(timeline.duration_ns)}{mean}"


def _left_out(timelines: StepTimelines, drawn: Sequence[Timeline]) -> list[str]:
    said = []
    least, most = timelines.least_waiting, timelines.most_waiting
    if least is not None and least != most:
        said.append(f"Rank {least} waits least for others in collectives, rank {most} waits most.")
    if timelines.ranks_left_out:
        said.append(f"{count(timelines.ranks_left_out, 'rank')} left out.")
    streams = max((one.streams_left_out for one in drawn), default=0)
    if streams:
        said.append(f"{count(streams, 'stream')} with little work left out.")
    return said


def _gain(found: Forecast, one: Prediction) -> str:
    return f"−{_text(found.step_ns - (one.step_ns or 0.0))}, −{percent(one.gain)}"


def _text(nanoseconds: float) -> str:
    return quantity(nanoseconds / 1000, "us")


def _present(timelines: Iterable[Timeline]) -> list[Activity]:
    used = {int(activity) for one in timelines for activity in np.unique(one.drawn.activity)}
    return [activity for activity in _LOOKS if activity in used]


def _lanes(timelines: Iterable[Timeline]) -> tuple[Lane, ...]:
    return tuple(sorted({lane for one in timelines for lane in one.lanes}))


def _draw(
    title: str,
    timeline: Timeline,
    lanes: Sequence[Lane],
    longest_ns: int,
    legend: Sequence[Activity] = (),
    saved: tuple[int, str] | None = None,
) -> str:
    """`saved`: how long the step was before, and what to write where it is shorter now."""
    ranks = sorted({lane.rank for lane in lanes})
    row, text_pixels = next(sizes for most, *sizes in _ROWS if len(lanes) <= most)
    shown = {lane: shorten(lane.name, _LANE_CHARACTERS) for lane in lanes}
    wide = max(map(svg.text_pixels, shown.values())) + max(svg.text_pixels(f"rank {rank}") for rank in ranks)
    height = len(lanes) * row + len(ranks) * _RANK_PIXELS
    inside = frame(height, left=wide + 34, title=title, legend=[_LOOKS[one] for one in legend])
    # To the end of the longest step, not to the next round number: what is empty then was saved.
    across = svg.scale(_TIME, (0.0, longest_ns / 1000), inside.left, inside.right, most=8).cut(0.0, longest_ns / 1000)
    parts = [svg.x_axis(inside, across)]
    tops: dict[Lane, float] = {}
    for index, lane in enumerate(lanes):
        tops[lane] = inside.top + _RANK_PIXELS / 2 + index * row + ranks.index(lane.rank) * _RANK_PIXELS
        y, note = tops[lane] + row / 2 + text_pixels / 3 - 1, lane.name if shown[lane] != lane.name else ""
        if not index or lanes[index - 1].rank != lane.rank:
            parts.append(label(16, y, f"rank {lane.rank}", bold=True, pixels=text_pixels))
        parts.append(label(inside.left - 7, y, shown[lane], anchor="end", muted=True, tooltip=note, pixels=text_pixels))
    parts += _rectangles(timeline, across, [tops[lane] for lane in timeline.lanes], row - 2)
    parts.append(svg.base_line(inside, across.place(timeline.duration_ns / 1000), 1.5))
    if saved is not None:
        parts.append(_saving(inside, across, timeline.duration_ns, *saved))
    return inside.drawing(parts)


def _rectangles(timeline: Timeline, across: Scale, tops: Sequence[float], height: float) -> list[str]:
    parts, drawn = [], timeline.drawn
    for activity in _present([timeline]):
        what, colour = _LOOKS[activity]
        made = []
        for index in np.flatnonzero(drawn.activity == activity).tolist():
            start, end = int(drawn.start_ns[index]), int(drawn.end_ns[index])
            left, right = across.place(start / 1000), across.place(end / 1000)
            tall = height * float(drawn.height_ratio[index])
            top = tops[int(drawn.lane[index])] + height * (1 - float(drawn.bottom_ratio[index])) - tall
            note = _note(what, timeline, index, end - start)
            made.append(
                element("rect", hover(note), x=left, y=top, width=max(right - left, 1.0), height=max(tall, 0.3))
            )
        # Without blurred edges, through which the page would show between neighbours.
        parts.append(element("g", "".join(made), fill=colour, shape_rendering="crispEdges"))
    return parts


def _note(what: str, timeline: Timeline, index: int, span_ns: int) -> str:
    drawn, name = timeline.drawn, timeline.names[index]
    busy, events = int(drawn.busy_ns[index]), int(drawn.events[index])
    when = f"at {_text(int(drawn.start_ns[index]))}"
    if busy == span_ns and events <= 1:
        return f"{name or what}: {_text(busy)} {when}" + (f" ({what})" if name else "")
    longest = f"; the longest: {name}" if name else ""
    return f"{what}: {_text(busy)} of {_text(span_ns)} {when}, {count(events, 'event')}{longest}"


def _saving(inside: Frame, across: Scale, after_ns: int, before_ns: int, text: str) -> str:
    left, right = across.place(after_ns / 1000), across.place(before_ns / 1000)
    parts = [label(inside.right, inside.top - 8, text, anchor="end", bold=True, fill=svg.GREEN, pixels=14)]
    if right > left:
        area = {"x": left, "y": inside.top, "width": right - left, "height": inside.bottom - inside.top}
        parts.insert(0, element("rect", hover(text), **area, fill=svg.GREEN, fill_opacity=0.13))
        parts.append(element("line", x1=left, y1=inside.top, x2=right, y2=inside.top, stroke=svg.GREEN, stroke_width=2))
    return "".join(parts)
