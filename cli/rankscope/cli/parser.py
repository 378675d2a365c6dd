"""The parser of every command: a short usage line, and help where a command is still to be named."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """A paragraph is filled; examples keep their lines."""
        kind = argparse.RawDescriptionHelpFormatter if "\n" in text else argparse.HelpFormatter
        return kind._fill_text(self, text, width, indent)

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None
    ) -> str:
        """Options that may be left out are listed below, not here."""
        if usage is None:
            needed = {id(action) for group in groups if group.required for action in group._group_actions}
            shown = [each for each in actions if not each.option_strings or each.required or id(each) in needed]
            plain = super()._format_usage(None, shown, groups, "").strip()
            usage = plain.replace("%", "%%").replace(self._prog, "%(prog)s [options]", 1)
        return super()._format_usage(usage, actions, groups, prefix)


class Parser(argparse.ArgumentParser):
    """`bare` in what it has parsed is the parser whose command is still to be named; None if there is none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})
        self.set_defaults(bare=None)

    def add_subparsers(self, **options: Any) -> Any:
        self.set_defaults(bare=self)
        return super().add_subparsers(prog=self.prog, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Flushed, so that `rankscope | head` ends like every other command."""
        if message:
            print(message, end="", file=file, flush=True)
