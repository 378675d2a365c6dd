"""How Python looks for garbage in a process that is sent thousands of windows a second."""

from __future__ import annotations

import gc

# Objects made before the youngest are looked through, and how often that is done before the older ones are. Windows
# live for seconds and are in no cycle: looking through them at Python's own pace took a tenth of the operator's time.
THRESHOLDS = (20_000, 20, 20)


def settle() -> None:
    """Once everything is imported."""
    gc.collect()
    gc.freeze()  # what is there now stays
    gc.set_threshold(*THRESHOLDS)
