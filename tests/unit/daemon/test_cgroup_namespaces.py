from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from rankscope.daemon.cgroups import OwnGroup

POD = "kubepods/burstable/pod7/app"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The host's tree, with our own container's group in it."""
    for name in ("kubepods/burstable/pod1/daemon", POD, "kubepods/pod9/app", "init.scope"):
        (tmp_path / "host" / name).mkdir(parents=True)
    return tmp_path / "host"


@pytest.fixture
def group(host: Path) -> OwnGroup:
    # A link stands for the runtime's mount: the same folder by another name.
    own = host.parent / "own"
    own.symlink_to(host / "kubepods/burstable/pod1/daemon")
    return OwnGroup(host, own)


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ("/../../pod7/app", POD),
        ("/../../../pod9/app", "kubepods/pod9/app"),
        ("/../../../../init.scope", "init.scope"),
        ("/../../../..", ""),
    ],
)
def test_a_path_relative_to_our_group_resolves_on_the_host(group: OwnGroup, host: Path, told: str, meant: str) -> None:
    assert group.folder(host, PurePosixPath(told)) == host / meant


@pytest.mark.parametrize("told", ["/../../../../../etc", "/../../pod7/../../../..", "/../../gone"])
def test_nothing_outside_of_the_tree_is_looked_at(group: OwnGroup, host: Path, told: str) -> None:
    assert group.folder(host, PurePosixPath(told)) is None


def test_without_the_hosts_tree_nothing_is_guessed(host: Path) -> None:
    assert OwnGroup(host, host).folder(host, PurePosixPath("/../../pod7/app")) is None
    assert OwnGroup(host, host.parent / "nowhere").folder(host, PurePosixPath("/../../pod7/app")) is None
