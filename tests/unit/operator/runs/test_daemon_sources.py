from __future__ import annotations

import json
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rankscope.operator.runs import daemon_sources
from rankscope.operator.runs.daemon_sources import (
    DaemonList,
    DnsDaemons,
    FileDaemons,
    GivenDaemons,
    SlurmDaemons,
    SourceError,
    parse_daemon_address,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node-1", "node-1:9465"),
        ("node-1.rack.example:9470", "node-1.rack.example:9470"),
        ("10.0.0.1", "10.0.0.1:9465"),
        ("[fd00::1]:9465", "[fd00::1]:9465"),
        ("n", "n:9465"),
    ],
)
def test_an_address_is_a_host_with_given_or_default_port(text: str, address: str) -> None:
    assert parse_daemon_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9465",
        "node:0",
        "node:65536",
        "node:x",
        "unix:/run/x",
        "-node",
        "a b",
        "node;rm",
        "é",
        "fd00::1",
        "x" * 300,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="is not HOST:PORT"):
        parse_daemon_address(text)


def test_lines_of_a_file_are_addresses_and_may_have_comments(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("# the rack\nnode-1\n\n  node-2:9470  # new\nnode-1\n")
    assert FileDaemons(file).addresses() == {"node-1:9465", "node-2:9470"}


@pytest.mark.parametrize("name", ["targets.json", "targets.yml", "targets.yaml"])
def test_targets_of_file_sd_are_read_from_json_and_yaml(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    # JSON is YAML.
    file.write_text(json.dumps([{"targets": ["node-1:9465", "node-2"], "labels": {"rack": "a"}}, {"targets": []}]))
    assert FileDaemons(file).addresses() == {"node-1:9465", "node-2:9465"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nodes", b"node-1\nnode 2\n"),
        ("nodes", b"\xff\xfe\n"),
        ("nodes", b"\x00" * 100),
        ("nodes.json", b'[{"targets": ["node-1"'),
        ("nodes.json", b'{"targets": ["node-1"]}'),
        ("nodes.json", b'[{"targets": "node-1"}]'),
        ("nodes.json", b'[{"targets": [1]}]'),
        ("nodes.json", b'["node-1"]'),
        ("nodes.json", b"[" * 100_000),
        ("nodes.yaml", b"- targets: [node-1\n"),
        ("nodes.yaml", b"a: &a [x, x]\nb: &b [*a, *a]\n"),
        ("nodes.yaml", b"!!python/object/apply:os.system ['true']"),
        ("nodes.yaml", b"- targets:\n  - !!binary aGk=\n"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SourceError, match=f"--daemons-file {file}: "):
        FileDaemons(file).addresses()


def test_a_file_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nodes"
    monkeypatch.setattr(daemon_sources, "FILE_BYTES", 1000)
    file.write_text("node-1\n" * 1000)
    with pytest.raises(SourceError, match="larger than"):
        FileDaemons(file).addresses()
    monkeypatch.setattr(daemon_sources, "MAX_DAEMONS", 3)
    file.write_text("\n".join(f"node-{number}" for number in range(4)))
    with pytest.raises(SourceError, match="more than 3 daemons"):
        FileDaemons(file).addresses()


def test_a_changed_file_is_followed_and_a_broken_one_ignored(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    listed = DaemonList([GivenDaemons(["node-0"]), FileDaemons(file)])
    listed.read(0)
    listed.read(1)
    assert not listed.is_complete
    assert listed.addresses == {"node-0:9465"}
    assert "No such file" in listed.problems[0]
    file.write_text("node-1\n")
    listed.read(1)
    assert listed.is_complete
    assert listed.addresses == {"node-0:9465", "node-1:9465"}
    assert listed.problems == ()
    for broken in ("node-1\nnode 2\n", None):
        file.unlink()
        if broken is not None:
            file.write_text(broken)
        listed.read(1)
        assert listed.addresses == {"node-0:9465", "node-1:9465"}
        assert len(listed.problems) == 1
        file.touch()
    listed.read(1)  # an empty file is a list, of nobody
    assert listed.addresses == {"node-0:9465"}


def test_a_problem_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = DaemonList([FileDaemons(tmp_path / "nodes")])
    for _ in range(3):
        listed.read(0)
    told = [record for record in caplog.records if record.name == daemon_sources.__name__]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "the last list stays in use" in caplog.text


def test_a_names_addresses_are_all_daemons_and_changes_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [["10.0.0.1", "10.0.0.2"], socket.gaierror(-3, "Temporary failure"), ["10.0.0.2", "fd00::3"]]

    def resolve(host: str, port: int, **kind: int) -> Sequence[Any]:
        assert (host, kind) == ("daemons.example", {"type": socket.SOCK_STREAM})
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(0, 0, 0, "", (each, port)) for each in answer]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listed = DaemonList([DnsDaemons("daemons.example:9470")])
    seen = []
    for _ in range(3):
        listed.read(0)
        seen.append(listed.addresses)
    assert seen == [
        {"10.0.0.1:9470", "10.0.0.2:9470"},
        {"10.0.0.1:9470", "10.0.0.2:9470"},
        {"10.0.0.2:9470", "[fd00::3]:9470"},
    ]


def test_a_real_name_is_resolved() -> None:
    assert DnsDaemons("localhost:9465").addresses() & {"127.0.0.1:9465", "[::1]:9465"}


def program(folder: Path, script: str) -> tuple[str, ...]:
    path = folder / "sinfo"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return (str(path), "--noheader", "--Node", "--format=%o")


def test_slurm_nodes_are_daemons_once_each(tmp_path: Path) -> None:
    # A node is listed once for every partition that it is in.
    command = program(tmp_path, 'test "$*" = "--noheader --Node --format=%o" && printf "n1\\nn2\\nn1\\n"')
    assert SlurmDaemons(9470, command).addresses() == {"n1:9470", "n2:9470"}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo slurm_load_partitions: Unable to contact slurm controller >&2; exit 1", "Unable to contact slurm"),
        ("sleep 60", "did not answer in"),
        ("echo 'n[1-4];reboot'", "no host name"),
    ],
)
def test_slurm_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    if script.startswith("sleep"):
        monkeypatch.setattr(daemon_sources, "SLURM_SECONDS", 1.0)
    with pytest.raises(SourceError, match=reason):
        SlurmDaemons(command=program(tmp_path, script)).addresses()


def test_slurm_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot run .*sinfo: No such file"):
        SlurmDaemons(command=(str(tmp_path / "sinfo"),)).addresses()
