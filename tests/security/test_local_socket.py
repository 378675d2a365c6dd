"""The Unix socket: for its owner alone, and never in the place of something that somebody else put there."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

import grpc
import pytest

from rankscope.daemon.server.sockets import ListenError, SocketLock
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.security.attacked import PATIENCE_SECONDS, Attacked

NOBODY = 65534


def test_only_the_owner_can_open_the_socket_and_its_folder(attacked: Attacked) -> None:
    held, folder = attacked.socket.stat(), attacked.socket.parent.stat()
    assert stat.S_ISSOCK(held.st_mode)
    assert (stat.S_IMODE(held.st_mode), held.st_uid) == (0o600, os.geteuid())
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.geteuid())
    with grpc.insecure_channel(f"unix:{attacked.socket}") as channel:
        assert RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=PATIENCE_SECONDS).ranks
    # In a folder that everybody may enter: what stops them now is the socket's own mode.
    with tempfile.TemporaryDirectory() as public:
        Path(public).chmod(0o755)
        os.link(attacked.socket, Path(public) / "d.sock")
        assert connecting_as(os.geteuid(), f"{public}/d.sock") == 0
        assert connecting_as(NOBODY, f"{public}/d.sock") == errno.EACCES
        assert connecting_as(NOBODY, str(attacked.socket)) == errno.EACCES


def connecting_as(user: int, path: str) -> int:
    """The error that this user gets."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os._exit(socket.socket(socket.AF_UNIX).connect_ex(path))
        finally:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_files_links_and_folders_in_its_place_are_refused_unchanged(attacked: Attacked, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    theirs = socket.socket(socket.AF_UNIX)
    theirs.bind(str(tmp_path / "theirs.sock"))
    (tmp_path / "to-file").symlink_to(precious)
    (tmp_path / "to-nothing").symlink_to(tmp_path / "nothing")
    (tmp_path / "to-socket").symlink_to(tmp_path / "theirs.sock")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("precious", "to-file", "to-nothing", "to-socket", "folder", "fifo"):
        with pytest.raises(ListenError, match="is not a socket; remove it or pass another --socket"):
            SocketLock(tmp_path / name)
        assert os.path.lexists(tmp_path / name)
    assert precious.read_text() == "keep me"
    assert (tmp_path / "theirs.sock").is_socket()
    theirs.close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, attacked: Attacked) -> None:
    target = tmp_path / "target"
    target.write_text("keep me")
    (tmp_path / "d.sock.lock").symlink_to(target)
    with pytest.raises(ListenError, match="cannot be opened"):
        SocketLock(tmp_path / "d.sock")
    assert target.read_text() == "keep me"
