"""`rankscope flame`: where the time of ranks goes, as a table or a file; also compared with others, or with before."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from rankscope.analysis.profiles.comparison import FrameExcess, sentence
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.phases import PHASES
from rankscope.analysis.profiles.profile import Profile
from rankscope.analysis.quantities import count
from rankscope.cli import options
from rankscope.cli.connection import connected
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import CommandError, Exit, refuse, to_stderr, to_stdout
from rankscope.cli.output_file import ENDINGS_IN_WORDS, check_format, write_profile, writing
from rankscope.cli.profile_client import ProfileClient
from rankscope.cli.terminal import Terminal
from rankscope.common.rank_selection import rank_ranges
from rankscope.common.text import printable
from rankscope.v1 import profile_service_pb2 as pb

COHORT: Final = "cohort"
ROWS: Final = 20
FRAME_CHARACTERS: Final = 300
_EPILOG = """\
examples:
  rankscope flame                                         the last ten minutes of the one run on this machine
  rankscope flame --ranks 3 --against cohort              what rank 3 does more than the other ranks
  rankscope flame --against 24h --since 1h                this hour and the same hour yesterday
  rankscope flame --ranks 3 --against cohort -o diff.html the same as a flame graph: red is more, blue is less
  rankscope flame --phase input -o input.pb.gz            for go tool pprof

FILE.html is a flame graph for any browser, .pb.gz is for go tool pprof, .json is for speedscope, .folded for
flamegraph.pl. A comparison needs about two minutes of samples. Profiles of past runs are kept for a week: name them
with --run. Exit code: 0 done, 3 too few samples to compare; 2 usage, 4 no server, 5 refused, 6 no samples
(docs/cli.md).
"""


@dataclass(frozen=True)
class Asked:
    """What is selected, in words and on the wire."""

    run: str
    ranks: tuple[int, ...]  # none: all
    since_text: str
    selection: pb.ProfileSelection
    against: str  # COHORT, a time, or nothing
    reference: pb.ProfileSelection | None  # None: the other ranks

    @property
    def subject(self) -> str:
        if not self.ranks:
            return f"run {self.run}"
        return f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"the group of ranks {rank_ranges(self.ranks)}"

    @property
    def reference_name(self) -> str:
        return "its peers" if self.against == COHORT else f"{self.against} ago"

    @property
    def title(self) -> str:
        ranks = f", rank {rank_ranges(self.ranks)}" if self.ranks else ""
        against = f", against {self.reference_name}" if self.against else ""
        return f"{self.run}{ranks}, the last {self.since_text}{against}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_options(parser, "--run", "--ranks")
    options.add_since_argument(parser, "10m")
    parser.add_argument(
        "--against",
        default="",
        metavar="cohort|TIME",
        help="compare with the other ranks, or with a time ago, as in 24h",
    )
    parser.add_argument("--phase", choices=PHASES, help="of this phase only")
    options.add_output_argument(parser, "FILE", f"write the profile instead, as {ENDINGS_IN_WORDS}")
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    with connected(arguments) as (_, channel):
        client = ProfileClient(channel)
        asked = _asked(arguments, client.run_named(arguments.run))
        if arguments.output is None:
            return _print_comparison(client, asked) if asked.against else _print_top(client, asked)
        with writing("-o"):
            return _write(client, asked, arguments.output)


def _check(arguments: argparse.Namespace) -> None:
    """Before anybody is asked."""
    options.duration_seconds("--since", arguments.since)
    if arguments.against not in ("", COHORT):
        options.duration_seconds("--against", arguments.against, "cohort, or ")
    if not options.selected_ranks(arguments) and arguments.against == COHORT:
        raise CommandError("--against cohort compares some ranks with the others; name them, as in --ranks 3")
    if arguments.output is not None:
        check_format("-o", arguments.output, is_compared=bool(arguments.against))


def _asked(arguments: argparse.Namespace, named: str) -> Asked:
    ranks, against = options.selected_ranks(arguments), arguments.against
    end = time.time_ns()
    start = end - round(options.duration_seconds("--since", arguments.since) * 1e9)
    phases = [] if arguments.phase is None else [arguments.phase]
    selection = pb.ProfileSelection(job=named, ranks=ranks, start_unix_nanos=start, end_unix_nanos=end, phases=phases)
    reference = None
    if against not in ("", COHORT):
        earlier = round(options.duration_seconds("--against", against) * 1e9)
        reference = pb.ProfileSelection(
            job=named, ranks=ranks, start_unix_nanos=start - earlier, end_unix_nanos=end - earlier, phases=phases
        )
        against = against.removesuffix("ago").strip()
    return Asked(named, tuple(ranks), arguments.since.strip(), selection, against, reference)


def _profile(client: ProfileClient, asked: Asked) -> Profile:
    profile = client.profile(asked.selection)
    if not profile.samples_total:
        raise CommandError(
            f"no samples of {asked.title}; is the name right (`rankscope top`), or is a longer --since needed?",
            Exit.NOT_FOUND,
        )
    return profile


def _reference(client: ProfileClient, asked: Asked) -> Profile:
    if asked.reference is not None:
        return client.profile(asked.reference)
    everybody = pb.ProfileSelection()
    everybody.CopyFrom(asked.selection)
    everybody.ClearField("ranks")
    profile = client.profile(everybody)
    return profile.filter(ranks=set(profile.rank.tolist()) - set(asked.ranks))


# Files.


def _write(client: ProfileClient, asked: Asked, path: Path) -> int:
    profile = _profile(client, asked)
    start, end = asked.selection.start_unix_nanos, asked.selection.end_unix_nanos
    write_profile(
        path,
        profile,
        asked.title,
        reference=_reference(client, asked) if asked.against else None,
        start_unix_nanos=start,
        duration_nanos=end - start,
    )
    to_stderr(f"{path}: {count(profile.samples_total, 'sample')} of {asked.title}")
    return Exit.OK


# Tables.


def _print_top(client: ProfileClient, asked: Asked) -> int:
    profile = _profile(client, asked)
    total = profile.samples_total
    to_stdout(f"{asked.title}: {count(total, 'sample')}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("own", "total"):
        table.add_column(heading, justify="right")
    table.add_column("frame", overflow="fold")
    for top in profile.top(ROWS):
        shares = (f"{100 * count / total:.1f} %" for count in (top.leaf_samples, top.samples))
        table.add_row(*shares, Text(_shown(top.frame)))
    Terminal().print(table)
    return Exit.OK


def _print_comparison(client: ProfileClient, asked: Asked) -> int:
    answer = client.compare(asked.selection, asked.reference)
    if not answer.samples:
        _profile(client, asked)  # says what to do
    if answer.reason:
        return refuse(f"{answer.reason}; wait until there are more, or give a longer --since", Exit.UNDECIDED)
    samples = f"{answer.samples} samples against {answer.reference_samples}"
    excesses = [_excess(one) for one in answer.excesses]
    if not excesses:
        to_stdout(f"{asked.subject} has no frame in excess of {asked.reference_name} ({samples})")
        return Exit.OK
    to_stdout(f"{sentence(asked.subject, excesses[0], asked.reference_name)} ({samples})")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("here", asked.reference_name):
        table.add_column(heading, justify="right")
    table.add_column("phase")
    table.add_column("frame in excess", overflow="fold")
    for one in excesses[:ROWS]:
        shares = (f"{100 * share:.1f} %" for share in (one.share, one.reference_share))
        table.add_row(*shares, Text(printable(one.phase, 32)), Text(_shown(one.frame)))
    Terminal().print(table)
    return Exit.OK


def _excess(one: pb.FrameExcess) -> FrameExcess:
    frame = Frame(one.function, one.file, one.line)
    return FrameExcess(frame, one.share_ratio, one.reference_share_ratio, 0.0, one.phase)


def _shown(frame: Frame) -> str:
    return printable(str(frame), FRAME_CHARACTERS)
