from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.cli.main import main

HERE = ("--daemon", "127.0.0.1:9465")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "name the daemons: --daemon, --daemons-file, --daemons-dns or --daemons-slurm"),
        (("--daemon", "node 1:9465"), "'node 1:9465' is not HOST:PORT"),
        (("--daemon", "banana"), "--daemon 'banana' is not HOST:PORT"),
        (("--daemon", "node-1:946²"), "'node-1:946²' is not HOST:PORT"),
        (("--daemon", "node-1:70000"), "'node-1:70000' is not HOST:PORT"),
        (("--daemon", "node-1:9465"), "--daemon node-1:9465: the daemon of another machine wants a certificate"),
        (("--daemons-dns", "name:x"), "is not HOST:PORT"),
        (("--daemons-slurm", "--daemon-port", "0"), "--daemon-port 0: 1 to 65535"),
        ((*HERE, "--tls-key", "k"), "--tls-certificate, --tls-key and --tls-authority belong together"),
        ((*HERE, "--api-listen", "0.0.0.0:0"), "callers are known by their certificates"),
        ((*HERE, "--console-listen", "0.0.0.0:0"), "callers are known by their certificates"),
        ((*HERE, "--prometheus-url", "http://prometheus:9090"), "--prometheus-url needs --console-listen"),
        ((*HERE, "--api-listen", "nowhere"), "--api-listen 'nowhere' is not HOST:PORT"),
        ((*HERE, "--metrics-tls"), "--metrics-tls needs --tls-certificate"),
        ((*HERE, "--alerts-token", "t", "--alerts-listen", "0.0.0.0:0"), "the token would be read on its way"),
        ((*HERE, "--alerts-token", "/nothing/token"), "/nothing/token"),
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
    assert main(["correlator", *HERE, "--state-dir", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
