"""A made-up fleet and what its Prometheus would hold: runs on nodes, with bad nodes, repetitive runs and teams below
their MFU target, and with runs and nodes that look like these and are not. Seeded: the same fleet every time.

`write_blocks` writes OpenMetrics, 18 hours at a time, and has promtool make blocks of it."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankscope.analysis.verdicts.verdict import FINDINGS
from tools.prometheus_binaries import binary

HOUR = 3600
BLOCK_HOURS = 18  # as Prometheus compacts its blocks
SCRAPE_SECONDS = 300
GPUS_PER_NODE = 8
DEVICE = "NVIDIA H100 80GB HBM3"
TOTAL_BYTES = 85_520_809_984
TEAMS = ("vision", "language", "speech", "robotics", "science", "search", "ads", "maps")
LOW_TEAMS = ("speech", "robotics")
TIGHT_TEAM = "maps"  # just above its target
TARGET_RATIO = 0.40
SWEEP = ("research", "kim", "registry.example/sweep:3", "python sweep.py")


@dataclass(frozen=True)
class Episode:
    """While a finding stands. `ranks` are its culprits."""

    begin: float
    end: float
    kind: str
    impact_ratio: float
    ranks: tuple[int, ...] = ()
    phase: str = "unknown"
    bound: str = ""


@dataclass
class Run:
    name: str
    team: str
    user: str
    image: str
    command: str
    gpus: tuple[tuple[int, int], ...]  # node and number of the GPU, by rank
    begin: float
    end: float
    utilization_ratio: float
    memory_bytes: float
    mfu_ratio: float | None = None
    target_ratio: float | None = None
    share_ratio: float = 1.0  # of its GPUs, which other runs use too
    episodes: list[Episode] = field(default_factory=list)

    @property
    def labels(self) -> str:
        return f'run_namespace="{self.team}",run="{self.name}"'

    @property
    def gpu_hours(self) -> float:
        return self.share_ratio * len(self.gpus) * (self.end - self.begin) / HOUR

    def lost_gpu_seconds(self, kind: str, moment: float) -> float:
        ranks = len(self.gpus)
        spans = ((max(0.0, min(moment, e.end) - e.begin), e) for e in self.episodes if e.kind == kind)
        return sum(span * episode.impact_ratio * ranks for span, episode in spans)

    def finding(self, moment: float) -> Episode | None:
        """The costliest that stands."""
        standing = [episode for episode in self.episodes if episode.begin <= moment < episode.end]
        return max(standing, key=lambda episode: episode.impact_ratio, default=None)

    def ranks_on(self, node: int, gpu: int | None = None) -> tuple[int, ...]:
        return tuple(rank for rank, at in enumerate(self.gpus) if at[0] == node and gpu in (None, at[1]))


@dataclass(frozen=True)
class Scale:
    """How large a fleet is, and how much of each thing is in it."""

    nodes: int
    hours: int
    large_runs: int
    sweep_runs: int
    lone_nodes: int  # that only runs on one GPU use
    bad_nodes: tuple[int, ...]
    host_node: int  # whose ranks are slow in many runs, because of their input
    once_node: int  # of one slow run that lasts
    brief_node: int  # whose device is named in many runs for minutes
    run_nodes: tuple[int, ...] = (1, 2, 4, 8)
    run_hours: tuple[float, float] = (6.0, 36.0)
    noise_ratio: float = 0.04  # of runs with a slow device anywhere


WEEK = Scale(250, 168, 441, 40, 10, (17, 101, 203), 77, 55, 120)
DAY = Scale(12, 24, 12, 6, 3, (2,), 4, 5, 6, (2, 3), (3.0, 6.0), 0.0)


class Fleet:
    def __init__(self, scale: Scale, end: int, seed: int = 7) -> None:
        self.scale = scale
        self.end = end
        self.begin = end - scale.hours * HOUR
        self._random = random.Random(seed)
        self.runs: list[Run] = []
        self._free_at = [float(self.begin)] * scale.nodes
        self._make_large_runs()
        self._make_lone_runs()
        for run in self.runs:
            self._add_findings(run)

    def _make_large_runs(self) -> None:
        scale, chance = self.scale, self._random
        shared = range(scale.nodes - scale.lone_nodes)
        number = 0
        while len(self.runs) < scale.large_runs:
            number += 1
            order = sorted(shared, key=lambda node: self._free_at[node] + chance.uniform(0, 3 * HOUR))
            chosen = order[: chance.choice(scale.run_nodes)]
            begin = max(self._free_at[node] for node in chosen) + chance.uniform(0, HOUR / 2)
            end = min(begin + HOUR * chance.uniform(*scale.run_hours), float(self.end))
            if end - begin < 2 * HOUR:
                continue
            team = TEAMS[number % len(TEAMS)]
            gpus = tuple((node, gpu) for node in chosen for gpu in range(GPUS_PER_NODE))
            mfu = {True: 0.29, False: 0.47}[team in LOW_TEAMS] + chance.uniform(-0.02, 0.02)
            if team == TIGHT_TEAM:
                mfu = TARGET_RATIO + chance.uniform(0.003, 0.02)
            image, command = f"registry.example/{team}:{number % 5}", f"python train_{number % 4}.py"
            user = f"{team}-{number % 3}"
            run = Run(f"train-{number}", team, user, image, command, gpus, begin, end, chance.uniform(0.7, 0.97), 6e10)
            run.mfu_ratio, run.target_ratio = mfu, TARGET_RATIO
            self.runs.append(run)
            for node in chosen:
                self._free_at[node] = end

    def _make_lone_runs(self) -> None:
        scale, chance = self.scale, self._random
        places = [(node, gpu) for node in range(scale.nodes) for gpu in range(GPUS_PER_NODE)]
        places = places[-scale.lone_nodes * GPUS_PER_NODE :]

        def add(count: int, who: Sequence[str], hours: float, utilization: float, memory: float, **more: float) -> None:
            for number in range(count):
                length = HOUR * hours * chance.uniform(0.9, 1.1)
                begin = self.begin + chance.uniform(0, self.end - self.begin - length)
                name = f"{who[3].split()[-1].removesuffix('.py')}-{number}"
                busy = utilization * chance.uniform(0.9, 1.1)
                place = (places.pop(0),)
                run = Run(name, *who[:4], place, begin, begin + length, busy, memory * chance.uniform(0.95, 1.0))
                run.mfu_ratio, run.target_ratio = more.get("mfu"), more.get("target")
                self.runs.append(run)

        hours = 8.0 if scale.hours > 24 else 4.0
        add(scale.sweep_runs, SWEEP, hours, 0.15, 9e9)
        # Not repetitive; repetitive and busy; repetitive with few hours; a run with few hours and a low MFU.
        add(4, ("science", "lee", "registry.example/probe:1", "python evaluate.py"), hours, 0.1, 6e9)
        add(6, ("search", "ana", "registry.example/rank:9", "python tune.py"), hours, 0.8, 4e10)
        add(6, ("ads", "joe", "registry.example/ads:2", "python check.py"), 0.5, 0.1, 6e9)
        # Two on one GPU.
        pair = ("science", "pat", "registry.example/probe:1", "python pair.py")
        add(1, pair, hours, 0.3, 6e9)
        first = self.runs[-1]
        self.runs.append(replace(first, name="pair-1", episodes=[]))
        for run in self.runs[-2:]:
            run.share_ratio = 0.5
        add(1, ("vision", "sam", "registry.example/vision:1", "python short.py"), 0.5, 0.9, 6e10, mfu=0.1, target=0.4)

    def _add_findings(self, run: Run) -> None:
        scale, chance = self.scale, self._random
        if run.team in LOW_TEAMS and len(run.gpus) > 1:
            run.episodes.append(Episode(run.begin + 600, run.end, "low_mfu", 0.25))
        nodes = sorted({node for node, _ in run.gpus})
        if len(nodes) < 2:
            return
        length = run.end - run.begin
        bad = [node for node in nodes if node in scale.bad_nodes]
        if bad and chance.random() < 0.9:
            kind = scale.bad_nodes.index(bad[0])
            ranks = run.ranks_on(bad[0], 3 if kind == 0 else None)
            phase = "throttled" if kind == 0 else "backward"
            self._slow(run, 0.1, 0.9, ranks, phase, "device")
        elif scale.host_node in nodes:
            self._slow(run, 0.1, 0.9, run.ranks_on(scale.host_node, 0), "input", "host")
        elif scale.brief_node in nodes:
            self._slow(run, 0.3, 0.3 + 900 / length, run.ranks_on(scale.brief_node, 1), "forward", "device")
        elif scale.once_node in nodes and not any(e.ranks for r in self.runs for e in r.episodes if self._is_once(r)):
            self._slow(run, 0.05, 0.98, run.ranks_on(scale.once_node), "forward", "device")
        elif chance.random() < scale.noise_ratio:
            self._slow(run, 0.4, 0.6, run.ranks_on(chance.choice(nodes), chance.randrange(8)), "forward", "device")
        elif chance.random() < 0.1:
            self._slow(run, 0.2, 0.5, run.ranks_on(chance.choice(nodes), 0), "input", "host")
        elif chance.random() < 0.1:
            kind_of = chance.choice(("data_imbalance", "slow_communication", "input_bound", "jitter"))
            run.episodes.append(Episode(run.begin + 0.3 * length, run.begin + 0.6 * length, kind_of, 0.08))
        elif chance.random() < 0.05:
            begin = run.begin + 0.5 * length
            run.episodes.append(Episode(begin, begin + 1200, "hang", 1.0, run.ranks_on(nodes[0], 2), "ended"))

    def _is_once(self, run: Run) -> bool:
        return any(node == self.scale.once_node for node, _ in run.gpus)

    def _slow(self, run: Run, begin: float, end: float, ranks: tuple[int, ...], phase: str, bound: str) -> None:
        length = run.end - run.begin
        # A job has one verdict at a time.
        run.episodes = [
            Episode(run.begin + begin * length, run.begin + end * length, "slow_rank", 0.12, ranks[:16], phase, bound)
        ]


def node_name(node: int) -> str:
    return f"gpu-{node:03}"


def gpu_name(node: int, gpu: int) -> str:
    return f"GPU-{node:08x}-{gpu:04x}"


# OpenMetrics.


def write_blocks(fleet: Fleet, folder: Path) -> None:
    """Blocks of a Prometheus' data in `folder`/data. promtool reads a file once for each block of it, so each block has
    a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)

    length = BLOCK_HOURS * HOUR

    def write(begin: int) -> None:
        path = folder / f"{begin}.txt"
        with path.open("w") as file:
            for part in _lines(fleet, begin, begin + length):
                file.write(part)
        command = [str(binary("promtool")), "tsdb", "create-blocks-from", f"--max-block-duration={BLOCK_HOURS}h"]
        command += ["openmetrics", str(path), str(folder / "data")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        path.unlink()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(fleet.begin - fleet.begin % length, fleet.end, length)))


def _lines(fleet: Fleet, begin: int, end: int) -> Iterator[str]:
    moments = [m for m in range(begin, end, SCRAPE_SECONDS) if fleet.begin <= m < fleet.end]
    chance = random.Random(begin)
    runs = [run for run in fleet.runs if run.begin < end and run.end > begin]
    yield from _gpu_lines(fleet, runs, moments, chance)
    for family, lines in (
        ("rankscope_rank_info", _rank_info(runs, moments)),
        ("rankscope_rank_step_seconds", _steps(runs, moments)),
        ("rankscope_job_info", _job_info(runs, moments)),
        ("rankscope_job_mfu_ratio", _mfu(runs, moments, chance)),
        ("rankscope_job_mfu_target_ratio", _target(runs, moments)),
        ("rankscope_job_verdict", _verdicts(runs, moments)),
        ("rankscope_job_impact_ratio", _impacts(runs, moments)),
        ("rankscope_job_culprit", _culprits(runs, moments)),
    ):
        yield f"# TYPE {family} gauge\n"
        yield from lines
    yield "# TYPE rankscope_job_lost_gpu_seconds counter\n"
    yield from _lost(runs, moments)
    yield "# EOF\n"


def _gpu_lines(fleet: Fleet, runs: Sequence[Run], moments: Sequence[int], chance: random.Random) -> Iterator[str]:
    users: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        for place in run.gpus:
            users.setdefault(place, []).append(run)
    places = [(node, gpu) for node in range(fleet.scale.nodes) for gpu in range(GPUS_PER_NODE)]
    noise = [chance.gauss(0.0, 0.03) for _ in range(997)]
    labels = {place: f'{{gpu="{gpu_name(*place)}",node="{node_name(place[0])}"' for place in places}
    active = {place: [_active(users.get(place, ()), moment) for moment in moments] for place in places}
    yield "# TYPE rankscope_gpu_utilization_ratio gauge\n"
    for number, place in enumerate(places):
        prefix = f"rankscope_gpu_utilization_ratio{labels[place]}}}"
        values = [0.0 if run is None else run.utilization_ratio for run in active[place]]
        noisy = (value and value + noise[(number * 31 + index) % 997] for index, value in enumerate(values))
        yield _series(prefix, moments, (min(1.0, max(0.0, value)) for value in noisy))
    yield "# TYPE rankscope_gpu_memory_bytes gauge\n"
    for place in places:
        prefix = f'rankscope_gpu_memory_bytes{labels[place]},kind="used"}}'
        yield _series(prefix, moments, (5e8 if run is None else run.memory_bytes for run in active[place]))
        yield _series(f'{prefix[:-7]}"total"}}', moments, [TOTAL_BYTES] * len(moments))
    yield "# TYPE rankscope_gpu_shared gauge\n"
    for place in places:
        shared = (len([run for run in users.get(place, ()) if run.begin <= m < run.end]) > 1 for m in moments)
        yield _series(f"rankscope_gpu_shared{labels[place]}}}", moments, shared)
    yield "# TYPE rankscope_gpu_info gauge\n"
    for place in places:
        prefix = f'rankscope_gpu_info{labels[place]},index="{place[1]}",name="{DEVICE}",parent=""}}'
        yield _series(prefix, moments, [1] * len(moments))


def step_seconds(run: Run, moment: float) -> float:
    standing = run.finding(moment)
    return 0.5 / (1.0 - min(0.9, standing.impact_ratio if standing else 0.0))


def _active(runs: Iterable[Run], moment: float) -> Run | None:
    return next((run for run in runs if run.begin <= moment < run.end), None)


def _series(prefix: str, moments: Iterable[float], values: Iterable[float]) -> str:
    return "".join([f"{prefix} {value:.6g} {moment}\n" for moment, value in zip(moments, values, strict=True)])


def _during(run: Run, moments: Iterable[int]) -> list[int]:
    return [moment for moment in moments if run.begin <= moment < run.end]


def _rank_info(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        during = _during(run, moments)
        for rank, place in enumerate(run.gpus):
            labels = f'{run.labels},rank="{rank}",node="{node_name(place[0])}",gpu="{gpu_name(*place)}"'
            prefix = f'rankscope_rank_info{{{labels},world_size="{len(run.gpus)}",pid="{4000 + rank}"}}'
            yield _series(prefix, during, [1] * len(during))


def _steps(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        during = _during(run, moments)
        values = [step_seconds(run, moment) for moment in during]
        for rank in range(len(run.gpus)):
            yield _series(f'rankscope_rank_step_seconds{{{run.labels},rank="{rank}",stat="p50"}}', during, values)


def _job_info(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        who = f'team="{run.team}",user="{run.user}",image="{run.image}",command="{run.command}"'
        during = _during(run, moments)
        prefix = f'rankscope_job_info{{{run.labels},world_size="{len(run.gpus)}",{who}}}'
        yield _series(prefix, during, [1] * len(during))


def _mfu(runs: Iterable[Run], moments: Sequence[int], chance: random.Random) -> Iterator[str]:
    for run in runs:
        if run.mfu_ratio is not None:
            during = _during(run, moments)
            values = [run.mfu_ratio + chance.gauss(0.0, 0.01) for _ in during]
            yield _series(f"rankscope_job_mfu_ratio{{{run.labels}}}", during, values)


def _target(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        if run.target_ratio is not None:
            during = _during(run, moments)
            values = [run.target_ratio] * len(during)
            yield _series(f"rankscope_job_mfu_target_ratio{{{run.labels}}}", during, values)


def _verdicts(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        by_kind: dict[str, list[int]] = {}
        for moment in _during(run, moments):
            standing = run.finding(moment)
            by_kind.setdefault("healthy" if standing is None else standing.kind, []).append(moment)
        for kind, during in by_kind.items():
            cause = f'verdict="{kind}",severity="{"none" if kind == "healthy" else "warning"}",confidence="high"'
            yield _series(f"rankscope_job_verdict{{{run.labels},{cause}}}", during, [1] * len(during))


def _impacts(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        found = [(moment, standing) for moment in _during(run, moments) if (standing := run.finding(moment))]
        values = [standing.impact_ratio for _, standing in found]
        yield _series(f"rankscope_job_impact_ratio{{{run.labels}}}", [moment for moment, _ in found], values)


def _culprits(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        for one in run.episodes:
            during = [moment for moment in _during(run, moments) if one.begin <= moment < one.end]
            for rank in one.ranks:
                cause = f'phase="{one.phase}",bound="{one.bound}",verdict="{one.kind}"'
                labels = f'{run.labels},rank="{rank}",node="{node_name(run.gpus[rank][0])}",run_pod="",{cause}'
                yield _series(f"rankscope_job_culprit{{{labels}}}", during, [1] * len(during))


def _lost(runs: Iterable[Run], moments: Sequence[int]) -> Iterator[str]:
    for run in runs:
        during = _during(run, moments)
        for kind in FINDINGS:
            prefix = f'rankscope_job_lost_gpu_seconds_total{{{run.labels},verdict="{kind.value}"}}'
            yield _series(prefix, during, (run.lost_gpu_seconds(kind.value, moment) for moment in during))
