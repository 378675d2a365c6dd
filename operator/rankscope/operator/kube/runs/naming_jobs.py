"""The jobs of one run: by what name each goes, and whose its ranks are."""

from __future__ import annotations

from collections.abc import Callable

# A job that has not spoken for so long no longer owns its run's name.
SILENT_SECONDS = 30.0
# How often those are looked for.
FORGETTING_SECONDS = 1.0
JOBS_PER_RUN = 16
# A rank is its pod's as long as that pod lives and speaks of it: else one node could unseat the ranks of another.
OWNED_SECONDS = 10.0

Owner = tuple[str, float]  # uid of a rank's pod, and when it was last heard
Owners = dict[int, Owner]


class RunJobs:
    """By the names they give themselves; a restarted one may come with another port."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.owners: dict[str, Owners] = {}
        self._heard_at: dict[str, float] = {}
        self._looked_at = 0.0
        self._swept_at = 0.0

    def name(self, job: str, run_name: Callable[[], str], now: float) -> str | None:
        """The run's own name for its one job; jobs beside it, as in a Ray cluster, get a number. None where there are
        too many."""
        if now - self._looked_at > FORGETTING_SECONDS:
            self._forget_silent(now)
        name = self.names.get(job)
        if name is None:
            taken, plain = set(self.names.values()), run_name()
            choices = [plain, *(f"{plain}#{number}" for number in range(2, JOBS_PER_RUN + 1))]
            name = next((choice for choice in choices if choice not in taken), None)
            if name is None:
                return None
            self.names[job] = name
        self._heard_at[job] = now
        return name

    def _forget_silent(self, now: float) -> None:
        self._looked_at = now
        for silent in [known for known, heard in self._heard_at.items() if now - heard > SILENT_SECONDS]:
            del self._heard_at[silent], self.names[silent]
            self.owners.pop(silent, None)
        if now - self._swept_at > SILENT_SECONDS:  # less often: a job may have a hundred thousand ranks
            self._swept_at = now
            for job, owners in self.owners.items():
                self.owners[job] = {rank: owner for rank, owner in owners.items() if now - owner[1] < OWNED_SECONDS}
