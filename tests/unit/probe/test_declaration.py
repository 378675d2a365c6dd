import pytest

from rankscope.probe import declaration
from rankscope.probe.declaration import BadValueError


def test_numbers_take_exponents_and_suffixes() -> None:
    assert [declaration.quantity("N", text, "") for text in ("7e9", "7B", "7_000M", "0.007t")] == [7e9, 7e9, 7e9, 7e9]


def test_model_flops_follow_the_palm_formula_per_token_times_tokens() -> None:
    environment = {"RANKSCOPE_MODEL": "params=7B,layers=32,width=4096,sequence=2048,batch=512"}
    per_token = 6 * 7e9 + 12 * 32 * 4096 * 2048
    assert declaration.flops_from_environment(environment) == pytest.approx(per_token * 2048 * 512)


def test_flops_per_step_win_over_the_models_shape() -> None:
    environment = {"RANKSCOPE_MODEL": "params=7B,sequence=1,batch=1", "RANKSCOPE_FLOPS_PER_STEP": "3P"}
    assert declaration.flops_from_environment(environment) == 3e15


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("params=7B,layers=x,width=1,sequence=1,batch=1", "not a number"),
        ("params=7B,sequence=1", "batch is missing"),
        ("params=7B,sequence=1,batch=1,depth=3", "unknown name"),
        ("params", "not name=value"),
        ("params=-1,sequence=1,batch=1", "above zero"),
        ("params=nan,sequence=1,batch=1", "above zero"),
        ("params=1,params=1", "twice"),
    ],
)
def test_a_bad_model_is_refused_with_name_reason_and_example(value: str, reason: str) -> None:
    with pytest.raises(BadValueError, match=r"RANKSCOPE_MODEL.*" + reason + r".*example: RANKSCOPE_MODEL=params=7B"):
        declaration.flops_from_environment({"RANKSCOPE_MODEL": value})


def test_the_last_axis_of_the_layout_varies_fastest() -> None:
    places = [declaration.coordinates("P", "pp=2,dp=3,tp=2", rank, 12) for rank in (0, 1, 2, 6, 11)]
    assert [(p["pipeline"], p["data"], p["tensor"]) for p in places] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 2, 1),
    ]


def test_an_axis_without_a_cohort_only_affects_the_layout() -> None:
    assert declaration.coordinates("P", {"dp": 2, "cp": 2}, 3, 4) == {"data": 1}


@pytest.mark.parametrize("layout", ["pp=2,dp=2", "pp=2.5,dp=2", "xx=5", "pp=0,dp=5", "pp:5"])
def test_a_layout_that_does_not_fit_the_world_is_refused(layout: str) -> None:
    with pytest.raises(BadValueError):
        declaration.coordinates("RANKSCOPE_PARALLELISM", layout, 0, 5)


def test_several_data_axes_of_a_mesh_make_one_coordinate() -> None:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert declaration.mesh_coordinates(names, (2, 2, 4, 2, 8), (1, 1, 3, 1, 5)) == {
        "pipeline": 1,
        "data": 7,
        "tensor": 5,
    }
