"""`rankscope stacks`: where every rank of a run stands now, identical stacks together, the odd ones first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Final

from rankscope.analysis.profiles.stack_groups import StackGroup, frame_text, group_stacks
from rankscope.cli import options
from rankscope.cli.connection import connected
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import Exit, refuse, to_stdout
from rankscope.cli.profile_client import ProfileClient
from rankscope.common.text import printable
from rankscope.v1.profile_service_pb2 import RankStack

FRAMES_SHOWN: Final = 12
_EPILOG = """\
examples:
  rankscope stacks                                        the one run on this machine
  rankscope stacks --run team/llama --context prod        a run of a cluster
  rankscope stacks --ranks 0-7 --json | jq '.groups[0]'

Ranks with identical stacks are one group; the group with the fewest ranks comes first: in a hang, that is who the
others wait for. Frames are innermost first. The processes are not stopped.
Exit code: 0 if a stack was read, 1 if none was; 2 usage, 4 no server, 5 refused, 6 no such run (docs/cli.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_options(parser, "--run", "--ranks", "--json")
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    ranks = options.selected_ranks(arguments)
    with connected(arguments) as (_, channel):
        client = ProfileClient(channel)
        named = client.run_named(arguments.run)
        stacks = client.stacks(named, ranks)
        if not stacks:
            client.check_seen(named)
    if not stacks:
        text = f"no such rank of run {named!r} runs now; `rankscope top` shows those that do"
        return refuse(text, Exit.NOT_FOUND)
    groups = group_stacks({one.rank: one.frames for one in stacks if one.frames})
    to_stdout(json.dumps(_object(named, groups, stacks)) if arguments.json else stacks_text(groups, stacks))
    return Exit.OK if groups else Exit.FAILED


def stacks_text(groups: Sequence[StackGroup], stacks: Sequence[RankStack]) -> str:
    lines = []
    for group in groups:
        lines.append(f"{group} [{group.phase}]")
        lines += [f"    {frame}" for frame in group.stack[:FRAMES_SHOWN]]
        if len(group.stack) > FRAMES_SHOWN:
            lines.append(f"    … {len(group.stack) - FRAMES_SHOWN} more; --json has all")
    for one in stacks:
        if not one.frames:
            why = one.problem or "the server gives no reason"
            lines.append(printable(f"rank {one.rank} on {one.node}: no stack: {why}"))
    return "\n".join(lines)


def _object(named: str, groups: Sequence[StackGroup], stacks: Sequence[RankStack]) -> dict[str, object]:
    return {
        "run": named,
        "groups": [
            {"ranks": group.ranks, "phase": group.phase, "stack": [frame_text(frame) for frame in group.stack]}
            for group in groups
        ],
        "nodes": {str(one.rank): one.node for one in stacks},
        "problems": {str(one.rank): one.problem for one in stacks if not one.frames},
    }
