"""What the chart's daemon may do is enough, and each part of it is needed: a real job of another user, in namespaces of
its own, and a daemon of user 0 with these capabilities alone and nothing but its own folders to write to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration.capture_jobs import AS_NOBODY, RANKS, CaptureJob, capture, capture_job, job_name
from tests.integration.daemon_process import MAIN, Serving, run_of, serving
from tests.integration.private_tmp import PRIVATE_TMP
from tests.ship.combinations import COMBINATIONS
from tests.ship.conftest import OLD, Rendered
from tests.ship.helm import Helm

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs namespaces: run as root")
RUN = f"privileges-{os.getpid()}"
# A daemon outside of the sandbox sees the job too, and may be first to serve libkineto there.
FOREIGN = "Address already in use; it belongs to a process that is not found"
# A read-only root, but for the folder that stands for the pod's volumes.
ENTER = f'mount --bind "$0" "$0" && {PRIVATE_TMP} && mount -o remount,bind,ro / && exec "$@"'


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> dict[str, Rendered]:
    """Only what is run here: helm takes a second and a half for each combination of values."""
    values = {name: COMBINATIONS[name] for name in ("default", "no-namespace-entry")}
    made = helm.template_all(values, "--kube-version", OLD)
    return {name: Rendered(documents) for name, documents in made.items()}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not under /tmp, which the job and the daemons see another one of."""
    with tempfile.TemporaryDirectory(prefix="rankscope-", dir="/var/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[CaptureJob]:
    with capture_job(folder / "job", RUN, hurried=True, as_user=AS_NOBODY) as started:
        yield started


def daemon(folder: Path, *capabilities: str) -> AbstractContextManager[Serving]:
    folder.mkdir()
    bounding = ",".join(("-all", *(f"+{name}" for name in capabilities)))
    launcher = ["unshare", "--mount", "bash", "-c", ENTER, str(folder)]
    launcher += ["setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", bounding, "--", *MAIN]
    return serving(folder, "daemon", launcher=launcher, environment={"TMPDIR": "/tmp", "HOME": "/nonexistent"})


def capabilities(rendered: Rendered) -> tuple[str, ...]:
    """Those that the chart gives, as the kernel's tools spell them."""
    (container,) = rendered.one("DaemonSet", "rankscope-daemon")["spec"]["template"]["spec"]["containers"]
    held = container["securityContext"]["capabilities"]
    assert held["drop"] == ["ALL"]
    return tuple(name.lower() for name in held["add"])


def has_stacks(serving: Serving, name: str) -> bool:
    samples = [
        labels
        for found, labels, value in serving.scrape()
        if found == "rankscope_rank_stack_samples_total" and value > 0
    ]
    return len({labels["rank"] for labels in samples if run_of(labels) == name}) == RANKS


def test_the_charts_daemon_captures_another_users_job_without_leftovers(
    job: CaptureJob, folder: Path, rendered: dict[str, Rendered]
) -> None:
    with daemon(folder / "full", *capabilities(rendered["default"])) as full:
        name = job_name(full, RUN)
        full.wait_until(lambda: has_stacks(full, name))
        full.wait_until(lambda: (full.value("rankscope_capture_clients") or 0) >= RANKS or FOREIGN in full.log)
        status, report = capture(full, "--run", name, "--steps", "2")
        assert status == 0, (report, full.log)
        assert {rank["backend"] for rank in report["ranks"]} == {"probe" if FOREIGN in full.log else "kineto"}
        assert job.files_left(report["ranks"][0]["pid"]) == []


def test_without_namespace_entry_only_libkineto_captures_stop_with_a_reason(
    job: CaptureJob, folder: Path, rendered: dict[str, Rendered]
) -> None:
    held = capabilities(rendered["no-namespace-entry"])
    assert "sys_admin" not in held
    with daemon(folder / "outside", *held) as outside:
        name = job_name(outside, RUN)
        outside.wait_until(lambda: has_stacks(outside, name))
        status, report = capture(outside, "--run", name, "--ranks", "0", "--steps", "2")
        assert status == 0, (report, outside.log)
        (rank,) = report["ranks"]
        assert rank["backend"] == "probe"
        assert "CAP_SYS_ADMIN" in " ".join(rank["notes"]), rank["notes"]


def test_without_ptrace_neither_steps_nor_stacks_can_be_read(
    job: CaptureJob, folder: Path, rendered: dict[str, Rendered]
) -> None:
    held = [name for name in capabilities(rendered["default"]) if name != "sys_ptrace"]
    with daemon(folder / "no-ptrace", *held) as less:
        # Newer kernels let SYS_ADMIN read environments, so the ranks may be found.
        less.wait_for_words("CAP_SYS_PTRACE")
        assert not [value for name, _, value in less.scrape() if name == "rankscope_rank_steps_total" and value]


def test_without_dac_read_search_no_other_users_rank_is_seen(
    job: CaptureJob, folder: Path, rendered: dict[str, Rendered]
) -> None:
    held = [name for name in capabilities(rendered["default"]) if name != "dac_read_search"]
    with daemon(folder / "no-reading", *held) as less:
        less.wait_for_words("cannot be read")
        assert not [labels for _, labels, _ in less.scrape() if RUN in run_of(labels)]
