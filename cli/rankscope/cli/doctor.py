"""`rankscope doctor`: what does not work on this machine, why, and the next step."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rankscope.cli.daemon import add_setting_arguments, read_settings
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
        print(f"error: {error}", file=sys.stderr)
        return 2
    from rankscope.daemon.doctor.checks import Level
    from rankscope.daemon.doctor.doctor import examine

    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.level.value:<8} {finding.check}: {finding.text}", flush=True)
            if finding.next_step:
                print(f"{'':<8} → {finding.next_step}", flush=True)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    healthy = counts[Level.PROBLEM] == 0
    if arguments.json:
        rows = [{**vars(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": rows}))
    else:
        print(f"\n{counts[Level.PROBLEM]} problems, {counts[Level.WARNING]} warnings")
    return 0 if healthy else 1
