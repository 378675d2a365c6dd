"""The dependency graph of a step: what each operation follows, and which operations start together. Pairs sends and
receives of neighbouring stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from rankscope.analysis.timelines.layout import Node
from rankscope.analysis.timelines.timeline import (
    BACKWARD,
    EMBEDDING,
    FORWARD,
    GC,
    GRADS,
    OPTIMIZER,
    PARAMS,
    SEPARATE,
    TAIL,
    TimelineError,
    Waits,
    describe,
    peer_of,
)

DIRECTIONS = ("forward", "backward")
SIDES = ("send", "recv")
# Maximum difference between the clocks of one rank's streams.
CLOCK_TOLERANCE_SECONDS = 5e-5


@dataclass(frozen=True)
class Task:
    """Operations of one lane that start together. `waits` shows whether other lanes are involved."""

    members: tuple[int, ...]
    waits: Waits


@dataclass(frozen=True)
class Graph:
    tasks: tuple[Task, ...]  # in topological order
    before: tuple[tuple[int, ...], ...]  # per node
    last_use: tuple[int, ...]  # per node: the last task that needs its end
    final: tuple[int, ...]  # the step ends with the latest of these nodes
    notes: tuple[str, ...]


def build_graph(nodes: tuple[Node, ...], stages: int) -> Graph:
    """The graph of one step. Raises TimelineError if dependencies are circular."""
    chunks = 1 + max(max(node.chunk for node in nodes if node.position >= 0), 0)
    pairs = pair(nodes, Pipeline(stages, chunks))
    before: list[list[int]] = [[] for _ in nodes]
    overlapped = any(node.name == SEPARATE for node in nodes)
    for stage in range(stages):
        _add_stage([n for n, node in enumerate(nodes) if node.stage == stage], nodes, pairs, before, overlapped)
    for sender, receiver in pairs.direct:
        before[receiver].append(sender)
    tasks = _sort(_make_tasks(nodes, pairs, stages), before)
    final = [n for n, node in enumerate(nodes) if node.name == OPTIMIZER] or list(range(len(nodes)))
    final = [n for n in final if n not in pairs.excluded]
    last_use = [0] * len(nodes)
    for place, task in enumerate(tasks):
        for member in task.members:
            for earlier in before[member]:
                last_use[earlier] = place
    for number in final:
        last_use[number] = len(tasks)
    return Graph(tuple(tasks), tuple(map(tuple, before)), tuple(last_use), tuple(final), tuple(pairs.notes))


def _add_stage(
    mine: list[int], nodes: tuple[Node, ...], pairs: Pairs, before: list[list[int]], overlapped: bool
) -> None:
    by_name: dict[str, list[int]] = {}
    for number in mine:
        by_name.setdefault(nodes[number].name, []).append(number)
    chain = sorted((n for n in mine if nodes[n].position >= 0), key=lambda n: nodes[n].position)
    _follow(chain, before)
    for direction in DIRECTIONS:
        _add_transfers(direction, by_name, chain, nodes, pairs, before)
    gathers, scatters = by_name.get(PARAMS, []), by_name.get(GRADS, [])
    _follow(gathers, before)
    for chunk, gather in {nodes[n].chunk: n for n in gathers}.items():
        users = [n for n in chain if nodes[n].name == FORWARD and nodes[n].chunk == chunk] or chain
        if users:
            before[users[0]].append(gather)
    tail = [number for name in TAIL if not (overlapped and name == GRADS) for number in by_name.get(name, [])]
    _follow(chain[-1:] + tail, before)
    if overlapped and scatters:
        _follow(scatters, before)
        for chunk, scatter in {nodes[n].chunk: n for n in reversed(scatters)}.items():
            makers = [n for n in chain if nodes[n].name == BACKWARD and nodes[n].chunk == chunk] or chain
            before[scatter].extend(makers[-1:])
        rest = [number for number in tail if nodes[number].name != GC]
        if rest:
            before[rest[0]].append(scatters[-1])


def _add_transfers(
    direction: str,
    by_name: dict[str, list[int]],
    chain: list[int],
    nodes: tuple[Node, ...],
    pairs: Pairs,
    before: list[list[int]],
) -> None:
    computes = by_name.get(f"{direction}-compute", [])
    receives = [n for n in by_name.get(f"{direction}-recv", []) if n not in pairs.excluded]
    sends = [n for n in by_name.get(f"{direction}-send", []) if n not in pairs.excluded]
    _follow(receives, before)
    _follow(sends, before)
    for number in receives:
        compute = pairs.compute_of.get(number)
        if compute is not None:
            before[compute].append(number)
            if nodes[compute].index > 0:
                before[number].append(computes[nodes[compute].index - 1])
    for number in sends:
        compute = pairs.compute_of.get(number)
        if compute is not None:
            before[number].append(compute)
    if direction == "backward":
        # Posted one forward early, to be ready when the warm-up ends.
        first = next((place for place, n in enumerate(chain) if nodes[n].name == BACKWARD), 0)
        if first >= 2:
            for transfers in (receives, sends):
                for number in transfers[:1]:
                    before[number].append(chain[first - 2])


def _follow(chain: list[int], before: list[list[int]]) -> None:
    for earlier, later in pairwise(chain):
        before[later].append(earlier)


def _make_tasks(nodes: tuple[Node, ...], pairs: Pairs, stages: int) -> list[Task]:
    tasks = [Task(group, Waits.PEER) for group in pairs.groups]
    joint: dict[tuple[str, int], list[int]] = {}
    for number, node in enumerate(nodes):
        waits = describe(node.name).waits
        if waits is Waits.PEER:
            continue
        if waits is Waits.ALL or (node.name == EMBEDDING and node.stage in (0, stages - 1)):
            joint.setdefault((node.name, node.index), []).append(number)
        elif waits is Waits.ENDS:
            tasks.append(Task((number,), Waits.NONE))
        else:
            tasks.append(Task((number,), waits))
    tasks.extend(Task(tuple(members), describe(name).waits) for (name, _), members in joint.items())
    return tasks


def _sort(tasks: list[Task], before: list[list[int]]) -> list[Task]:
    task_of = {member: place for place, task in enumerate(tasks) for member in task.members}
    waiting = [0] * len(tasks)
    after: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        for earlier in {task_of[n] for member in task.members for n in before[member]}:
            waiting[place] += 1
            after[earlier].append(place)
    ready = [place for place, count in enumerate(waiting) if count == 0]
    done: list[Task] = []
    while ready:
        place = ready.pop()
        done.append(tasks[place])
        for later in after[place]:
            waiting[later] -= 1
            if waiting[later] == 0:
                ready.append(later)
    if len(done) < len(tasks):
        raise TimelineError("circular dependencies between operations; check stage, seq_id and mc")
    return done


@dataclass
class Pairs:
    """Numbers are positions in the list of nodes."""

    compute_of: dict[int, int] = field(default_factory=dict)  # send or receive → its compute
    groups: list[tuple[int, ...]] = field(default_factory=list)
    # compute → compute of the next chunk, if no send and receive between them was recorded
    direct: list[tuple[int, int]] = field(default_factory=list)
    excluded: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pipeline:
    stages: int
    chunks: int

    def peer(self, direction: str, side: str, stage: int, chunk: int) -> tuple[int, int] | None:
        """Stage and chunk at the other end; None at the ends of the model."""
        step = 1 if (direction == "forward") == (side == "send") else -1
        whole = chunk * self.stages + stage + step
        return (whole % self.stages, whole // self.stages) if 0 <= whole < self.stages * self.chunks else None


def pair(nodes: tuple[Node, ...], pipeline: Pipeline) -> Pairs:
    pairs = Pairs()
    by_place: dict[tuple[int, str], list[int]] = {}
    for number, node in enumerate(nodes):
        by_place.setdefault((node.stage, node.name), []).append(number)
    transfers: dict[tuple[int, str], list[int]] = {}
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
                transfers[stage, name] = [number for number in recorded if owners.get(number) in wanted]
                alone = [number for number in recorded if owners.get(number) not in wanted]
                pairs.groups.extend((number,) for number in alone)
        _match_transfers(pairs, transfers, direction, pipeline)
        _connect_directly(nodes, pairs, by_place, transfers, direction, pipeline)
    return pairs


def _owners(
    nodes: tuple[Node, ...], recorded: list[int], computes: list[int], facing: list[int], side: str
) -> dict[int, int]:
    """Recorders write one per compute, one per compute that has a peer, or additional ones before and after."""
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


def _match_transfers(
    pairs: Pairs, transfers: dict[tuple[int, str], list[int]], direction: str, pipeline: Pipeline
) -> None:
    """The n-th send of a stage matches the n-th receive of the next one."""
    side = f"{direction}-send"
    ahead = 1 if direction == "forward" else -1
    for stage in range(pipeline.stages):
        sends = transfers[stage, side]
        receives = transfers[(stage + ahead) % pipeline.stages, peer_of(side)]
        if len(sends) != len(receives) or not sends:
            if sends or receives:
                target = (stage + ahead) % pipeline.stages
                pairs.notes.append(
                    f"{direction} sends of stage {stage} ({len(sends)}) do not match the receives of stage {target} "
                    f"({len(receives)}): these transfers count as instant"
                )
            pairs.excluded.update(sends, receives)
            sends.clear()
            receives.clear()
            continue
        pairs.groups.extend(zip(sends, receives, strict=True))


def _connect_directly(
    nodes: tuple[Node, ...],
    pairs: Pairs,
    by_place: dict[tuple[int, str], list[int]],
    transfers: dict[tuple[int, str], list[int]],
    direction: str,
    pipeline: Pipeline,
) -> None:
    name = f"{direction}-compute"
    missing = 0
    for stage in range(pipeline.stages):
        if transfers[stage, f"{direction}-send"]:
            continue
        for chunk in range(pipeline.chunks):
            place = pipeline.peer(direction, "send", stage, chunk)
            if place is None:
                continue
            senders = [n for n in by_place.get((stage, name), []) if max(nodes[n].chunk, 0) == chunk]
            receivers = [n for n in by_place.get((place[0], name), []) if max(nodes[n].chunk, 0) == place[1]]
            pairs.direct.extend(zip(senders, receivers, strict=False))
            missing += 1
    if missing and not any("instant" in note for note in pairs.notes):
        pairs.notes.append(f"no {direction} sends between some stages: those transfers count as instant")
