from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.daemon.discovery.process_table import LOOK_AGAIN_SECONDS
from rankscope.daemon.discovery.ranks import Discovered, RankDiscovery

from .fake_proc import FakeProc, torchrun


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def scan(proc: FakeProc, node_name: str = "") -> Discovered:
    return RankDiscovery(proc.root, node_name).scan()


def pids(discovered: Discovered) -> list[int]:
    return [rank.pid for rank in discovered.ranks]


def test_a_rank_carries_identity_namespaces_and_pod_but_no_secrets(proc: FakeProc) -> None:
    uid = "0a1b2c3d-1111-2222-3333-444455556666"
    slice_name = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    proc.add(
        50,
        torchrun(3, AWS_SECRET="x", KINETO_USE_DAEMON="1", TEARDOWN_CUPTI="1", RANKSCOPE_PROBE="1"),
        started=77,
        namespace_pids="50\t9",
        cgroup=f"0::/kubepods.slice/kubepods-burstable.slice/{slice_name}/cri-containerd-ab.scope\n",
    )
    (rank,) = scan(proc).ranks
    assert rank.key == ("10.0.0.1:29500/run7", 3, 50, 77)
    assert (rank.local_rank, rank.world_size, rank.namespace_pids, rank.pod) == (3, 4, (50, 9), uid)
    assert rank.environment == {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1", "RANKSCOPE_PROBE": "1"}


def test_a_data_loader_worker_is_not_a_rank_even_after_its_rank_died(proc: FakeProc) -> None:
    proc.add(50, torchrun(0))
    proc.add(51, torchrun(0), parent=50, command="pt_data_worker")
    discovery = RankDiscovery(proc.root)
    assert pids(discovery.scan()) == [50]
    proc.remove(50)
    proc.add(51, torchrun(0), parent=1, command="pt_data_worker")
    assert pids(discovery.scan()) == []


def test_torchrun_under_slurm_is_a_launcher_before_its_children_have_loaded_torch(proc: FakeProc) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    proc.add(40, slurm)
    assert [rank.job for rank in scan(proc).ranks] == ["slurm-9.0"]
    proc.add(41, {**slurm, **torchrun(0, 2)}, parent=40, has_torch=False)
    assert scan(proc).ranks == ()
    proc.add(41, {**slurm, **torchrun(0, 2)}, parent=40)
    proc.add(42, {**slurm, **torchrun(1, 2)}, parent=40)
    assert pids(scan(proc)) == [41, 42]


def test_a_shell_between_launcher_and_rank_does_not_hide_their_kinship(proc: FakeProc) -> None:
    proc.add(40, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    proc.add(41, torchrun(0, 1), parent=40, has_torch=False, command="bash")
    proc.add(42, torchrun(0, 1), parent=41)
    assert pids(scan(proc)) == [42]


def test_zombies_and_processes_without_torch_are_not_ranks(proc: FakeProc) -> None:
    proc.add(50, torchrun(0), state="Z")
    proc.add(51, torchrun(1), has_torch=False)
    assert scan(proc).ranks == ()


def test_a_process_becomes_a_rank_once_it_has_loaded_torch(proc: FakeProc) -> None:
    proc.add(50, torchrun(0), has_torch=False)
    discovery = RankDiscovery(proc.root, monotonic=lambda: 0.0)
    assert discovery.scan().ranks == ()
    proc.add(50, torchrun(0))
    assert pids(discovery.scan()) == [50]


def test_an_exec_changes_who_a_process_is(proc: FakeProc) -> None:
    now = [0.0]
    discovery = RankDiscovery(proc.root, monotonic=lambda: now[0])
    proc.add(50, {}, command="bash", has_torch=False)
    discovery.scan()
    now[0] = 1000.0
    discovery.scan()  # known for long, and so looked at rarely
    proc.add(50, torchrun(2), exec_mark=2)
    now[0] += 1.5 * LOOK_AGAIN_SECONDS
    assert [rank.rank for rank in discovery.scan().ranks] == [2]
    proc.add(50, torchrun(3), exec_mark=3)
    assert [rank.rank for rank in discovery.scan().ranks] == [3]


def test_an_old_process_without_rank_variables_is_not_read_in_every_scan(proc: FakeProc) -> None:
    now = [0.0]
    discovery = RankDiscovery(proc.root, monotonic=lambda: now[0])
    folder = proc.add(50, {}, command="bash", has_torch=False)
    discovery.scan()
    now[0] = 1000.0
    discovery.scan()
    (folder / "stat").unlink()  # to read it now would be to lose the process
    now[0] += 2.0
    discovery.scan()
    proc.add(50, torchrun(0), exec_mark=2)
    assert discovery.scan().ranks == ()


def test_a_restarted_rank_is_another_incarnation(proc: FakeProc) -> None:
    discovery = RankDiscovery(proc.root)
    proc.add(50, torchrun(0), started=100)
    (before,) = discovery.scan().ranks
    proc.add(50, torchrun(0), started=200)
    (after,) = discovery.scan().ranks
    assert before.key != after.key


def test_of_two_processes_that_claim_one_rank_the_older_is_kept_and_the_rest_reports_on(proc: FakeProc) -> None:
    proc.add(60, torchrun(0), started=200)
    proc.add(61, torchrun(0), started=100)
    proc.add(62, torchrun(1), started=300)
    discovered = scan(proc)
    assert pids(discovered) == [61, 62]
    (conflict,) = discovered.conflicts
    assert (conflict.kept_pid, conflict.ignored_pid) == (61, 60)
    assert "pid 61 and pid 60" in conflict.text


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "abc"}, "RANK='abc'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"RANK": "4"}, "RANK='4'"),
        ({"WORLD_SIZE": "9" * 400}, "WORLD_SIZE='999"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "²"}, "RANK='²'"),
        ({"LOCAL_RANK": "1e3"}, "LOCAL_RANK='1e3'"),
        ({"RANK": "\x1b[31m1"}, "RANK='�[31m1'"),
    ],
)
def test_a_senseless_identity_is_a_problem_in_words_and_others_go_on(
    proc: FakeProc, variables: dict[str, str], named: str
) -> None:
    proc.add(50, {**torchrun(0), **variables})
    proc.add(51, torchrun(1))
    discovered = scan(proc)
    assert pids(discovered) == [51]
    (problem,) = discovered.problems
    assert problem.text.startswith(f"pid 50: {named}")
    assert len(problem.text) < 200


def test_a_process_that_ends_or_lies_under_the_scan_is_just_not_there(proc: FakeProc) -> None:
    (proc.add(50, torchrun(0)) / "environ").unlink()
    (proc.add(51, torchrun(1)) / "maps").unlink()
    (proc.add(52, torchrun(2)) / "status").unlink()
    (proc.add(53, torchrun(3)) / "stat").write_text("53 (half")
    proc.add(54, {**torchrun(0), "TORCHELASTIC_RUN_ID": "other"}, command="x) S 1 (y")
    assert pids(scan(proc)) == [54]


def test_jobs_named_by_nothing_but_loopback_are_told_apart_by_pod_and_node(proc: FakeProc) -> None:
    uid = "b" * 32
    proc.add(50, torchrun(0, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none"), cgroup=f"0::/kubepods/pod{uid}/c1\n")
    proc.add(51, torchrun(0, MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="none"))
    proc.add(52, torchrun(0, MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="mine"))
    jobs = [rank.job for rank in scan(proc, "gpu-17").ranks]
    assert jobs == [f"127.0.0.1:29500/none@{uid}", "localhost:29500/mine", "localhost:29500/none@gpu-17"]


def test_a_huge_environment_is_read_only_to_its_bound(proc: FakeProc) -> None:
    proc.add(50, {"PADDING": "x" * 300_000, **torchrun(0)})
    proc.add(51, {**torchrun(1), "PADDING": "x" * 300_000})
    assert pids(scan(proc)) == [51]
