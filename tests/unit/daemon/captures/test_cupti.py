"""No capture leaves CUDA training slower unless somebody accepts that."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.daemon.captures.orders import Options
from rankscope.daemon.captures.request import slowdown_objection, uses_cuda
from rankscope.daemon.samples import RankProcess

from ..fake_proc import FakeProc


def rank(**environment: str) -> RankProcess:
    return RankProcess("job", 3, 3, 8, 7, 100, (7,), environment)


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    fake = FakeProc(tmp_path / "proc")
    fake.add(7)
    return fake


def open_in(proc: FakeProc, *targets: str) -> None:
    for number, target in enumerate(targets):
        (proc.root / "7" / "fd" / str(number)).symlink_to(target)


def test_unflagged_cuda_processes_are_refused_with_reason_and_alternatives(proc: FakeProc) -> None:
    open_in(proc, "/dev/null", "socket:[1]", "/dev/nvidia-uvm", "/dev/nvidia0")
    objection = slowdown_objection(rank(), Options(), proc.root)
    assert objection is not None
    for part in ("rank 3 (pid 7)", "TEARDOWN_CUPTI=1", "30 %", "--allow-slowdown"):
        assert part in objection
    assert slowdown_objection(rank(TEARDOWN_CUPTI="0"), Options(), proc.root) is not None


def test_the_flag_or_a_callers_consent_lets_it_pass(proc: FakeProc) -> None:
    open_in(proc, "/dev/nvidia0")
    assert slowdown_objection(rank(TEARDOWN_CUPTI="1"), Options(), proc.root) is None
    assert slowdown_objection(rank(), Options(allow_slowdown=True), proc.root) is None


def test_a_process_without_a_gpu_needs_nothing(proc: FakeProc) -> None:
    open_in(proc, "/dev/null", "/tmp/dev/nvidia0", "pipe:[3]")
    assert slowdown_objection(rank(), Options(), proc.root) is None


def test_in_doubt_it_uses_cuda(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    open_in(proc, *["/dev/null"] * 5000)
    assert uses_cuda(7, proc.root), "more descriptors than are looked at"

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    assert uses_cuda(7, proc.root)


def test_a_process_that_is_gone_uses_nothing(proc: FakeProc) -> None:
    assert not uses_cuda(8, proc.root)
