from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.daemon.discovery.rank_environment import (
    JOB_LENGTH_LIMIT,
    KEPT_LENGTH_LIMIT,
    SCHEMES,
    Claim,
    InvalidClaim,
    kept,
    read_claim,
)

OMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}


def claim(environment: dict[str, str]) -> Claim:
    found = read_claim(environment)
    assert isinstance(found, Claim)
    return found


def test_each_launcher_is_understood() -> None:
    torch = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert claim(torch) == Claim("h:1", 1, 0, 2, is_loopback=False)
    assert claim({**torch, "TORCHELASTIC_RUN_ID": "r"}).job == "h:1/r"
    assert claim({**OMPI, "MASTER_ADDR": "h", "MASTER_PORT": "1"}) == Claim("h:1", 5, 1, 8, is_loopback=False)
    assert claim({**OMPI, "PMIX_NAMESPACE": "prterun-a-1@1"}).job == "ompi-prterun-a-1@1"
    assert claim(SLURM) == Claim("slurm-77.3", 6, 2, 16, is_loopback=False, has_run_id=True)
    assert claim({**SLURM, **OMPI, **torch}).job == "h:1"


def test_a_rank_without_a_world_size_is_somebody_elses_variable() -> None:
    assert read_claim({"RANK": "1"}) is None
    assert claim({"RANK": "1", **SLURM}).rank == 6


def test_long_names_of_different_jobs_stay_different() -> None:
    base = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    first = claim({**base, "TORCHELASTIC_RUN_ID": "x" * 500 + "a"}).job
    second = claim({**base, "TORCHELASTIC_RUN_ID": "x" * 500 + "b"}).job
    assert first != second
    assert len(first) == JOB_LENGTH_LIMIT


def test_a_launcher_is_less_deep_than_the_ranks_it_starts() -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    launched = {**pod, "LOCAL_RANK": "0"}
    depths = [claim(variables).launch_depth for variables in (SLURM, OMPI, pod, {**SLURM, **launched})]
    assert depths == sorted(set(depths))


def test_only_a_few_bounded_variables_are_kept() -> None:
    long = "x" * (KEPT_LENGTH_LIMIT + 1)
    environment = {"HF_TOKEN": "secret", "RANKSCOPE_PROBE": "1", "KINETO_USE_DAEMON": "1", "CUDA_VISIBLE_DEVICES": long}
    assert kept(environment) == {"KINETO_USE_DAEMON": "1"}


# Full Unicode takes seconds to set up; these are the characters that could matter.
TEXTS = st.text(st.sampled_from("0159-+._ e\x00\x1b\n\u202e²٣a:/@"), max_size=300)
NAMES = sorted({name for scheme in SCHEMES for name in (scheme.rank, scheme.local_rank, scheme.world_size)})


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"]),
        st.one_of(TEXTS, st.integers(-5, 20).map(str)),
    )
)
def test_no_environment_breaks_it_or_gets_past_the_checks(environment: dict[str, str]) -> None:
    found = read_claim(environment)
    if isinstance(found, Claim):
        assert 0 <= found.rank < found.world_size
        assert 0 <= found.local_rank < found.world_size
        assert found.job.isprintable()
        assert len(found.job) <= JOB_LENGTH_LIMIT
    elif isinstance(found, InvalidClaim):
        assert found.reason.isprintable()
        assert len(found.reason) < 200
