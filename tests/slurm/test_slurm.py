"""A job over two nodes of a real Slurm: the name of its run, the slow rank with its node, a capture, a requeue."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from tests.free_ports import free_port
from tests.integration.daemon_process import MAIN, serving
from tests.integration.small_job import SCRIPT
from tests.slurm.slurm_cluster import SlurmCluster, slurm_cluster
from tests.support.waiting import wait_until

PROLOG = Path(__file__).parents[2] / "deploy" / "slurm" / "task_prolog.sh"
NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}  # by rank
SLOW_RANK = 2
# Four imports of torch and a verdict, on a machine that is busy.
PATIENCE_SECONDS = 240.0

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


@dataclass
class Training:
    cluster: SlurmCluster
    folder: Path
    api: str  # address of the correlator's API
    id: str = ""

    @property
    def run(self) -> str:
        return f"llama-{self.id}"

    def submit(self) -> None:
        output = f"--output={self.folder / 'job.log'}"
        self.id = self.cluster.command("sbatch", "--parsable", output, str(Path(__file__).parent / "train.sbatch"))

    def requeue(self) -> None:
        """As after a fault: the job is cancelled, and returns to the queue under its number."""
        self.cluster.command("scancel", self.id)
        self.wait_until(lambda: self.cluster.state(self.id) == "CANCELLED")
        self.cluster.command("scontrol", "requeue", self.id)
        # Slurm would wait for two minutes. In the second in which the job ended, nodes refuse it: its credential is
        # revoked.
        self.cluster.command("scontrol", "update", f"JobId={self.id}", "StartTime=now+5")

    def status(self) -> pb.JobStatus:
        """What the correlator says of the run; empty until it has seen it. It knows of no other run."""
        with grpc.insecure_channel(self.api) as channel:
            jobs = JobServiceStub(channel).ListJobs(pb.ListJobsRequest(), timeout=PATIENCE_SECONDS).jobs
        assert {status.job for status in jobs} <= {self.run}
        return jobs[0] if jobs else pb.JobStatus()

    def attempts(self) -> dict[int, tuple[str, int]]:
        """Node and attempt of each rank that steps."""
        seen = (window.identity for window in self.status().ranks if window.steps_total)
        return {identity.rank: (identity.node, identity.attempt) for identity in seen}

    def first_alarm(self) -> pb.JobStatus:
        alarms: list[pb.JobStatus] = []

        def is_raised() -> bool:
            status = self.status()
            alarms.extend([status] if status.verdict.severity == pb.SEVERITY_ALARM else [])
            return bool(alarms)

        self.wait_until(is_raised)
        return alarms[0]

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self._describe, PATIENCE_SECONDS)

    def _describe(self) -> str:
        logs = [self.folder / "job.log", *sorted(self.folder.glob("*/log"))]
        texts = (f"== {path}\n{path.read_text(errors='replace')[-5000:]}" for path in logs if path.exists())
        return "\n".join([*texts, self.cluster.describe(), str(self.status())])


@contextmanager
def correlator(folder: Path, cluster: SlurmCluster, daemon_port: int) -> Iterator[str]:
    """Knows its daemons from Slurm. The address of its API."""
    folder.mkdir()
    log_path = folder / "log"
    flags = ("--daemons-slurm", "--daemon-port", str(daemon_port), "--state-dir", str(folder / "state"))
    with log_path.open("wb") as log:
        command = [*MAIN, "correlator", *flags, "--api-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log)
    try:

        def announced() -> re.Match[str] | None:
            assert process.poll() is None, log_path.read_text()
            return re.search(r"^rankscope correlator: .*\bapi ([^\s,]+)", log_path.read_text(), re.M)

        wait_until(announced, log_path.read_text)
        found = announced()
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def task_prolog(folder: Path) -> Path:
    """The example, with the probe in another folder than on the nodes of a cluster."""
    probe = folder / "probe"
    subprocess.run([sys.executable, "-m", "rankscope.probe.injection", str(probe)], check=True)
    text, replaced = re.subn(r"^probe=.*$", f"probe={probe}", PROLOG.read_text(), flags=re.M)
    assert replaced == 1
    made = folder / "task_prolog.sh"
    made.write_text(text)
    made.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("slurm")
    daemon_port = free_port()
    with ExitStack() as stack:
        cluster = stack.enter_context(slurm_cluster("n1", "n2", settings=f"TaskProlog={task_prolog(folder)}"))
        for node in cluster.nodes:
            flags = ("--node", node.name, "--grpc-listen", f"{node.address}:{daemon_port}")
            stack.enter_context(serving(folder / node.name, "daemon", *flags, launcher=node.inside(*MAIN)))
        api = stack.enter_context(correlator(folder / "correlator", cluster, daemon_port))
        cluster.environment |= {
            "PYTHON": sys.executable,
            "JOB_SCRIPT": str(SCRIPT),
            "JOB_FOLDER": str(folder),
            "SLOW_RANK": str(SLOW_RANK),
            "MASTER_PORT": str(free_port()),
        }
        job = Training(cluster, folder, api)
        job.submit()
        yield job


def test_the_slurm_jobs_slow_rank_is_named_and_captured(training: Training) -> None:
    status = training.first_alarm()
    assert (status.job, status.world_size) == (training.run, len(NODES))
    assert (status.verdict.kind, list(status.verdict.culprits)) == (pb.VERDICT_KIND_SLOW_RANK, [SLOW_RANK])
    assert {window.identity.rank: window.identity.node for window in status.ranks} == NODES

    asked = ["--ranks", "straggler+peer", "--steps", "3", "--output", str(training.folder / "traces"), "--json"]
    command = [*MAIN, "capture", "--run", training.run, "--connect", training.api, "--plaintext", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    captured = {rank["rank"]: rank for rank in json.loads(done.stdout)["ranks"]}
    assert len(captured) == 2 and SLOW_RANK in captured
    for number, rank in captured.items():
        assert (rank["node"], rank["state"], rank["steps"]) == (NODES[number], "analysed", 3)
        assert Path(rank["file"]).stat().st_size


def test_a_requeued_job_keeps_its_name_with_the_next_attempt(training: Training) -> None:
    training.wait_until(lambda: training.attempts() == {rank: (node, 0) for rank, node in NODES.items()})
    training.requeue()
    training.wait_until(lambda: training.attempts() == {rank: (node, 1) for rank, node in NODES.items()})
