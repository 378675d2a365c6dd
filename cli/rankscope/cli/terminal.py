"""The console for tables and styled text. Strings are never markup, and what is printed cannot control the terminal:
this module is the only one that may create a rich console."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rankscope.common.text import printable


class Terminal(Console):
    """Styles come from `Text`, `Text.assemble` and `style=`, not from brackets in a string. A pipe has no width; its
    reader expects whole lines, so it gets `pipe_columns`."""

    def __init__(
        self,
        *,
        stderr: bool = False,
        soft_wrap: bool = False,
        pipe_columns: int | None = None,
        file: IO[str] | None = None,
        **options: Any,
    ) -> None:
        kwargs = {"stderr": stderr, "soft_wrap": soft_wrap, "file": file, **options}
        super().__init__(markup=False, emoji=False, highlight=False, **kwargs)
        if pipe_columns is not None and not self.is_terminal:
            self.width = pipe_columns

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(printable(line) for line in text.split("\n")), segment.style)
