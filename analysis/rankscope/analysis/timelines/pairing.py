"""Sends and receives: which compute each belongs to, and which one at the other stage it meets."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.analysis.timelines.laying import Node
from rankscope.analysis.timelines.operations import peer_of

DIRECTIONS = ("forward", "backward")
SIDES = ("send", "recv")
# Clocks of one rank's streams differ by this much at most.
CLOCK_TOLERANCE_SECONDS = 5e-5


@dataclass
class Pairs:
    """Numbers are places in the list of nodes."""

    compute_of: dict[int, int] = field(default_factory=dict)  # send or receive → its compute
    groups: list[tuple[int, ...]] = field(default_factory=list)
    # compute → compute at the next chunk, where no send and receive between them was recorded
    direct: list[tuple[int, int]] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pipeline:
    stages: int
    chunks: int

    def peer(self, direction: str, side: str, stage: int, chunk: int) -> tuple[int, int] | None:
        """Stage and chunk at the other end; None where the model ends."""
        step = 1 if (direction == "forward") == (side == "send") else -1
        whole = chunk * self.stages + stage + step
        return (whole % self.stages, whole // self.stages) if 0 <= whole < self.stages * self.chunks else None


def pair(nodes: tuple[Node, ...], pipeline: Pipeline) -> Pairs:
    pairs = Pairs()
    by_place: dict[tuple[int, str], list[int]] = {}
    for number, node in enumerate(nodes):
        by_place.setdefault((node.stage, node.name), []).append(number)
    meeting: dict[tuple[int, str], list[int]] = {}
    for direction in DIRECTIONS:
        for stage in range(pipeline.stages):
            computes = by_place.get((stage, f"{direction}-compute"), [])
            for side in SIDES:
                name = f"{direction}-{side}"
                recorded = by_place.get((stage, name), [])
                facing = [
                    compute
                    for compute in computes
                    if pipeline.peer(direction, side, stage, max(nodes[compute].chunk, 0)) is not None
                ]
                owners = _owners(nodes, recorded, computes, facing, side)
                pairs.compute_of.update(owners)
                wanted = set(facing)
                meeting[stage, name] = [number for number in recorded if owners.get(number) in wanted]
                alone = [number for number in recorded if owners.get(number) not in wanted]
                pairs.groups.extend((number,) for number in alone)
        _meet(pairs, meeting, direction, pipeline)
        _connect_directly(nodes, pairs, by_place, meeting, direction, pipeline)
    return pairs


def _owners(
    nodes: tuple[Node, ...], recorded: list[int], computes: list[int], facing: list[int], side: str
) -> dict[int, int]:
    """Recorders write one per compute, or one per compute that has a peer, or some more before and after them all."""
    if not recorded or not computes:
        return {}
    for counted in (computes, facing):
        if len(recorded) == len(counted):
            return dict(zip(recorded, counted, strict=True))
    if side == "recv":
        last = max(nodes[compute].start_seconds for compute in computes) + CLOCK_TOLERANCE_SECONDS
        real = [number for number in recorded if nodes[number].start_seconds <= last]
    else:
        first = min(nodes[compute].end_seconds for compute in computes) - CLOCK_TOLERANCE_SECONDS
        real = [number for number in recorded if nodes[number].end_seconds >= first]
    for counted in (computes, facing):
        if len(real) == len(counted):
            return dict(zip(real, counted, strict=True))
    if side == "recv" and len(real) + 1 == len(computes):
        return dict(zip(real, computes[1:], strict=True))  # the first one needs none, and none was written
    return dict(zip(real, facing or computes, strict=False))


def _meet(pairs: Pairs, meeting: dict[tuple[int, str], list[int]], direction: str, pipeline: Pipeline) -> None:
    """The n-th send of a stage meets the n-th receive of the next one."""
    side = f"{direction}-send"
    ahead = 1 if direction == "forward" else -1
    for stage in range(pipeline.stages):
        sends = meeting[stage, side]
        receives = meeting[(stage + ahead) % pipeline.stages, peer_of(side)]
        if len(sends) != len(receives) or not sends:
            if sends or receives:
                target = (stage + ahead) % pipeline.stages
                pairs.notes.append(
                    f"{direction} sends of stage {stage} ({len(sends)}) do not match the receives of stage {target} "
                    f"({len(receives)}): its transfers count as instant"
                )
            pairs.left_out.update(sends, receives)
            sends.clear()
            receives.clear()
            continue
        pairs.groups.extend(zip(sends, receives, strict=True))


def _connect_directly(
    nodes: tuple[Node, ...],
    pairs: Pairs,
    by_place: dict[tuple[int, str], list[int]],
    meeting: dict[tuple[int, str], list[int]],
    direction: str,
    pipeline: Pipeline,
) -> None:
    name = f"{direction}-compute"
    silent = 0
    for stage in range(pipeline.stages):
        if meeting[stage, f"{direction}-send"]:
            continue
        for chunk in range(pipeline.chunks):
            place = pipeline.peer(direction, "send", stage, chunk)
            if place is None:
                continue
            givers = [n for n in by_place.get((stage, name), []) if max(nodes[n].chunk, 0) == chunk]
            takers = [n for n in by_place.get((place[0], name), []) if max(nodes[n].chunk, 0) == place[1]]
            pairs.direct.extend(zip(givers, takers, strict=False))
            silent += 1
    if silent and not any("instant" in note for note in pairs.notes):
        pairs.notes.append(f"no {direction} sends between some stages: those transfers count as instant")
