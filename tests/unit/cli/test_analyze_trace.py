from __future__ import annotations

import gzip
import json
import re
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rankscope.cli.trace_report.reduction import LayoutError, read_layout
from rankscope.common.text import printable
from rankscope.pprof import profile_pb2 as pb
from tests.shared_data import H200, ROOT
from tests.support.commands import Command
from tests.support.rank_traces import rank_trace, write_ranks
from tests.unit.analysis.traces.test_source_lines import STEPS as STEPS_WITH_STACKS

NCCL = H200 / "nccl_world1_3steps.json.gz"
GLOO = [H200 / f"gloo_2ranks_rank{rank}.json.gz" for rank in (0, 1)]
DOCUMENTED = ROOT / "docs" / "analyze-trace.md"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u0000"


@pytest.fixture
def analyze(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd, "analyze", "trace")


def test_one_rank_is_broken_down_and_not_joined(analyze: Command) -> None:
    report = analyze.json(NCCL)
    assert report["join"] is None and report["broken"] == [] and report["bound"] == "compute"
    (rank,) = report["ranks"]
    named = ("span_us", "compute_us", "non_compute_us", "idle_us", "communication_us", "exposed_communication_us")
    assert all(isinstance(rank[key], float) for key in named)
    assert rank["compute_us"] + rank["non_compute_us"] + rank["idle_us"] == pytest.approx(rank["span_us"])
    assert (rank["rank"], rank["file"], len(rank["steps"])) == (0, str(NCCL), 3)
    assert sum(rank["parts_us"].values()) == pytest.approx(rank["span_us"])


def test_two_gloo_ranks_are_joined_and_found_communication_bound(analyze: Command) -> None:
    report = analyze.json(*GLOO)
    assert report["bound"] == "communication" and report["findings"][0]["kind"] == "exposed_communication"
    join = report["join"]
    assert join["collectives_matched"] == 25 and sum(join["last_arrivals"].values()) == 25
    assert set(join["last_arrivals"]) == {"0", "1"} and join["clock_residual_us"] > 0
    assert join["verdict"] == "insufficient_data" and join["culprits"] == []


def test_three_broken_files_of_64_leave_the_other_61(tmp_path: Path, analyze: Command) -> None:
    folder = write_ranks(tmp_path, 64)
    (folder / "rank-7.json.gz").write_bytes(b"")
    (folder / "rank-20.json.gz").write_bytes(b"Segmentation fault\n")
    (folder / "rank-63.json.gz").write_bytes(gzip.compress(b'{"schemaVersion": 1}'))
    code, out, err = analyze(folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert [rank["rank"] for rank in report["ranks"]] == [rank for rank in range(64) if rank not in (7, 20, 63)]
    reasons = {Path(one["file"]).name: one["reason"] for one in report["broken"]}
    assert set(reasons) == {"rank-7.json.gz", "rank-20.json.gz", "rank-63.json.gz"}
    assert "empty" in reasons["rank-7.json.gz"]
    assert "JSON" in reasons["rank-20.json.gz"]
    assert "traceEvents" in reasons["rank-63.json.gz"]
    assert all(f"{name}: {reason}" in err for name, reason in reasons.items())
    assert "warning: 3 of 64 left out, 61 analysed" in err
    assert report["join"]["collectives_matched"] == 5 and report["join"]["verdict"] == "healthy"


def test_a_slow_rank_comes_first_and_is_in_the_table(tmp_path: Path, analyze: Command) -> None:
    code, out, _ = analyze(write_ranks(tmp_path, 20, slow=1.5))
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("Rank 5 is slow; costs ")
    table = [line.split() for line in lines[lines.index("") + 2 :][:4]]
    assert [row[0] for row in table] == ["min", "median", "max", "5"]
    assert "#5" in table[2], "whose the extreme is"
    assert "1. waiting for rank 5" in out


def test_ranks_that_cannot_be_compared_are_still_broken_down(monkeypatch: pytest.MonkeyPatch, analyze: Command) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a step of no length")

    monkeypatch.setattr("rankscope.analysis.traces.joins.join.join_traces", fails)
    code, out, err = analyze(*GLOO, "--json")
    report = json.loads(out)
    assert code == 0 and report["join"] is None and len(report["ranks"]) == 2
    assert report["notes"] and f"warning: {report['notes'][0]}" in err


def test_a_trace_of_unknown_rank_is_analysed_and_not_joined(tmp_path: Path, analyze: Command) -> None:
    for name, rank in (("one.json", 0), ("two.json", None), ("three.json", 1)):
        trace = rank_trace(rank or 0, 2)
        if rank is None:
            del trace["distributedInfo"]
        (tmp_path / name).write_text(json.dumps(trace))
    report = analyze.json(tmp_path)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, None]
    assert set(report["join"]["last_arrivals"]) == {"0", "1"}


def test_files_that_hold_nothing_are_refused_in_one_line(tmp_path: Path, analyze: Command) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"{")
    empty = tmp_path / "idle.json"
    empty.write_bytes(b'{"traceEvents": []}')
    for words in ([bad], [tmp_path / "none.json"], [empty], [tmp_path]):
        code, out, err = analyze(*words, "--json")
        assert (code, out) == (2, "")
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and "next step" in errors[0]
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [
        ("--parallelism", "pp=3,dp"),
        ("--parallelism", "pp=1"),
        ("--stages", "0,x"),
        ("--stages", "0"),
        ("--top", "0"),
        ("--html", "/nowhere/at/all.html"),
        ("--merged", "/nowhere/at/all.json.gz"),
    ],
)
def test_an_impossible_option_is_one_line_and_exit_code_2(words: tuple[str, str], analyze: Command) -> None:
    code, out, err = analyze(*GLOO, *words)
    assert (code, out) == (2, "")
    assert err.count("error:") == 1 and "next step" in err and "Traceback" not in err


def test_stages_are_outermost_in_a_layout() -> None:
    layout = read_layout("dp=2,pp=2,tp=2", None)
    assert layout is not None and layout.stages == 2
    assert layout.stage_of(range(8)) == dict(enumerate([0, 0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(LayoutError, match="that is 8 ranks, and there is a rank 8"):
        layout.stage_of([0, 8])


def test_stages_are_compared_when_the_layout_is_given(tmp_path: Path, analyze: Command) -> None:
    folder = write_ranks(tmp_path, 8, slow=1.5)
    assert analyze.json(folder)["join"]["culprits"] == [5]
    assert analyze.json(folder, "--parallelism", "pp=2,dp=4")["join"]["culprits"] == [5]
    # Alone in its stage it has no peer to be slower than.
    report = analyze.json(folder, "--stages", "0,0,0,0,0,1,0,0")
    assert (report["join"]["verdict"], report["join"]["stage"]) == ("slow_stage", 1)


class _Seen(HTMLParser):
    """What a browser would make of the page: tags in balance, nothing that runs or fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _page(path: Path) -> _Seen:
    seen = _Seen()
    seen.feed(path.read_text(encoding="utf-8"))
    seen.close()
    assert seen.open == []
    return seen


def test_the_page_shows_the_numbers_and_loads_nothing_external(tmp_path: Path, analyze: Command) -> None:
    target = tmp_path / "report.html"
    report = analyze.json(*GLOO, "--html", target, is_quiet=False)
    seen = _page(target)
    text = " ".join(seen.text)
    assert report["sentence"][1:] in text
    assert f"compute {report['ranks'][0]['parts_us']['compute'] / 1000:.1f} ms" in text, "hover text of the bars"
    assert "25 collectives matched" in text
    assert not seen.tags & {"script", "link", "iframe", "object", "base"}
    raw = target.read_text(encoding="utf-8")
    assert "http:" not in raw and "https:" not in raw and "url(http" not in raw
    assert all(name not in ("href", "src") or (value or "").startswith("data:") for name, value in seen.attributes)


def test_hostile_names_are_harmless_in_page_terminal_and_json(tmp_path: Path, analyze: Command) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    write_ranks(folder, 2, kernel=HOSTILE)
    target = tmp_path / "report.html"
    code, out, _ = analyze(folder, "--html", target)
    assert code == 0 and "\x1b[31m" not in out and "\x00" not in out and "alert(1)" in out
    seen = _page(target)
    assert not seen.tags & {"script", "img"}
    assert not any(name.startswith("on") for name, _ in seen.attributes)
    assert printable(HOSTILE) in [kernel["name"] for kernel in analyze.json(folder)["ranks"][0]["top_kernels"]]


def test_the_merged_trace_holds_every_rank_as_a_process(tmp_path: Path, analyze: Command) -> None:
    target = tmp_path / "merged.json.gz"
    assert analyze(*GLOO, "--merged", target)[0] == 0
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert len([name for name in names if "rank 0" in name.lower() or "rank 1" in name.lower()]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["merged.json.gz"], "nothing else is left behind"


def _paths(value: object, at: str = "") -> Iterator[str]:
    """`ranks[].steps[].idle_us`; keys that are ranks or names of parts are written {}."""
    if isinstance(value, dict):
        for key, inner in value.items():
            open_ended = at.rpartition(".")[2] in {"shares", "parts_us", "numbers"} or key.isdigit()
            yield from _paths(inner, f"{at}{{}}" if open_ended else f"{at}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, f"{at}[]")
    if at and not at.endswith(("[]", "{}")):
        yield at


def test_the_documented_json_keys_are_exactly_the_produced_ones(tmp_path: Path, analyze: Command) -> None:
    produced: set[str] = set()
    (tmp_path / "broken.json").write_bytes(b"no")
    phase = {"ph": "X", "name": "phase", "cat": "user_annotation", "pid": 9, "tid": 1, "ts": 1001, "dur": 300}
    (tmp_path / "stacks.json").write_text(json.dumps({"traceEvents": [*STEPS_WITH_STACKS, phase]}))
    for words in ([NCCL], GLOO, [write_ranks(tmp_path, 6, slow=1.5)], [tmp_path / "stacks.json", "--lines"]):
        produced |= set(_paths(analyze.json(*words, is_quiet=False)))
    schema = DOCUMENTED.read_text(encoding="utf-8").split("## JSON", 1)[1].split("\n## ", 1)[0]
    documented = {line.split("`")[1] for line in schema.splitlines() if line.startswith("| `")}
    assert produced - documented == set(), "not documented"
    # What these traces do not have: a pipeline, sharded parameters.
    absent = {path for path in documented - produced if ".bubble." in path or ".sharding." in path}
    assert documented - produced - absent == set(), "documented, but not there"


def test_help_teaches_with_an_example(analyze: Command) -> None:
    code, out, _ = analyze("--help")
    assert code == 0 and "rankscope analyze trace traces/ --html report.html" in out


def test_a_truncated_last_step_counts_in_totals_and_is_noted(tmp_path: Path, analyze: Command) -> None:
    content = rank_trace(0, 1)
    # The recording ended while the device was at the third step: its second kernel and all later ones are missing.
    last_kernel = [event for event in content["traceEvents"] if event["cat"] == "kernel"][4]
    content["traceEvents"] = [
        event for event in content["traceEvents"] if event["cat"] != "kernel" or event["ts"] <= last_kernel["ts"]
    ]
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(content))
    report = analyze.json(path)
    (rank,) = report["ranks"]
    assert [step["whole"] for step in rank["steps"]] == [True, True, False, False, False]
    assert rank["compute_us"] == pytest.approx(sum(step["compute_us"] for step in rank["steps"]))
    assert rank["span_us"] == pytest.approx(last_kernel["ts"] + last_kernel["dur"] - 1010)
    (note,) = report["notes"]
    assert "the last 3 steps (0 %" in note and "counted in the totals, not in step times" in note
    code, out, err = analyze(path)
    assert (code, err) == (0, "")
    assert "5 steps (2 whole)" in out and "note: rank 0: the recording ended before" in " ".join(out.split())
    typical_us = sum(step["duration_us"] for step in rank["steps"][:2]) / 2
    assert f"   0  {typical_us / 1000:.2f} ms" in out


@pytest.mark.parametrize("kind", ["empty kernels", "missing steps", "empty steps", "missing kernels"])
def test_no_warning_of_numpy_reaches_a_user(tmp_path: Path, analyze: Command, kind: str) -> None:
    for rank in range(4):
        content = rank_trace(rank, 4)
        kept = []
        for number, event in enumerate(content["traceEvents"]):
            is_kernel, is_step = event["cat"] == "kernel", event["name"].startswith("ProfilerStep")
            if kind == "missing steps" and is_step and rank == 3 and event["name"][-1] in "1234":
                continue
            if kind == "missing kernels" and is_kernel and rank >= 2 and number > 12:
                continue
            if (kind == "empty kernels" and is_kernel) or (kind == "empty steps" and is_step and number % 2):
                event = {**event, "dur": 0}
            kept.append(event)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({**content, "traceEvents": kept}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for more in ([], ["--parallelism", "pp=2,dp=2,tp=1"], ["--html", tmp_path / "page.html"]):
            code, _, err = analyze(*sorted(tmp_path.glob("*.json")), *more)
            assert code == 0 and "report" not in err.replace("wrote", "")


def test_lines_and_modules_are_listed_with_time_and_memory(analyze: Command, tmp_path: Path) -> None:
    (tmp_path / "stacks.json").write_text(json.dumps({"traceEvents": STEPS_WITH_STACKS}))
    code, out, err = analyze(tmp_path / "stacks.json", "--lines")
    assert (code, err) == (0, "")
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert ["80.0 %", "30 µs", "50 µs", "0", "1,000 B", "2.15 KiB", "Linear", "model.py:5 forward"] in rows
    assert ["84.0 %", "34 µs", "50 µs", "1,000 B", "2.15 KiB", "1", "Net"] in rows
    assert "device time of a step, over 2 steps" in out
    code, out, _ = analyze(tmp_path / "stacks.json")
    assert "model.py" not in out


def test_lines_without_stacks_say_how_to_get_them(analyze: Command) -> None:
    code, out, err = analyze(NCCL, "--lines")
    assert code == 0 and "with_stack=True" in err and "lines of rank" not in out
    assert analyze.json(NCCL, "--lines", is_quiet=False)["ranks"][0]["lines"] is None


def test_names_of_lines_cannot_control_the_terminal(analyze: Command, tmp_path: Path) -> None:
    hostile = f"model.py(5): [red]{HOSTILE}"
    events = [one | {"name": one["name"].replace("model.py(5): forward", hostile)} for one in STEPS_WITH_STACKS]
    (tmp_path / "stacks.json").write_text(json.dumps({"traceEvents": events}))
    code, out, _ = analyze(tmp_path / "stacks.json", "--lines")
    assert code == 0 and "[red]" in out and "\x1b" not in out and "\0" not in out


def test_every_format_of_the_device_flame_graph_holds_equal_time(analyze: Command, tmp_path: Path) -> None:
    kernels = {rank["rank"]: rank["top_kernels"] for rank in analyze.json(*GLOO, "--top", 1000)["ranks"]}
    nanos = {rank: sum(round(1000 * one["total_us"]) for one in listed) for rank, listed in kernels.items()}
    for ending in (".pb.gz", ".json", ".folded", ".html"):
        code, out, err = analyze(*GLOO, "--flame", tmp_path / f"gpu{ending}")
        assert code == 0 and f"wrote {tmp_path}/gpu{ending}: 1,446 kernels" in err and "rank" in out
    profile = pb.Profile.FromString(gzip.decompress((tmp_path / "gpu.pb.gz").read_bytes()))
    texts = profile.string_table
    assert texts[profile.default_sample_type] == texts[profile.sample_type[1].type] == "device"
    of_rank: dict[int, int] = {}
    for sample in profile.sample:
        (rank,) = (label.num for label in sample.label if texts[label.key] == "rank")
        of_rank[rank] = of_rank.get(rank, 0) + sample.value[1]
    assert of_rank == nanos
    speedscope = json.loads((tmp_path / "gpu.json").read_text())["profiles"]
    assert [(one["name"], one["endValue"]) for one in speedscope] == [(f"rank {rank}", nanos[rank]) for rank in (0, 1)]
    folded = (tmp_path / "gpu.folded").read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in folded) == sum(nanos.values())
    assert folded[0].startswith("DistributedDataParallel.forward;aten::linear;aten::addmm;")
    page = (tmp_path / "gpu.html").read_text()
    (own,) = re.findall(r'"own":\[([\d,]*)\]', page)
    assert sum(map(int, own.split(","))) == sum(nanos.values()) and "2 ranks: time on the device" in page


def test_an_unknown_flame_graph_format_is_refused_before_reading(analyze: Command, tmp_path: Path) -> None:
    code, out, err = analyze(tmp_path / "absent.json", "--flame", "gpu.svg")
    assert code == 2 and not out and "name FILE.html, .pb.gz, .json or .folded" in err and "absent" not in err


def test_a_flame_graph_without_a_device_is_empty_and_explained(analyze: Command, tmp_path: Path) -> None:
    operator = {"ph": "X", "name": "aten::add", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "cpu.json").write_text(json.dumps({"traceEvents": [operator]}))
    code, _, err = analyze(tmp_path / "cpu.json", "--flame", tmp_path / "gpu.folded")
    assert code == 0 and "nothing ran on a device" in err and (tmp_path / "gpu.folded").read_bytes() == b""
