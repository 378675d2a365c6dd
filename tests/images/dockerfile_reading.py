"""Reads the part of the Dockerfile language that ours uses, and refuses the rest: what is not known is not checked."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KEYWORDS = frozenset(
    ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "USER", "WORKDIR"),
)
FLAGS = {"FROM": {"platform"}, "COPY": {"from"}}


class DockerfileError(Exception):
    pass


@dataclass(frozen=True)
class Instruction:
    keyword: str
    flags: Mapping[str, str]
    value: str  # as written: variables are expanded by the caller, who knows their values

    @property
    def words(self) -> list[str]:
        """The JSON form of ENTRYPOINT and CMD; else the words."""
        if self.value.startswith("["):
            words: list[str] = json.loads(self.value)
            return words
        return shlex.split(self.value)


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, keyword: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.keyword == keyword]

    def last(self, keyword: str) -> Instruction | None:
        found = self.all(keyword)
        return found[-1] if found else None


def read_stages(text: str, arguments: Mapping[str, str]) -> dict[str, Stage]:
    """Stages by name, in order; `arguments` are what a builder is called with."""
    known = dict(arguments)
    stages: dict[str, Stage] = {}
    for instruction in instructions(text):
        if instruction.keyword == "FROM":
            base, _, name = re.split(r"\s+(AS)\s+", expand(instruction.value, known))
            if name in stages:
                raise DockerfileError(f"two stages are called {name}")
            stages[name] = Stage(name, base, ())
        elif not stages:
            if instruction.keyword != "ARG":
                raise DockerfileError(f"{instruction.keyword} before the first FROM")
            name, _, value = instruction.value.partition("=")
            known.setdefault(name, value)
        else:
            name, stage = list(stages.items())[-1]
            stages[name] = Stage(name, stage.base, (*stage.instructions, instruction))
    return stages


def instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            yield _instruction(line.strip())


def _instruction(line: str) -> Instruction:
    keyword, _, rest = line.partition(" ")
    if keyword not in KEYWORDS:
        raise DockerfileError(f"{keyword} is not checked by these tests: teach them, or do without")
    flags: dict[str, str] = {}
    while found := re.match(r"--([a-z]+)=(\S+)\s+", rest):
        if found[1] not in FLAGS.get(keyword, ()):
            raise DockerfileError(f"{keyword} --{found[1]} is not checked by these tests")
        flags[found[1]] = found[2]
        rest = rest[found.end() :]
    return Instruction(keyword, flags, re.sub(r"\s+", " ", rest) if keyword != "RUN" else rest)


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}`; an unknown one is an error here, where a builder would put nothing."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in values:
            raise DockerfileError(f"${name} has no value in {text!r}")
        return values[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def assignments(value: str) -> dict[str, str]:
    """`A=1 B="two words"` of ENV and LABEL."""
    return dict(word.split("=", 1) for word in shlex.split(value))
