"""The console for tables and styled text. Strings are never markup, and what is printed cannot control the terminal:
this module is the only one that may create a rich console."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rankscope.common.text import printable

# A pipe or a file has no width; its reader expects whole lines and whole numbers. Nothing printed is as wide as this.
UNLIMITED_COLUMNS = 10_000


def make_table(columns: Iterable[str], left: Collection[str] = (), **options: Any) -> Table:
    """Without lines. Columns are flush right and not wrapped, those in `left` flush left."""
    table = Table(box=None, pad_edge=False, header_style="bold", **options)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


class Terminal(Console):
    """Styles come from `Text`, `Text.assemble` and `style=`, not from brackets in a string."""

    def __init__(
        self,
        *,
        stderr: bool = False,
        soft_wrap: bool = False,
        width: int | None = None,
        file: IO[str] | None = None,
        **options: Any,
    ) -> None:
        kwargs = {"stderr": stderr, "soft_wrap": soft_wrap, "width": width, "file": file, **options}
        super().__init__(markup=False, emoji=False, highlight=False, **kwargs)
        # Not `is_terminal`: FORCE_COLOR makes that true for a pipe.
        self._is_limited = width is not None or self.file.isatty()
        if not self._is_limited:
            self.width = UNLIMITED_COLUMNS

    @property
    def columns(self) -> int | None:
        """What fits on a line; None without a terminal, where everything fits."""
        return self.width if self._is_limited else None

    def print_rows(self, rows: Sequence[Sequence[str]], left: Collection[str], most: int) -> None:
        """A table of the first rows, and how many more there are. `rows[0]` has the headings."""
        table = make_table(rows[0], left)
        for row in rows[1 : most + 1]:
            table.add_row(*map(Text, row))
        self.print(table)
        if len(rows) > most + 1:
            self.print(Text(f"… and {len(rows) - most - 1} more (--json has all)", style="dim"))
        self.print()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(printable(line) for line in text.split("\n")), segment.style)
