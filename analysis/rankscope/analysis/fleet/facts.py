"""What is measured of a fleet over some days: the input of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

RunKey = tuple[str, str, str]  # cluster (empty if there is one), namespace (empty outside Kubernetes), name
RUN_LABELS = ("cluster", "run_namespace", "run")
UNKNOWN = "(unknown)"
UTILIZATION_BUCKETS = 10


@dataclass(frozen=True, eq=False)
class Figures:
    """Values by labels, as columns: each label is a column of codes into its names."""

    labels: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]  # of each label
    codes: npt.NDArray[np.int64]  # a row per value, a column per label
    values: npt.NDArray[np.float64]

    @classmethod
    def of(cls, labels: Sequence[str], rows: Mapping[tuple[str, ...], float]) -> Figures:
        names: list[tuple[str, ...]] = []
        codes = np.zeros((len(rows), len(labels)), dtype=np.int64)
        for column in range(len(labels)):
            numbers: dict[str, int] = {}
            codes[:, column] = [numbers.setdefault(key[column], len(numbers)) for key in rows]
            names.append(tuple(numbers))
        return cls(tuple(labels), tuple(names), codes, np.fromiter(rows.values(), np.float64, len(rows)))

    def sums(self, *by: str) -> dict[tuple[str, ...], float]:
        """By the values of these labels."""
        keys, rows = self._grouped(by)
        totals = np.bincount(rows, weights=self.values, minlength=len(keys))
        return dict(zip(keys, totals.tolist(), strict=True))

    def most(self, *by: str) -> dict[tuple[str, ...], float]:
        """The largest value of each group."""
        keys, rows = self._grouped(by)
        largest = np.full(len(keys), -np.inf)
        np.maximum.at(largest, rows, self.values)
        return dict(zip(keys, largest.tolist(), strict=True))

    def where(self, label: str, wanted: Mapping[str, bool]) -> Figures:
        """Only rows whose value of the label is wanted."""
        column = self.labels.index(label)
        is_wanted = np.array([wanted.get(name, False) for name in self.names[column]], dtype=bool)
        kept = is_wanted[self.codes[:, column]] if len(self.codes) else np.zeros(0, dtype=bool)
        return Figures(self.labels, self.names, self.codes[kept], self.values[kept])

    @property
    def total(self) -> float:
        return float(self.values.sum())

    def _grouped(self, by: Sequence[str]) -> tuple[list[tuple[str, ...]], npt.NDArray[np.int64]]:
        columns = [self.labels.index(label) for label in by]
        unique, rows = np.unique(self.codes[:, columns], axis=0, return_inverse=True)
        keys = [tuple(self.names[c][code] for c, code in zip(columns, row, strict=True)) for row in unique.tolist()]
        return keys, rows.reshape(-1)


@dataclass(frozen=True)
class Program:
    """What a run is, and for whom. A value that is not known is empty, or None."""

    team: str = ""
    user: str = ""
    image: str = ""
    command: str = ""
    world_size: int | None = None


@dataclass(frozen=True)
class RunFacts:
    program: Program = Program()
    hours: float = 0.0  # in which it was seen
    mfu_ratio: float | None = None  # mean over these hours
    mfu_target_ratio: float | None = None
    # Of runs with one rank.
    utilization_ratio: float | None = None  # mean of its GPU
    memory_bytes: float | None = None  # of its GPU, the most that was used
    memory_total_bytes: float | None = None
    device: str = ""


USED_LABELS = (*RUN_LABELS, "node")
LOST_LABELS = (*RUN_LABELS, "verdict", "node")
CULPRIT_LABELS = (*RUN_LABELS, "node", "gpu", "phase", "bound", "verdict")


def _none(*labels: str) -> Figures:
    return Figures.of(labels, {})


@dataclass(frozen=True)
class FleetFacts:
    begin_unix_seconds: float
    end_unix_seconds: float
    used: Figures = field(default_factory=lambda: _none(*USED_LABELS))  # GPU-hours
    lost: Figures = field(default_factory=lambda: _none(*LOST_LABELS))  # GPU-hours; node empty: none is named
    culprits: Figures = field(default_factory=lambda: _none(*CULPRIT_LABELS))  # hours in which a verdict names a GPU
    utilization: Figures = field(default_factory=lambda: _none("bucket"))  # GPU-hours by tenth of utilization
    runs: Mapping[RunKey, RunFacts] = field(default_factory=dict)
    rank_hours_without_gpu: float = 0.0
    problems: tuple[str, ...] = ()  # what is missing, in sentences
    remarks: tuple[str, ...] = ()  # about the source


def team_of(key: RunKey, run: RunFacts | None) -> str:
    """On Kubernetes, the namespace of a run whose team is not known."""
    return (run.program.team if run else "") or key[1] or UNKNOWN


def run_title(key: RunKey) -> str:
    return "/".join(part for part in key if part)
