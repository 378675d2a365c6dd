"""Commands of `rankscope`, called in the test's process, with what they print."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from rankscope.cli.main import main


class Said(NamedTuple):
    status: int
    out: str
    err: str


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self._capsys = capsys
        self._words = words

    def __call__(self, *words: object) -> Said:
        self._capsys.readouterr()
        try:
            status = main([*self._words, *map(str, words)])
        except SystemExit as ended:  # by argparse
            status = int(ended.code or 0)
        return Said(status, *self._capsys.readouterr())

    def answer(self, *words: object, status: int = 0) -> str:
        said = self(*words)
        assert said.status == status, said
        return said.out

    def json(self, *words: object, status: int = 0, is_quiet: bool = True) -> dict[str, Any]:
        """Returns the printed JSON object. The command must print nothing else."""
        said = self(*words, "--json")
        assert said.status == status, said
        assert not (is_quiet and said.err), said
        read = json.loads(said.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert isinstance(read, dict)
        return read

    def complaint(self, *words: object, status: int = 2) -> str:
        """Returns the error, which must be one line, with nothing on stdout."""
        said = self(*words)
        assert (said.status, said.out) == (status, "")
        assert said.err.startswith("error: ") and said.err.count("\n") == 1
        return said.err
