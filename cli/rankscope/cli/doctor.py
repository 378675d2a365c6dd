"""`rankscope doctor`: what does not work on this machine, why, and the next step."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rankscope.cli.daemon import add_setting_arguments, read_settings
from rankscope.cli.messages import to_stderr, to_stdout
from rankscope.daemon.config import ConfigError

NAME = "doctor"
HELP = "report what does not work on this machine, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status 1 if there is a problem, 0 if there are warnings at most."
    parser.add_argument("--json", action="store_true", help="one JSON object for programs")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration file")
    add_setting_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        config = read_settings(arguments).config
    except ConfigError as error:
        to_stderr(f"error: {error}")
        return 2
    from rankscope.daemon.doctor.checks import Level
    from rankscope.daemon.doctor.doctor import examine

    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not arguments.json:
            to_stdout(f"{finding.level.value:<8} {finding.check}: {finding.text}")
            if finding.next_step:
                to_stdout(f"{'':<8} → {finding.next_step}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    healthy = counts[Level.PROBLEM] == 0
    if arguments.json:
        rows = [{**vars(finding), "level": finding.level.value} for finding in findings]
        to_stdout(json.dumps({"healthy": healthy, "findings": rows}))
    else:
        to_stdout(f"\n{counts[Level.PROBLEM]} problems, {counts[Level.WARNING]} warnings")
    return 0 if healthy else 1
