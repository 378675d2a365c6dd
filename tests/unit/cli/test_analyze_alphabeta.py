from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from tests.shared_data import H200
from tests.support.commands import Command
from tests.unit.analysis.collective_timings import observe, sizes
from tests.unit.analysis.collectives.test_timings import NCCL_TESTS


@pytest.fixture
def alphabeta(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "analyze", "alphabeta")


def write_csv(path: Path, groups: dict[str, float], *, count: int = 60, slow_from: int | None = None) -> Path:
    """Groups by name, each with its bandwidth in GB/s; from a row on everything takes three times as long."""
    lines = ["op,bytes,us,ranks,group,time"]
    for seed, (group, beta_gbps) in enumerate(groups.items()):
        rng = np.random.default_rng(seed)
        observed = observe(sizes(rng, count), beta_gbps=beta_gbps, rng=rng)
        for row, (size, seconds) in enumerate(zip(observed.bytes, observed.seconds, strict=True)):
            factor = 3.0 if slow_from is not None and row >= slow_from else 1.0
            lines.append(f"all_reduce,{size},{seconds * 1e6 * factor},8,{group},{row}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_fits_the_output_of_nccl_tests(tmp_path: Path, alphabeta: Command) -> None:
    path = tmp_path / "all_reduce_perf.txt"
    path.write_text(NCCL_TESTS)
    found = alphabeta.json(path, "--at-group-size", 64)
    (fit,) = found["fits"]
    assert (fit["op"], fit["ranks"], fit["count"], fit["algorithm"]) == ("all_reduce", 8, 10, "ring")
    assert fit["beta_gbps"] == pytest.approx(485, rel=0.03) and 1 < fit["alpha_us"] < 3
    assert found["verdict"] == "healthy" and found["anomalies"] == []
    seen = [row for row in found["predicted"] if row["ranks"] == 8]
    assert [row["bytes"] for row in seen] == [8, 65536, 16777216, 1073741824, 17179869184]
    assert seen[-1]["actual_us"] == pytest.approx(61972) and seen[0]["tree_us"] < seen[0]["ring_us"]
    other = [row for row in found["predicted"] if row["ranks"] == 64]
    assert other and all(row["actual_us"] is None for row in other)


def test_names_the_slow_link_and_leaves_its_healthy_twin_alone(tmp_path: Path, alphabeta: Command) -> None:
    healthy = {f"dp_{n}": 100.0 for n in range(5)}
    assert alphabeta.json(write_csv(tmp_path / "a.csv", healthy))["verdict"] == "healthy"
    found = alphabeta.json(write_csv(tmp_path / "b.csv", healthy | {"dp_3": 40.0}))
    assert found["verdict"] == "slow_communication"
    assert [(one["group"], one["against"]) for one in found["anomalies"]] == [("dp_3", "peers")]


def test_tells_that_collectives_became_slow(tmp_path: Path, alphabeta: Command) -> None:
    path = write_csv(tmp_path / "a.csv", {"dp": 100.0}, count=200, slow_from=140)
    (anomaly,) = alphabeta.json(path)["anomalies"]
    assert anomaly["against"] == "own" and anomaly["ongoing"] is True
    assert anomaly["since_seconds"] == pytest.approx(140, abs=6)
    out = alphabeta.answer(path)
    assert "slow_communication" in out and "3.0×" in out


def test_compares_groups_of_several_files(tmp_path: Path, alphabeta: Command) -> None:
    paths = [write_csv(tmp_path / f"node{n}.csv", {"": 30.0 if n == 1 else 100.0}) for n in range(4)]
    found = alphabeta.json(*paths)
    assert [fit["group"] for fit in found["fits"]] == ["node0", "node1", "node2", "node3"]
    assert [one["group"] for one in found["anomalies"]] == ["node1"]


def test_reads_the_transfers_of_two_real_ranks(alphabeta: Command) -> None:
    found = alphabeta.json(H200 / "gloo_2ranks_rank0.json.gz", H200 / "gloo_2ranks_rank1.json.gz")
    (fit,) = found["fits"]
    assert (fit["op"], fit["ranks"], fit["count"]) == ("all_reduce", 2, 25)
    assert fit["beta_gbps"] == pytest.approx(1.06, rel=0.1)
    assert "25 collectives matched over 2 ranks" in found["notes"][0]


def test_abstains_with_a_reason_if_the_group_size_is_unknown(alphabeta: Command) -> None:
    alone = H200 / "gloo_2ranks_rank0.json.gz"
    found = alphabeta.json(alone)
    assert found["verdict"] == "insufficient_data"
    assert found["fits"][0]["reason"] == "the number of ranks is unknown"
    assert found["fits"][0]["alpha_us"] is None and found["predicted"] == []
    assert alphabeta.json(alone, "--group-size", 2)["verdict"] == "healthy"


def test_draws_a_plot_and_a_page_that_need_nothing_else(tmp_path: Path, alphabeta: Command) -> None:
    path = write_csv(tmp_path / "a.csv", {"<b>dp</b>": 100.0})
    alphabeta.answer(path, "--svg", tmp_path / "fit.svg", "--html", tmp_path / "fit.html")
    drawn, written = (tmp_path / "fit.svg").read_text(), (tmp_path / "fit.html").read_text()
    assert drawn.startswith("<svg") and "predicted" in drawn and "actual" in drawn
    assert "Predicted against actual" in written and "tree" in written
    assert "<b>dp</b>" not in written and "http://" not in written.replace("http://www.w3.org/2000/svg", "")


def test_draws_a_page_even_where_nothing_was_fitted(tmp_path: Path, alphabeta: Command) -> None:
    path = tmp_path / "a.csv"
    path.write_text("op,bytes,us,ranks\nall_reduce,1024,20,8\n")
    out = alphabeta.answer(path, "--html", tmp_path / "fit.html", "--svg", tmp_path / "fit.svg")
    assert "1 timed with a known size, 5 are needed" in out
    assert "insufficient_data" in (tmp_path / "fit.html").read_text()


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (None, (), "cannot be read: No such file"),
        (b"", (), "is empty"),
        (b"\xff\xfe\x00", (), "is no text"),
        (b"op,bytes,us\nall_reduce,x,1\n", (), "line 2: bytes 'x' is not a number"),
        (b'{"traceEvents": [', (), ""),
        (b"\x1f\x8b broken", (), ""),
        (b'{"traceEvents": []}', (), ""),
        (b"op,bytes,us\nall_reduce,1,1\n", ("--group-size", "0"), "--group-size: 0 is not a valid number of ranks"),
        (b"op,bytes,us\nall_reduce,1,1\n", ("--svg", "/nowhere/at/all.svg"), "cannot be written: No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    content: bytes | None, words: tuple[str, ...], said: str, tmp_path: Path, alphabeta: Command
) -> None:
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    assert said in alphabeta.complaint(path, *words)


def test_refuses_to_mix_traces_and_tables(tmp_path: Path, alphabeta: Command) -> None:
    path = write_csv(tmp_path / "a.csv", {"dp": 100.0})
    assert "cannot be read together" in alphabeta.complaint(path, H200 / "gloo_2ranks_rank0.json.gz")


def test_damaged_tables_never_give_a_traceback(tmp_path: Path, alphabeta: Command) -> None:
    dice, path = random.Random(5), tmp_path / "input"
    whole = [
        NCCL_TESTS,
        write_csv(tmp_path / "a.csv", {"dp": 1.0}, count=8).read_text(),
        '[{"op":"send","bytes":1,"us":1}]',
    ]
    for _ in range(80):
        text = list(dice.choice(whole))
        for _ in range(dice.randint(1, 6)):
            text[dice.randrange(len(text))] = dice.choice(["", "\n", ",", "9" * 40, "-", "NaN", "\x00", '"', "[", "é"])
        path.write_text("".join(text))
        code, _, err = alphabeta(path, "--json")
        assert code in (0, 2) and err.count("\n") == (1 if code else 0)


def test_every_json_key_is_documented(alphabeta: Command) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "analyze-alphabeta.md").read_text()
    found = alphabeta.json(H200 / "gloo_2ranks_rank0.json.gz", "--group-size", 2)
    keys = {*found, *found["fits"][0], *found["predicted"][0]}
    keys |= {"against", "severity", "windows", "slow_windows", "since_seconds", "ongoing", "lost_us", "lost_ratio"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []
    assert CollectiveKind.ALL_TO_ALL.label in page
