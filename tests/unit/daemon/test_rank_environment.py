from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.daemon.discovery.rank_environment import (
    MAX_JOB_LENGTH,
    MAX_KEPT_LENGTH,
    SCHEMES,
    Claim,
    InvalidClaim,
    group_claim,
    kept,
    lone_claim,
    read_claim,
)
from rankscope.daemon.samples import ProbeFacts

OMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS": "16",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "llama",
}


def claim(environment: dict[str, str]) -> Claim:
    found = read_claim(environment)
    assert isinstance(found, Claim)
    return found


def test_each_launcher_is_understood() -> None:
    torch = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert claim(torch) == Claim("h:1", 1, 0, 2, is_loopback=False, endpoint="h:1")
    assert claim({**OMPI, "MASTER_ADDR": "h", "MASTER_PORT": "1"}) == Claim("h:1", 5, 1, 8, False, endpoint="h:1")
    assert claim({**OMPI, "PMIX_NAMESPACE": "prterun-a-1@1"}).job == "ompi-prterun-a-1@1"
    assert claim(SLURM) == Claim("llama-77", 6, 2, 16, is_loopback=False, has_run_id=True, endpoint="unnamed")
    assert claim({**SLURM, **OMPI, **torch}).rank == 1


def test_a_rank_without_a_world_size_is_somebody_elses_variable() -> None:
    assert read_claim({"RANK": "1"}) is None
    assert claim({"RANK": "1", **SLURM}).rank == 6


TORCH = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
UUID = "3f2b8c1e-5d4a-4f6b-9c7d-8e1f2a3b4c5d"


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANKSCOPE_RUN": "mine", **SLURM, "TORCHELASTIC_RUN_ID": "r"}, "mine"),
        ({"RANKSCOPE_RUN": "  "}, "h:1"),
        (SLURM, "llama-77"),
        ({**SLURM, "SLURM_STEP_ID": "0"}, "llama-77"),
        ({**SLURM, "SLURM_STEP_ID": "2"}, "llama-77.2"),
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, "llama-77"),
        ({**SLURM, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, "llama-70_3"),
        ({**SLURM, "SLURM_HET_JOB_ID": "76", "SLURM_HET_GROUP": "1"}, "llama-76+1"),
        ({"TORCHELASTIC_RUN_ID": "llama"}, "llama"),
        ({"TORCHELASTIC_RUN_ID": "20260115"}, "20260115"),
        ({"TORCHELASTIC_RUN_ID": "llama", "RAY_JOB_ID": "01000000"}, "llama"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "h:1"),
        ({"TORCHELASTIC_RUN_ID": UUID}, "h:1"),
        ({"TORCHELASTIC_RUN_ID": UUID.replace("-", "")}, "h:1"),
        ({"TORCHELASTIC_RUN_ID": "a3f09b2c"}, "h:1"),
        ({"TORCHELASTIC_RUN_ID": "x7Kp2Qm9Lw4Rt8Vz"}, "h:1"),
        ({"RAY_JOB_ID": "01000000"}, "ray-01000000@h"),
        ({}, "h:1"),
    ],
)
def test_a_runs_name_comes_from_a_variable_restarts_keep(variables: dict[str, str], name: str) -> None:
    assert claim({**TORCH, **variables}).job == name


@pytest.mark.parametrize("keeping", [SLURM, {"TORCHELASTIC_RUN_ID": "llama"}, {"RANKSCOPE_RUN": "llama"}])
def test_a_restart_keeps_the_name_and_is_another_attempt(keeping: dict[str, str]) -> None:
    before, after = claim({**TORCH, **keeping}), claim({**TORCH, **keeping, "MASTER_PORT": "9", **RESTARTED})
    assert (before.job, before.attempt) == (after.job, 0)
    assert after.attempt == 3


RESTARTED = {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "2"}


def test_a_lone_program_has_the_runs_name_or_its_own() -> None:
    assert lone_claim({}, 7).job == "local-7"
    assert lone_claim({"RANKSCOPE_RUN": "mine"}, 7) != lone_claim({"RANKSCOPE_RUN": "mine"}, 8)
    assert lone_claim({"RANKSCOPE_RUN": "mine"}, 7).job == lone_claim({"RANKSCOPE_RUN": "mine"}, 8).job == "mine"


NAME_TEXTS = st.text(st.sampled_from("ab/-@#~ 7\n\u202e"), max_size=200)


@given(NAME_TEXTS, NAME_TEXTS)
def test_two_names_that_users_choose_never_become_one(one: str, other: str) -> None:
    names = [claim({**TORCH, "RANKSCOPE_RUN": text}).job for text in (one, other)]
    assert (names[0] == names[1]) == ((one.strip() or None) == (other.strip() or None))


def test_long_names_of_different_jobs_stay_different() -> None:
    base = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    first = claim({**base, "TORCHELASTIC_RUN_ID": "x" * 500 + "a"}).job
    second = claim({**base, "TORCHELASTIC_RUN_ID": "x" * 500 + "b"}).job
    assert first != second
    assert len(first) == MAX_JOB_LENGTH


def test_a_launcher_is_less_deep_than_the_ranks_it_starts() -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    launched = {**pod, "LOCAL_RANK": "0"}
    depths = [claim(variables).launch_depth for variables in (SLURM, OMPI, pod, {**SLURM, **launched})]
    assert depths == sorted(set(depths))


@pytest.mark.parametrize("address", ["localhost", "node-3", "::1"])
def test_a_group_has_the_name_that_variables_would_give(address: str) -> None:
    facts = ProbeFacts(rank=1, world_size=2, local_rank=1, store=f"{address}:29500")
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert group_claim(facts, {"PATH": "/bin"}) == read_claim(variables)


def test_launches_with_stores_in_different_files_differ() -> None:
    claims = [group_claim(ProbeFacts(rank=0, world_size=2, store=f"file:/tmp/{name}/s"), {}) for name in "ab"]
    assert all(isinstance(claim, Claim) and claim.is_local_name and "/" not in claim.job for claim in claims)
    assert claims[0] != claims[1]


def test_a_group_is_deeper_than_any_launcher() -> None:
    claim = group_claim(ProbeFacts(rank=0, world_size=1, store="h:1"), {})
    assert isinstance(claim, Claim)
    assert claim.launch_depth > 2 * len(SCHEMES) + 1


def test_without_a_group_there_is_no_claim() -> None:
    assert group_claim(ProbeFacts(rank=0, world_size=1), {}) is None


def test_only_a_few_bounded_variables_are_kept() -> None:
    long = "x" * (MAX_KEPT_LENGTH + 1)
    environment = {"HF_TOKEN": "secret", "RANKSCOPE_PROBE": "1", "KINETO_USE_DAEMON": "1", "CUDA_VISIBLE_DEVICES": long}
    assert kept(environment) == {"KINETO_USE_DAEMON": "1"}


# Full Unicode takes seconds to set up; these are the characters that could matter.
TEXTS = st.text(st.sampled_from("0159-+._ e\x00\x1b\n\u202e²٣a:/@"), max_size=300)
NAMING = (
    *("MASTER_ADDR", "MASTER_PORT", "RANKSCOPE_RUN", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "PMIX_NAMESPACE"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("SLURM_HET_JOB_ID", "SLURM_HET_GROUP", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"),
)
NAMES = sorted({name for scheme in SCHEMES for name in (scheme.rank, scheme.local_rank, scheme.world_size)})


ENVIRONMENTS = st.dictionaries(
    st.sampled_from([*NAMES, *NAMING]),
    st.one_of(TEXTS, st.integers(-5, 20).map(str)),
)
NUMBERS = st.none() | st.integers(0, 20)
GROUPS = st.builds(ProbeFacts, rank=NUMBERS, world_size=NUMBERS, local_rank=NUMBERS, store=st.none() | TEXTS)


@given(ENVIRONMENTS, GROUPS | st.none())
def test_no_environment_or_group_gets_past_the_checks(environment: dict[str, str], group: ProbeFacts | None) -> None:
    found = read_claim(environment) if group is None else group_claim(group, environment)
    if isinstance(found, Claim):
        assert 0 <= found.rank < found.world_size
        assert 0 <= found.local_rank < found.world_size
        assert found.job.isprintable()
        assert len(found.job) <= MAX_JOB_LENGTH
        assert "/" not in found.job
        assert 0 <= found.attempt < 2**31
    elif isinstance(found, InvalidClaim):
        assert found.reason.isprintable()
        assert len(found.reason) < 200
