from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.cli.foreground import open_audit_log
from rankscope.cli.messages import CommandError
from rankscope.common.audit import LOGGER


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger(LOGGER)
    yield made
    for handler in list(made.handlers):
        made.removeHandler(handler)
        handler.close()
    made.setLevel(logging.NOTSET)


def test_records_are_appended_to_a_file_of_their_owners_alone(tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "audit.log"
    path.write_text("before\n")
    path.chmod(0o600)
    open_audit_log(path)
    logger.info("%s", '{"event": "asked"}')
    assert path.read_text() == 'before\n{"event": "asked"}\n'
    open_audit_log(tmp_path / "new.log")
    assert stat.S_IMODE((tmp_path / "new.log").stat().st_mode) == 0o600


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "audit.log"
    open_audit_log(path)
    logger.info("one")
    path.rename(tmp_path / "audit.log.1")
    logger.info("two")
    assert path.read_text() == "two\n" and (tmp_path / "audit.log.1").read_text() == "one\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_unwritable_place_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing/audit.log", "link", "pipe", ""):
        with pytest.raises(CommandError, match="--audit-log"):
            open_audit_log(tmp_path / name)


def test_a_folder_removed_later_breaks_nothing_and_is_reported_once(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    open_audit_log(folder / "audit.log")
    (folder / "audit.log").unlink()
    folder.rmdir()
    logger.info("one")
    logger.info("two")
    assert capsys.readouterr().err.count("audit records are missing there") == 1
    folder.mkdir()
    logger.info("three")
    assert (folder / "audit.log").read_text() == "three\n"


def test_records_pass_whatever_the_logs_level_is(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        open_audit_log(None)
        logger.info("kept")
    finally:
        root.setLevel(before)
    assert "kept" in caplog.text
