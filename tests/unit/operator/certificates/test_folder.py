from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from rankscope.cli.main import main
from rankscope.operator.certificates.authority import is_for, is_pair, is_signed_by, names_of
from rankscope.operator.certificates.folder import CertificateFolderError, FleetRole, init, issue
from rankscope.operator.certificates.roles import Use


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return init(tmp_path / "pki").folder


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_keys_are_for_their_owner_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        folder = init(tmp_path / "pki").folder
        made = issue(folder, FleetRole.DAEMON, "node-1").folder
    assert [mode(folder / "ca.key"), mode(made / "tls.key")] == [0o600, 0o600]
    assert [mode(folder / "ca.crt"), mode(made / "tls.crt"), mode(made / "ca.crt")] == [0o644] * 3
    assert [mode(folder), mode(made)] == [0o700, 0o700]


@pytest.mark.parametrize(
    ("role", "name", "addresses", "names", "use"),
    [
        (FleetRole.DAEMON, "Node-1", ["10.0.0.1"], {"rankscope-daemon", "node-1", "10.0.0.1"}, Use.SERVER),
        (FleetRole.CORRELATOR, "head", ["fd00::1"], {"rankscope-operator", "head", "fd00::1"}, Use.BOTH),
        (FleetRole.CLIENT, "alice@example.com", [], {"rankscope-client"}, Use.CLIENT),
        (FleetRole.METRICS, "prometheus", [], {"rankscope-metrics"}, Use.CLIENT),
    ],
)
def test_a_certificate_has_its_roles_names_and_use(
    folder: Path, role: FleetRole, name: str, addresses: list[str], names: set[str], use: Use
) -> None:
    made = issue(folder, role, name, addresses).folder
    certificate = (made / "tls.crt").read_bytes()
    assert names_of(certificate) == names
    assert is_for(certificate, use)
    assert is_pair(certificate, (made / "tls.key").read_bytes())
    assert is_signed_by(certificate, (made / "ca.crt").read_bytes())
    subject = x509.load_pem_x509_certificate(certificate).subject
    assert subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == name


@pytest.mark.parametrize("role", list(FleetRole))
@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", "x" * 300, "a\0b", "é"])
def test_a_name_that_is_no_name_is_refused(folder: Path, role: FleetRole, name: str) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(CertificateFolderError):
        issue(folder, role, name)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["rankscope-daemon", "rankscope-operator", "RANKSCOPE-CLIENT", "rankscope-metrics"])
def test_a_machine_cannot_have_the_name_of_a_role(folder: Path, name: str) -> None:
    for role in (FleetRole.DAEMON, FleetRole.CORRELATOR):
        with pytest.raises(CertificateFolderError):
            issue(folder, role, name)
        with pytest.raises(CertificateFolderError):
            issue(folder, role, "node-1", [name])


def test_nothing_is_overwritten(folder: Path) -> None:
    made = issue(folder, FleetRole.DAEMON, "node-1").folder
    kept = {path: path.read_bytes() for path in (folder / "ca.crt", folder / "ca.key", made / "tls.key")}
    with pytest.raises(CertificateFolderError, match="exists"):
        init(folder)
    with pytest.raises(CertificateFolderError, match="exists"):
        issue(folder, FleetRole.DAEMON, "node-1")
    assert {path: path.read_bytes() for path in kept} == kept


def test_an_authority_that_cannot_sign_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CertificateFolderError, match="rankscope certificates init"):
        issue(tmp_path / "nothing", FleetRole.CLIENT, "alice")
    with pytest.raises(CertificateFolderError, match="expired"):
        issue(folder, FleetRole.CLIENT, "alice", now=datetime.now(timezone.utc) + timedelta(days=4000))
    other = init(tmp_path / "other").folder
    (folder / "ca.key").write_bytes((other / "ca.key").read_bytes())
    with pytest.raises(CertificateFolderError, match="do not belong together"):
        issue(folder, FleetRole.CLIENT, "alice")
    (folder / "ca.key").write_bytes(b"nonsense")
    with pytest.raises(CertificateFolderError):
        issue(folder, FleetRole.CLIENT, "alice")


def test_the_command_tells_what_to_copy_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pki = str(tmp_path / "pki")
    assert main(["certificates", "init", pki]) == 0
    assert main(["certificates", "issue", pki, "--role", "daemon", "node-1", "--address", "10.0.0.1"]) == 0
    told = capsys.readouterr().out
    assert f"{pki}/daemon-node-1: valid until 20" in told
    assert "for rankscope-daemon, node-1, 10.0.0.1" in told
    assert "copy the folder to /etc/rankscope/tls on node-1" in told
    assert main(["certificates", "issue", pki, "--role", "daemon", "node-1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
