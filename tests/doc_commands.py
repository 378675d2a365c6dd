"""Commands in the fenced blocks of the documents.

A block of language sh, bash or console is executed by tests/integration/test_doc_commands.py, unless a comment on the
line before it says otherwise:

    <!-- illustration: needs a cluster -->       nobody executes it, for this reason
    <!-- executed: tests/e2e/test_demo.py -->    that test executes it
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "docker" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "rules" / "runbooks").glob("*.md")),
]
# Pages that are read while an alert fires: their commands name its job, rank or GPU.
_FOLDER_MARKS = {ROOT / "rules" / "runbooks": "illustration: needs a firing alert"}
_BLOCK = re.compile(
    r"^(?: *<!-- (?P<mark>[^\n]*) -->\n)?"
    r"(?P<indent> *)```(?P<language>sh|bash|console)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_OPERATORS = re.compile(r"[();<>|&]+")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str  # empty: to be executed

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @cached_property
    def script(self) -> str:
        """Without the prompts and the output of a console."""
        lines = self.text.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return "\n".join(lines)

    @property
    def output(self) -> list[str]:
        """What a console shows, line by line; … stands for what is left out."""
        lines = self.text.splitlines()
        is_console = any(line.startswith("$ ") for line in lines)
        return [line for line in lines if is_console and not line.startswith("$ ") and line.strip() not in ("", "…")]

    def commands(self) -> Iterator[list[str]]:
        """Words of each simple command, without variables, redirections and comments."""
        for line in self.script.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            is_target = False
            for token in [*lexer, ";"]:
                if _OPERATORS.fullmatch(token):
                    is_target = token in (">", ">>", "<")
                    if not is_target:
                        if words:
                            yield words
                        words = []
                elif is_target:
                    is_target = False
                elif words or not _ASSIGNMENT.match(token):
                    words.append(token)


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text[: match.start("language")].count("\n") + 1
            inner = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            mark = match["mark"] or _FOLDER_MARKS.get(page.parent, "")
            found.append(Block(page, line, match["language"], inner, mark))
    return found
