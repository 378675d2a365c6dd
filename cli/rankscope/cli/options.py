"""Options that several commands have. Each has one meaning, one form and one text, and is defined here only."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Final

from rankscope.cli.messages import CommandError
from rankscope.common.rank_selection import ALL, STRAGGLER, STRAGGLER_AND_PEER, SUSPECTS, ChoiceError, numbered_ranks

_DURATION: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([smhd])(?:\s+ago)?")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 and up to 1, as in 0.4")
    return share


_RANKS: Final = "these ranks only, as in 0-7,12 (default: all)"
# By what a user may write: the first word is the option.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "--json": {"action": "store_true", "help": "print one JSON object and nothing else on stdout"},
    "--html": {"type": Path, "metavar": "FILE", "help": "write the result as a page, too; it loads nothing"},
    "--run": {"default": "", "metavar": "RUN", "help": "this run (default: the only one)"},
    "--run NAMESPACE/": {
        "default": "",
        "metavar": "RUN",
        "help": "this run only; NAMESPACE/: those of a namespace (default: all)",
    },
    "--ranks": {"default": ALL, "metavar": "RANKS", "help": _RANKS},
    "--mfu-target": {"type": _share, "metavar": "RATIO", "help": "raise low_mfu below this, for example 0.4"},
    # Sizes are what a daemon says. A capture of 64 ranks has a few gigabytes.
    "--max-bytes": {
        "type": int,
        "default": 64 << 30,
        "metavar": "BYTES",
        "help": "download nothing if the recordings are larger than this together (default: 64 GiB)",
    },
    "--ranks straggler": {
        "default": ALL,
        "metavar": "RANKS",
        "help": f"{_RANKS}; or {STRAGGLER}, the slow rank; or {STRAGGLER_AND_PEER}, it and a healthy one beside it",
    },
}


def add_options(parser: argparse._ActionsContainer, *names: str) -> None:
    for name in names:
        parser.add_argument(name.split()[0], **_OPTIONS[name])


def add_output_argument(parser: argparse.ArgumentParser, form: str, text: str, *, required: bool = False) -> None:
    """`form` is FILE or DIR."""
    parser.add_argument("-o", "--output", type=Path, metavar=form, required=required, help=text)


def selected_ranks(arguments: argparse.Namespace, *, suspects: bool = False) -> list[int]:
    """An empty list means all, or with `suspects` those that the server finds slow. Raises CommandError."""
    if suspects and arguments.ranks.strip() in SUSPECTS:
        return []
    try:
        return numbered_ranks(arguments.ranks, words=SUSPECTS if suspects else ())
    except ChoiceError as error:
        raise CommandError(f"--{error}") from error  # which begins with: ranks


def add_since_argument(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"how far back: a number and s, m, h or d (default: {default})"
    parser.add_argument("--since", default=default, metavar="TIME", help=text)


def duration_seconds(flag: str, text: str, also: str = "") -> float:
    """Raises CommandError, with `also` as what else the option takes."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise CommandError(f"{flag} {text[:40]!r}: say {also}a number and s, m, h or d, as in 10m")
    return seconds
