"""tools/setup_console.sh, with an npm that tells when it runs twice."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "setup_console.sh"
NPM = """#!/bin/sh
mkdir running || exit 1
echo "$@" >>calls
sleep 0.5
mkdir node_modules
rmdir running
"""


def test_two_that_want_it_at_once_fetch_it_once(tmp_path: Path) -> None:
    for folder in ("tools", "console", "bin"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "tools")
    (tmp_path / "console" / "package-lock.json").write_text("{}")
    npm = tmp_path / "bin" / "npm"
    npm.write_text(NPM)
    npm.chmod(0o755)
    environment = {"PATH": f"{npm.parent}:{os.environ['PATH']}"}
    running = [subprocess.Popen([script], env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert len((tmp_path / "console" / "calls").read_text().splitlines()) == 1
