from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeAlias

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.discovery.process_table import LARGE_BYTES_PER_SCAN, LOOK_AGAIN_SECONDS, LOOKS_PER_SCAN
from rankscope.daemon.discovery.ranks import MAX_OWNERS, Discovered, RankDiscovery
from rankscope.daemon.samples import ProbeFacts
from rankscope.daemon.steps import ring_reader
from rankscope.daemon.steps.ring_reader import FoundRing

from .fake_proc import FakeProc, torchrun


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


Rings: TypeAlias = dict[int, ProbeFacts]


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Rings:
    """What the probe of a process says. A plain folder has no link to a memfd that can be opened."""
    facts: Rings = {}

    def find_ring(search: procfs.RingSearch, descriptors: int) -> FoundRing | None:
        pid = int(Path(search.process).name)
        return FoundRing(pid, facts[pid]) if pid in facts else None

    monkeypatch.setattr(ring_reader, "find_ring", find_ring)
    return facts


def scan(proc: FakeProc, node_name: str = "") -> Discovered:
    return RankDiscovery(proc.root, node_name).scan()


def pids(discovered: Discovered) -> list[int]:
    return [rank.pid for rank in discovered.ranks]


def test_a_rank_carries_identity_namespaces_and_pod_but_no_secrets(proc: FakeProc) -> None:
    uid = "0a1b2c3d-1111-2222-3333-444455556666"
    slice_name = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    proc.add(
        50,
        torchrun(3, AWS_SECRET="x", KINETO_USE_DAEMON="1", TEARDOWN_CUPTI="1", RANKSCOPE_X="1"),
        started=77,
        namespace_pids="50\t9",
        cgroup=f"0::/kubepods.slice/kubepods-burstable.slice/{slice_name}/cri-containerd-ab.scope\n",
    )
    (rank,) = scan(proc).ranks
    assert rank.key == ("run7", 3, 50, 77)
    assert (rank.local_rank, rank.world_size, rank.namespace_pids, rank.pod) == (3, 4, (50, 9), uid)
    assert rank.environment == {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1"}


def test_an_orphaned_data_loader_worker_is_not_a_rank(proc: FakeProc) -> None:
    proc.add(50, torchrun(0))
    proc.add(51, torchrun(0), parent=50, command="pt_data_worker")
    discovery = RankDiscovery(proc.root)
    assert pids(discovery.scan()) == [50]
    proc.remove(50)
    proc.add(51, torchrun(0), parent=1, command="pt_data_worker")
    assert pids(discovery.scan()) == []


def test_torchrun_under_slurm_is_a_launcher_before_children_load_torch(proc: FakeProc) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    proc.add(40, slurm)
    assert [rank.job for rank in scan(proc).ranks] == ["slurm-9"]
    proc.add(41, {**slurm, **torchrun(0, 2)}, parent=40, has_torch=False)
    assert scan(proc).ranks == ()
    proc.add(41, {**slurm, **torchrun(0, 2)}, parent=40)
    proc.add(42, {**slurm, **torchrun(1, 2)}, parent=40)
    assert pids(scan(proc)) == [41, 42]


def test_a_shell_between_launcher_and_rank_is_skipped(proc: FakeProc) -> None:
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


def test_an_exec_is_noticed_where_the_kernel_hides_addresses(proc: FakeProc) -> None:
    now = [0.0]
    discovery = RankDiscovery(proc.root, monotonic=lambda: now[0])
    proc.add(50, {}, command="bash", has_torch=False, exec_mark=0)
    discovery.scan()
    now[0] = 1.5 * LOOK_AGAIN_SECONDS
    proc.add(50, torchrun(2), command="python", exec_mark=0)
    assert [rank.rank for rank in discovery.scan().ranks] == [2]


def test_an_old_process_without_rank_variables_is_read_rarely(proc: FakeProc) -> None:
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


def test_of_two_processes_claiming_one_rank_the_older_is_kept(proc: FakeProc) -> None:
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
def test_an_invalid_identity_is_a_problem_of_one_process(proc: FakeProc, variables: dict[str, str], named: str) -> None:
    proc.add(50, {**torchrun(0), **variables})
    proc.add(51, torchrun(1))
    discovered = scan(proc)
    assert pids(discovered) == [51]
    (problem,) = discovered.problems
    assert problem.text.startswith(f"pid 50: {named}")
    assert len(problem.text) < 200


def test_a_process_ending_during_the_scan_is_left_out(proc: FakeProc) -> None:
    (proc.add(50, torchrun(0)) / "environ").unlink()
    (proc.add(51, torchrun(1)) / "maps").unlink()
    (proc.add(52, torchrun(2)) / "status").unlink()
    (proc.add(53, torchrun(3)) / "stat").write_text("53 (half")
    proc.add(54, {**torchrun(0), "TORCHELASTIC_RUN_ID": "other"}, command="x) S 1 (y")
    assert pids(scan(proc)) == [54]


def test_loopback_jobs_are_distinguished_by_pod_and_node(proc: FakeProc) -> None:
    uid = "b" * 32
    proc.add(50, torchrun(0, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none"), cgroup=f"0::/kubepods/pod{uid}/c1\n")
    proc.add(51, torchrun(0, MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="none"))
    proc.add(52, torchrun(0, MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="mine"))
    jobs = [rank.job for rank in scan(proc, "gpu-17").ranks]
    assert jobs == [f"127.0.0.1:29500@{uid}", "localhost:29500@gpu-17", "mine"]


def test_a_huge_environment_is_read_only_to_its_bound(proc: FakeProc) -> None:
    proc.add(50, {"PADDING": "x" * 300_000, **torchrun(0)})
    proc.add(51, {**torchrun(1), "PADDING": "x" * 300_000})
    assert pids(scan(proc)) == [51]


def in_pod(letter: str) -> str:
    return f"0::/kubepods/pod{letter * 32}/c1\n"


def test_pods_that_share_an_address_are_one_job(proc: FakeProc) -> None:
    proc.add(50, torchrun(0), cgroup=in_pod("a"))
    proc.add(51, torchrun(1), cgroup=in_pod("b"))
    assert {rank.job for rank in scan(proc).ranks} == {"run7"}


def test_a_second_job_with_the_same_name_stays_separate(proc: FakeProc) -> None:
    discovery = RankDiscovery(proc.root)
    proc.add(50, torchrun(1), cgroup=in_pod("a"), started=200)
    discovery.scan()
    proc.add(40, torchrun(0), cgroup=in_pod("b"), started=100)
    proc.add(41, torchrun(1), cgroup=in_pod("b"), started=100)
    expected = {50: "run7", **dict.fromkeys((40, 41), f"run7@{'b' * 32}")}
    found = discovery.scan()
    assert {rank.pid: rank.job for rank in found.ranks} == expected
    assert not found.conflicts
    proc.remove(50)
    assert {rank.job for rank in discovery.scan().ranks} == {expected[40]}, "a job that runs is not renamed"


def test_loopback_jobs_with_a_run_id_split_by_network_namespace(proc: FakeProc) -> None:
    proc.add(1, network=7)
    for pid, rank, network in ((50, 0, 7), (51, 1, 7), (52, 2, 8)):
        proc.add(pid, torchrun(rank, MASTER_ADDR="127.0.0.1"), network=network)
    jobs = {rank.pid: rank.job for rank in scan(proc, "gpu-17").ranks}
    assert jobs[50] == jobs[51] == "run7"
    assert jobs[52] == "run7@uid0-net8"


def test_parallel_launches_in_one_slurm_job_are_separate_jobs(
    proc: FakeProc,
) -> None:
    slurm = {"SLURM_JOB_ID": "9", "SLURM_JOB_NAME": "llama"}
    discovery = RankDiscovery(proc.root)
    proc.add(50, {**slurm, **torchrun(0, 2, MASTER_PORT="1")}, started=1)
    proc.add(51, {**slurm, **torchrun(0, 2, MASTER_PORT="2")}, started=2)
    proc.add(52, {**slurm, **torchrun(1, 2, MASTER_PORT="1")}, started=3)
    proc.add(53, {**slurm, **torchrun(0, 1, MASTER_PORT="1")}, started=4)  # an evaluation that a rank started
    jobs = {rank.pid: rank.job for rank in discovery.scan().ranks}
    assert jobs == {50: "llama-9", 51: "llama-9@uid0", 52: "llama-9", 53: "llama-9@uid0#2"}
    for pid in jobs:
        proc.remove(pid)
    proc.add(60, {**slurm, **torchrun(0, 2, MASTER_PORT="3", SLURM_RESTART_COUNT="1")})
    assert [(rank.job, rank.attempt) for rank in discovery.scan().ranks] == [("llama-9", 1)]


def test_a_launchers_ring_shows_that_it_trains(proc: FakeProc, rings: Rings) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    proc.add(40, slurm)
    proc.add(41, {**slurm, **torchrun(0, 1)}, parent=40)
    assert pids(scan(proc)) == [41]
    rings[40] = ProbeFacts()
    assert sorted(pids(scan(proc))) == [40, 41]


def group(rank: int, world_size: int = 2, store: str = "localhost:29500", **more: int) -> ProbeFacts:
    return ProbeFacts(rank=rank, world_size=world_size, store=store, **more)


def test_ranks_set_inside_the_script_are_one_run(proc: FakeProc, rings: Rings) -> None:
    """torch.multiprocessing.spawn: the launcher has loaded torch, and nobody has rank variables."""
    proc.add(40)
    discovery = RankDiscovery(proc.root, "gpu-17")
    for rank in range(2):
        proc.add(41 + rank, parent=40)
        rings[41 + rank] = ProbeFacts(rank=0, world_size=1)  # steps before there is a group
    assert {rank.job for rank in discovery.scan().ranks} == {"local-41@gpu-17", "local-42@gpu-17"}
    for rank in range(2):
        rings[41 + rank] = group(rank, local_rank=rank)
    found = discovery.scan().ranks
    assert [(rank.pid, rank.job, rank.rank, rank.local_rank, rank.world_size) for rank in found] == [
        (41, "localhost:29500@gpu-17", 0, 0, 2),
        (42, "localhost:29500@gpu-17", 1, 1, 2),
    ]


def test_a_group_replaces_the_node_rank_that_a_pod_gave(proc: FakeProc, rings: Rings) -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    proc.add(40, pod)
    for rank in range(2):
        proc.add(41 + rank, pod, parent=40)
    discovery = RankDiscovery(proc.root)
    assert pids(discovery.scan()) == [40]
    rings |= {41: group(0), 42: group(1)}
    assert [(rank.pid, rank.rank, rank.world_size) for rank in discovery.scan().ranks] == [(41, 0, 2), (42, 1, 2)]


def test_a_launchers_name_stays_where_the_group_agrees(proc: FakeProc, rings: Rings) -> None:
    for rank in range(2):
        proc.add(41 + rank, torchrun(rank, 2))
        rings[41 + rank] = group(rank, store="10.0.0.1:41234")
    assert {rank.job for rank in scan(proc).ranks} == {"run7"}


def test_a_ring_cannot_take_the_rank_of_another_user(proc: FakeProc, rings: Rings) -> None:
    for pid, uid in ((41, 1000), (42, 1000), (43, 2000)):
        proc.add(pid, uid=uid, started=pid)
        rings[pid] = group(pid % 2, store="10.0.0.1:29500")
    jobs = {rank.pid: rank.job for rank in scan(proc).ranks}
    assert jobs == {41: "10.0.0.1:29500", 42: "10.0.0.1:29500", 43: "10.0.0.1:29500@uid2000"}


def test_ranks_of_a_nameless_store_are_not_joined(proc: FakeProc, rings: Rings) -> None:
    for rank in range(2):
        proc.add(41 + rank)
        rings[41 + rank] = group(rank, store=f"pid:{41 + rank}")
    assert len({rank.job for rank in scan(proc).ranks}) == 2


def test_an_invalid_group_is_a_problem_of_its_process(proc: FakeProc, rings: Rings) -> None:
    proc.add(41)
    proc.add(42)
    rings |= {41: group(7), 42: ProbeFacts(store="localhost:1")}
    discovered = scan(proc)
    assert discovered.ranks == ()
    assert [problem.kind for problem in discovered.problems] == ["identity", "identity"]
    assert any("RANK='7' is not a number from 0 to 1" in problem.text for problem in discovered.problems)


def job_of(uid: int, rank: int) -> dict[str, str]:
    # The largest uid's job is the first by name.
    return torchrun(rank, 64, TORCHELASTIC_RUN_ID=f"run{9999 - uid}")


def by_uid(proc: FakeProc, discovered: Discovered) -> dict[int, int]:
    text = [(proc.root / str(rank.pid) / "status").read_text() for rank in discovered.ranks]
    return Counter(int(status.partition("Uid:\t")[2].split()[0]) for status in text)


def test_an_owner_with_too_many_ranks_leaves_others_theirs(proc: FakeProc) -> None:
    discovery = RankDiscovery(proc.root, max_ranks=12)
    for rank in range(20):
        proc.add(100 + rank, job_of(2000, rank), uid=2000)
    first = discovery.scan()
    assert (by_uid(proc, first), first.cut) == ({2000: 12}, {"uid 2000": 8})
    for rank in range(4):
        proc.add(200 + rank, job_of(1000, rank), uid=1000)
    for _ in range(2):
        second = discovery.scan()
        assert (by_uid(proc, second), second.cut) == ({1000: 4, 2000: 8}, {"uid 2000": 12})
    assert set(pids(second)) - set(range(200, 204)) <= set(pids(first)), "those that were watched stay"
    (problem,) = second.problems
    assert problem.kind == "quota"
    assert "ranks of uid 2000 are not watched" in problem.text
    for rank in range(12):
        proc.remove(100 + rank)
    assert by_uid(proc, discovery.scan()) == {1000: 4, 2000: 8}


def test_many_users_with_single_ranks_displace_no_watched_rank(proc: FakeProc) -> None:
    discovery = RankDiscovery(proc.root, max_ranks=12)
    for rank in range(8):
        proc.add(100 + rank, job_of(1000, rank), uid=1000)
    discovery.scan()
    for uid in range(2000, 2030):
        proc.add(uid, job_of(uid, 0), uid=uid)
    found = discovery.scan()
    assert by_uid(proc, found)[1000] == 8
    assert sum(found.cut.values()) == 26
    assert len(found.cut) == MAX_OWNERS + 1


def test_large_environments_take_turns_and_keep_nobody_else_waiting(proc: FakeProc) -> None:
    large = 4 * LARGE_BYTES_PER_SCAN // procfs.MAX_ENVIRON_BYTES
    for pid in range(100, 100 + large):
        proc.add(pid, {**torchrun(pid, 1000), "PADDING": "x" * (procfs.MAX_ENVIRON_BYTES - 1000)})
    proc.add(5000, torchrun(0, 1000))
    discovery = RankDiscovery(proc.root)
    found: list[int] = []
    for _ in range(6):
        scanned = pids(discovery.scan())
        assert 5000 in scanned
        found.append(len(scanned))
    assert found[0] < large / 2
    assert found[-1] == large + 1


def test_ranks_are_still_read_during_a_flood_of_processes(proc: FakeProc) -> None:
    discovery = RankDiscovery(proc.root)
    proc.add(50, torchrun(0))
    assert pids(discovery.scan()) == [50]
    for pid in range(100, 100 + 3 * LOOKS_PER_SCAN):
        proc.add(pid, torchrun(3), has_torch=False)
    proc.add(5000, torchrun(1))
    proc.remove(50)
    proc.add(50, torchrun(2), started=200)
    assert pids(discovery.scan()) == [50], "another process by now, and the newest has to wait"
    for _ in range(3):
        discovery.scan()
    assert pids(discovery.scan()) == [5000, 50]
