from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.cli.main import main

ELSEWHERE = ("--daemon", "node-1")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "name the daemons: --daemon, --daemons-file, --daemons-dns or --daemons-slurm"),
        (("--daemon", "node 1"), "'node 1' is not HOST:PORT"),
        (("--daemons-dns", "name:x"), "is not HOST:PORT"),
        (("--daemons-slurm", "--daemon-port", "0"), "--daemon-port 0: 1 to 65535"),
        ((*ELSEWHERE, "--tls-key", "k"), "--tls-certificate, --tls-key and --tls-authority belong together"),
        ((*ELSEWHERE, "--api-listen", "0.0.0.0:0"), "callers are known by their certificates"),
        ((*ELSEWHERE, "--console-listen", "0.0.0.0:0"), "callers are known by their certificates"),
        ((*ELSEWHERE, "--prometheus-url", "http://prometheus:9090"), "--prometheus-url needs --console-listen"),
        ((*ELSEWHERE, "--api-listen", "nowhere"), "--api-listen 'nowhere' is not HOST:PORT"),
        ((*ELSEWHERE, "--metrics-tls"), "--metrics-tls needs --tls-certificate"),
        ((*ELSEWHERE, "--alerts-token", "t", "--alerts-listen", "0.0.0.0:0"), "the token would be read on its way"),
        ((*ELSEWHERE, "--alerts-token", "/nothing/token"), "/nothing/token"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert main(["correlator", "--state-dir", str(tmp_path / "state"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert reason in error
    assert not (tmp_path / "state").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["correlator", *ELSEWHERE, "--state-dir", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
