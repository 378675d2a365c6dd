"""Builds the stages of a Dockerfile into folders, by its own instructions: what an engine does, on a stand-in base."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.images.dockerfile_reading import DockerfileError, Instruction, Stage, assignments, expand
from tests.images.root_entering import Entry, run_in

SYSTEM_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"


@dataclass(frozen=True)
class Image:
    """What a stage ends as: its root, and how a container of it is started."""

    root: Path
    environment: Mapping[str, str]
    user: str = "0:0"
    folder: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


class Builder:
    """`wheels` is where pip finds packages: a build has no network here, so that a lock must be complete."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        context: Path,
        base: Image,
        folder: Path,
        wheels: Path,
        values: Mapping[str, str],
    ) -> None:
        self._stages, self._context, self._base, self._folder = stages, context, base, folder
        self._wheels, self._values = wheels, values
        self._built: dict[str, Image] = {}

    def image(self, name: str) -> Image:
        if name not in self._built:
            self._built[name] = self._build(self._stages[name])
        return self._built[name]

    def _build(self, stage: Stage) -> Image:
        parent = self.image(stage.base) if stage.base in self._stages else self._base
        root = self._folder / stage.name
        _link(parent.root, root)
        environment, labels = dict(parent.environment), dict(parent.labels)
        user, folder, entrypoint, command = parent.user, parent.folder, parent.entrypoint, parent.command
        arguments: dict[str, str] = {}
        for instruction in stage.instructions:
            known = arguments | environment
            if instruction.keyword == "ARG":
                arguments[instruction.value] = self._values[instruction.value]
            elif instruction.keyword == "ENV":
                environment |= assignments(expand(instruction.value, known))
            elif instruction.keyword == "LABEL":
                labels |= assignments(expand(instruction.value, known))
            elif instruction.keyword == "WORKDIR":
                folder = expand(instruction.value, known)
                (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif instruction.keyword == "USER":
                user = expand(instruction.value, known)
            elif instruction.keyword == "ENTRYPOINT":
                entrypoint, command = tuple(instruction.words), ()
            elif instruction.keyword == "CMD":
                command = tuple(instruction.words)
            elif instruction.keyword == "COPY":
                self._copy(instruction, root, folder)
            elif instruction.keyword == "RUN":
                self._run(instruction.value, root, user, folder, known)
        return Image(root, environment, user, folder, entrypoint, command, labels)

    def _copy(self, instruction: Instruction, root: Path, folder: str) -> None:
        origin = self._context
        if "from" in instruction.flags:
            origin = self.image(instruction.flags["from"]).root
        *sources, target = instruction.words
        place = root / str(Path(folder, target)).lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            if not path.exists():
                raise DockerfileError(f"COPY {instruction.value}: there is no {source}, or .dockerignore leaves it out")
            goal = place / path.name if target.endswith("/") else place
            goal.parent.mkdir(parents=True, exist_ok=True)
            _link(path, goal)

    def _run(self, command: str, root: Path, user: str, folder: str, environment: Mapping[str, str]) -> None:
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/mnt/wheels", "HOME": "/root"}
        entry = Entry(
            user, {**environment, **offline}, folder, writable=("/root",), shown={self._wheels: "/mnt/wheels"}
        )
        done = run_in(root, ["sh", "-c", command], entry)
        if done.returncode != 0:
            raise DockerfileError(
                f"RUN {shlex.quote(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )


def _link(source: Path, target: Path) -> None:
    """Links, not copies: instructions add files or replace them, none writes into one that is there."""
    subprocess.run(["cp", "-alT", str(source), str(target)], check=True)
