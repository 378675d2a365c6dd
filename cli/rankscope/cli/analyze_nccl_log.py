"""`rankscope analyze nccl-log`: which network and transports NCCL uses, from its debug files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rankscope.analysis.collectives.nccl_log import SOCKET, NcclLog
from rankscope.analysis.verdicts.network import NcclFacts
from rankscope.cli.messages import Exit, cannot_read, refuse, to_stderr, to_stdout
from rankscope.cli.options import add_options
from rankscope.common.text import printable

_EPILOG = """\
examples:
  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log torchrun … train.py
  rankscope analyze nccl-log /tmp/nccl.*.log
  rankscope analyze nccl-log /tmp/nccl.*.log --json | jq '.files[].network'

FILE may also be the output of a job that wrote NCCL's lines into it. With NCCL_DEBUG_SUBSYS=INIT,NET,TUNING the log has
algorithms and protocols too. Meanings: docs/network.md.
"""
# The log of a long job with all operations may have any size: what is asked for is at its beginning.
MAX_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="debug files of NCCL, one or more per rank")
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    found: dict[Path, NcclFacts] = {}
    for path in arguments.files:
        try:
            with path.open("rb") as file:
                text = file.read(MAX_BYTES).decode("utf-8", "replace")
        except OSError as error:
            return refuse(f"{path}: {cannot_read(error)}")
        log = NcclLog()
        log.add(text.split("\n"))
        if log.lines:
            found[path] = log.facts
        else:
            to_stderr(f"warning: {path}: no line of NCCL in it; start the job with NCCL_DEBUG=INFO")
    if not found:
        return refuse("no line of NCCL in these files; start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_FILE")
    if arguments.json:
        to_stdout(json.dumps({"files": [{"file": str(path), **asdict(facts)} for path, facts in found.items()]}))
        return Exit.OK
    # Files of ranks that say the same are shown once.
    alike: dict[NcclFacts, list[Path]] = {}
    for path, facts in found.items():
        alike.setdefault(facts, []).append(path)
    for number, (facts, paths) in enumerate(alike.items()):
        more = f" and {len(paths) - 1} more that say the same" if len(paths) > 1 else ""
        to_stdout(("\n" if number else "") + f"{printable(str(paths[0]))}{more}")
        for name, text in _rows(facts):
            to_stdout(f"  {name:<12}{text}")
    return Exit.OK


def _rows(facts: NcclFacts) -> list[tuple[str, str]]:
    network = facts.network + (f" ({', '.join(facts.devices)})" if facts.devices else "")
    if facts.network == SOCKET and facts.no_infiniband:
        network += f"; not InfiniBand: {facts.no_infiniband}"
    shape = f"{facts.ranks} ranks on {facts.nodes} nodes" if facts.ranks is not None else ""
    channels = f"{facts.channels} for collectives" if facts.channels is not None else ""
    rows = [
        ("version", facts.version),
        ("network", network),
        ("transports", ", ".join(facts.transports)),
        ("largest", shape),
        ("channels", channels),
        ("algorithms", ", ".join(facts.algorithms)),
        *(("ring", ring) for ring in facts.rings),
        *(("warning", warning) for warning in facts.warnings),
    ]
    return [(name, text or "not told") for name, text in rows if text or name in ("version", "network", "transports")]
