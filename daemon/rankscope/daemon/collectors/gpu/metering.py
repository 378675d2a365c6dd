"""Energy that a GPU used, between the driver's own readings too: those are dear and so seldom made."""

from __future__ import annotations

from typing import Final

# Nobody knows what was drawn in a longer gap; the driver's next figure has it.
GAP_SECONDS: Final = 10.0


class EnergyMeter:
    """The driver's counter, and since its last reading power × time. Never goes down but where the counter itself began
    anew: where the sum was too high it stands still until the counter has caught up. Outlives the opening of the
    library, for a counter that goes back by a few joules reads like one that lost all it had."""

    def __init__(self) -> None:
        self._counted: float | None = None
        self._added = 0.0
        self._told: float | None = None
        self._last: tuple[float, float] | None = None  # watts, and when

    def total_joules(self) -> float | None:
        """None where the driver has no counter."""
        if self._counted is not None:
            self._told = max(self._told or 0.0, self._counted + self._added)
        return self._told

    def count(self, joules: float | None) -> None:
        """What the driver's counter reads now."""
        if joules is None:
            return
        if self._counted is not None and joules < self._counted:
            self._told = None
        self._counted, self._added = joules, 0.0

    def draw(self, watts: float | None, at_seconds: float) -> None:
        """The power at that time of a clock that does not go back."""
        before, self._last = self._last, None if watts is None else (watts, at_seconds)
        if before is None or watts is None:
            return
        elapsed = at_seconds - before[1]
        if 0 < elapsed <= GAP_SECONDS:
            self._added += elapsed * (watts + before[0]) / 2
