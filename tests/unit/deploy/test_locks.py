"""The images' locks agree with pyproject.toml and constraints.txt, hold only hashes, and serve both platforms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock_images

ROOT = Path(__file__).resolve().parents[3]
TEXTS = {lock.name: lock.path.read_text() for lock in lock_images.LOCKS}
PROJECT = lock_images.read_toml((ROOT / "pyproject.toml").read_text())
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0"}


def both(minor: int) -> set[tuple[int, str]]:
    return {(minor, machine) for machine in lock_images.MACHINES}


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", text, re.MULTILINE))


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    wanted = [Requirement(line) for line in lines]
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in wanted
        if each.marker is None or each.marker.evaluate(IMAGE)
    }


@pytest.mark.parametrize("lock", lock_images.LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_the_required_packages_in_tested_versions(lock: lock_images.Lock) -> None:
    locked, tested = pins(TEXTS[lock.name]), constraints()
    asked = [] if lock.extras else list(PROJECT["build-system"]["requires"])
    asked += [each for extra in lock.extras for each in PROJECT["project"]["optional-dependencies"][extra]]
    for requirement in map(Requirement, asked):
        if requirement.marker is not None and not requirement.marker.evaluate(IMAGE):
            continue
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    differing = {name for name, version in locked.items() if tested.get(name, version) != version}
    assert not differing, "run make lock"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_lock_is_made_of_exact_versions_and_hashes(text: str) -> None:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==\S+( ; [^;]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    assert "://" not in text


def test_what_both_daemons_have_is_the_same() -> None:
    plain, with_s3 = pins(TEXTS["daemon"]), pins(TEXTS["daemon-s3"])
    assert plain.items() <= with_s3.items()
    assert "s3fs" in with_s3.keys() - plain.keys()


@pytest.mark.parametrize(
    ("file_name", "fits"),
    [
        ("a-1-py3-none-any.whl", {*both(11), *both(12), *both(13)}),
        ("a-1-py2.py3-none-manylinux2014_aarch64.whl", {(11, "aarch64"), (12, "aarch64"), (13, "aarch64")}),
        ("a-1-cp39-abi3-manylinux_2_28_x86_64.whl", {(11, "x86_64"), (12, "x86_64"), (13, "x86_64")}),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", {(12, "x86_64")}),
        ("a-1-cp312-abi3-manylinux_2_36_aarch64.whl", {(12, "aarch64"), (13, "aarch64")}),
        ("a-1-cp312-cp312-manylinux_2_39_x86_64.whl", set()),  # a newer glibc than the image's
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", set()),
        ("a-1-cp314-cp314-manylinux2014_x86_64.whl", set()),
        ("a-1-cp313-cp313t-manylinux2014_x86_64.whl", set()),
        ("a-1-cp312-cp312-macosx_11_0_arm64.whl", set()),
        ("a-1-py2-none-any.whl", set()),
    ],
)
def test_only_wheels_that_an_image_can_install_are_kept(file_name: str, fits: set[tuple[int, str]]) -> None:
    assert set(lock_images.fitting(file_name)) == fits


def test_a_package_without_a_wheel_for_one_platform_is_named() -> None:
    wheel = {"url": "a/thing-1-cp312-cp312-manylinux2014_x86_64.whl", "hashes": {"sha256": "0"}}
    with pytest.raises(lock_images.LockError, match=r"thing has no wheel for Python 3\.11 on aarch64"):
        list(lock_images.hashes_of("thing", [wheel]))
