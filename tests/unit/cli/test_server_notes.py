"""Commands find the servers of their user on this machine, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli import connection, server_notes
from rankscope.cli.connection import target_of
from rankscope.cli.contexts import EndpointError
from rankscope.cli.server_notes import announced, notes_folder, running_servers

TARGET = "unix:/tmp/rankscope-run-x/daemon.sock"
OTHER = "127.0.0.1:4711"


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    socket = tmp_path / "runtime" / "daemon.sock"
    for module in (server_notes, connection):
        monkeypatch.setattr(module, "default_socket", lambda: str(socket))
    return socket.parent


def test_one_server_is_found_while_it_runs(runtime_folder: Path) -> None:
    default = f"unix:{runtime_folder}/daemon.sock"
    assert target_of(None) == default
    with announced([TARGET], "torchrun train.py"):
        assert target_of(None) == TARGET
        assert target_of(OTHER) == OTHER
    assert target_of(None) == default
    assert list(notes_folder().iterdir()) == []


def test_several_servers_are_listed_with_their_commands() -> None:
    with (
        announced([TARGET], "torchrun train.py"),
        announced([OTHER], "python a.py\x1b[2J"),
        pytest.raises(EndpointError) as refusal,
    ):
        target_of(None)
    text = str(refusal.value)
    assert text.startswith("2 servers of yours run on this machine; name one of them: --connect ")
    assert f"--connect {TARGET} (torchrun train.py)" in text
    assert f"--connect {OTHER} (python a.py" in text and "\x1b" not in text


def test_a_note_of_a_killed_process_is_ignored_and_removed(runtime_folder: Path) -> None:
    leave = (
        "import os, sys\n"
        "from rankscope.cli import server_notes\n"
        "server_notes.default_socket = lambda: sys.argv[1]\n"
        "with server_notes.announced(sys.argv[2:], 'killed'):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", leave, str(runtime_folder / "daemon.sock"), TARGET], check=False)
    assert len(list(notes_folder().iterdir())) == 1
    assert running_servers() == []
    assert list(notes_folder().iterdir()) == []


def test_the_daemon_at_the_usual_socket_comes_first(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_is_served", lambda path: path == f"{runtime_folder}/daemon.sock")
    with announced([TARGET], "one"), announced([OTHER], "two"):
        assert target_of(None) == f"unix:{runtime_folder}/daemon.sock"


def test_a_folder_that_others_may_write_to_is_not_trusted(runtime_folder: Path) -> None:
    with announced([TARGET], "mine"):
        notes_folder().chmod(0o777)
        with pytest.raises(EndpointError, match="is not trusted"):
            target_of(None)
    with announced([TARGET], "not noted"):  # the server runs all the same
        assert list(notes_folder().iterdir()) == []


def test_a_folder_of_another_user_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with announced([TARGET], "mine"):
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(EndpointError, match="is not trusted"):
            target_of(None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"{}",
        json.dumps({"target": "evil.example:443", "command": "x"}).encode(),
        json.dumps({"target": "unix:relative", "command": "x"}).encode(),
        json.dumps({"target": ["unix:/x"], "command": 7}).encode(),
    ],
)
def test_a_note_that_leads_elsewhere_is_ignored(content: bytes) -> None:
    with announced([TARGET], "mine"):
        (note,) = notes_folder().iterdir()
        # The same file, so that its lock is kept.
        with note.open("wb") as file:
            file.write(content)
        assert running_servers() == []


def test_links_and_fifos_in_the_folder_are_ignored(tmp_path: Path) -> None:
    with announced([TARGET], "mine"):
        (notes_folder() / "0-link.json").symlink_to(tmp_path / "elsewhere.json")
        os.mkfifo(notes_folder() / "0-fifo.json")
        assert [note.target for note in running_servers()] == [TARGET]


def test_a_note_that_cannot_be_left_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_notes, "default_socket", lambda: "/proc/nowhere/daemon.sock")
    with announced([TARGET], "mine"):
        pass
