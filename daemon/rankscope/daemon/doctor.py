"""What will not work on this machine, why, and what to do: the checks behind `rankscope doctor`, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rankscope.daemon import examining, examining_gpus, examining_ranks, examining_tls
from rankscope.daemon.config import Config
from rankscope.daemon.examining import Finding, Level

Check = Callable[[Config], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    examining.platform_is_known,
    examining.python_is_new_enough,
    examining.packages_are_installed,
    examining.may_read_memory,
    examining.may_read_other_users,
    examining.py_spy_samples,
    examining.memfd_can_be_sealed,
    examining.cgroups_are_readable,
    examining.scheduler_counts_delays,
    examining.torch_has_kineto,
    examining_gpus.gpus_are_readable,
    examining_gpus.dcgm_answers,
    examining.addresses_are_free,
    examining_tls.certificates_are_good,
    examining_ranks.ranks_are_visible,
)


def examine(config: Config, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """All findings, each as soon as it is known. A check that breaks is a finding too."""
    for check in checks:
        try:
            yield from check(config)
        except Exception as error:  # noqa: BLE001 - a doctor who faints helps nobody
            name = getattr(check, "__name__", "check").replace("_", " ")
            text = f"{name}: could not be checked: {type(error).__name__}: {error}"
            yield Finding("doctor", Level.WARNING, text, "report this with the output of rankscope doctor --json")
