"""Numbers the texts of a trace: a name is kept once, and what is asked of names is asked once of each."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from rankscope.analysis.robust import Bools

# A call of a communication library, as torch annotates it: nccl:all_reduce, gloo:broadcast.
COMMUNICATION_CALL = re.compile(r"(?:[a-z]*ccl|gloo|mpi):([A-Za-z_]\w*)")


class NameTable(dict[Any, int]):
    """Numbers texts in the order they come. What is no text is known by how it is written."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._calls = np.zeros(0, dtype=bool)

    def __missing__(self, name: Any) -> int:
        if isinstance(name, str):
            number = len(self.texts)
            self.texts.append(name)
        else:
            number = self["" if name is None else str(name)]
        self[name] = number
        return number

    def communication_calls(self) -> Bools:
        """Of each text, whether it is one."""
        fresh = [COMMUNICATION_CALL.match(text) is not None for text in self.texts[len(self._calls) :]]
        self._calls = np.append(self._calls, np.array(fresh, dtype=bool))
        return self._calls
