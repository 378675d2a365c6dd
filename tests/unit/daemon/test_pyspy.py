from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

import rankscope.daemon
from rankscope.analysis.profiles.frames import Frame
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.pyspy_output import Recording, parse_dump, parse_errors, parse_recording
from rankscope.daemon.stacks.recording import summarise
from rankscope.daemon.windows.window import stack_summary
from tests.unit.daemon import window_makers as make

RANK = RankProcess("job", 3, 3, 4, 4121, 100, (4121, 7))


def test_no_command_that_stops_the_target_can_be_started() -> None:
    program = Path("/bin/py-spy")
    assert "--nonblocking" in pyspy.record_command(program, 1, 2, 10)
    assert "--nonblocking" in pyspy.dump_command(program, 1)
    with pytest.raises(ValueError, match="--nonblocking"):
        pyspy.Child(["/bin/true"])


def test_every_command_aimed_at_a_process_is_nonblocking() -> None:
    """The refusal above guards one door; this looks for others."""
    commands = [
        {part.value for part in node.elts if isinstance(part, ast.Constant)}
        for folder in rankscope.daemon.__path__
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.List, ast.Tuple))
    ]
    pointed = [command for command in commands if command & {"--pid", "-p"}]
    assert pointed
    assert all("--nonblocking" in command for command in pointed)


def test_a_recording_is_the_stacks_of_the_main_thread() -> None:
    text = (
        "thread (9): Worker;run (/t.py:1) 5\n"
        "thread (7): MainThread;<module> (/t.py:9);forward (/m.py:3) 4\n"
        "thread (7): MainThread;<module> (/t.py:9);backward (/m.py:8) 2\n"
    )
    stacks = parse_recording(text, {4121, 7}).stacks
    assert stacks == {
        (Frame("forward", "/m.py", 3), Frame("<module>", "/t.py", 9)): 4,
        (Frame("backward", "/m.py", 8), Frame("<module>", "/t.py", 9)): 2,
    }


def test_an_unknown_main_thread_is_found_by_name_then_torch() -> None:
    nameless = "thread (9);run (/t.py:1) 5\nthread (8);step (/x/torch/optim/adam.py:2) 1\n"
    assert list(parse_recording(nameless, {1}).stacks) == [(Frame("step", "/x/torch/optim/adam.py", 2),)]
    named = nameless + "thread (3): MainThread;main (/t.py:4) 1\n"
    assert list(parse_recording(named, {1}).stacks) == [(Frame("main", "/t.py", 4),)]
    assert not parse_recording("thread (9);run (/t.py:1) 5\n", {1}).stacks


def test_threads_of_old_pythons_have_addresses_for_ids() -> None:
    """As py-spy prints them before Python 3.11."""
    alone = "thread (0xFFFF92731020);<module> (/t.py:8) 15\n"
    assert parse_recording(alone, {1}) == Recording(Counter({(Frame("<module>", "/t.py", 8),): 15}))
    threads = (
        "thread (0xFFFF92731020): MainThread;main (/t.py:4) 6\n"
        "thread (0xFFFF7A1FF1A0): Thread-1;run (/t.py:1) 5\n"
        "thread (0xFFFF7A1FF2B0);_worker_loop (/x/torch/utils/data/_utils/worker.py:2) 9\n"
    )
    assert parse_recording(threads, {1}) == Recording(Counter({(Frame("main", "/t.py", 4),): 6}))


LOOP = "<module> (/t.py:9);Tensor.backward (/x/torch/_tensor.py:6);_engine_run_backward (/x/torch/autograd/graph.py:8)"
ENGINE = (
    Frame("_engine_run_backward", "/x/torch/autograd/graph.py", 8),
    Frame("Tensor.backward", "/x/torch/_tensor.py", 6),
    Frame("<module>", "/t.py", 9),
)
FORWARD = (Frame("forward", "/m.py", 3), Frame("<module>", "/t.py", 8))
SCALE = (Frame("Scale.backward", "/m.py", 7), Frame("BackwardCFunction.apply", "/x/torch/autograd/function.py", 3))
CUDA = (
    f"thread (7): MainThread;{LOOP} 30\n"
    "thread (7): MainThread;<module> (/t.py:8);forward (/m.py:3) 10\n"
    "thread (28);BackwardCFunction.apply (/x/torch/autograd/function.py:3);Scale.backward (/m.py:7) 18\n"
    "thread (28);hook (/m.py:12);all_reduce (/x/torch/distributed/distributed_c10d.py:5) 4\n"
    "thread (28) 18\n"
    "thread (31);poll (/c.py:2) 40\n"
    "thread (9): Thread-1 (_pin_memory_loop);run (/t.py:1) 40\n"
)


def test_work_on_autograds_threads_counts_as_backward() -> None:
    stacks = parse_recording(CUDA, {7}, lambda: {28}).stacks
    collective = (Frame("all_reduce", "/x/torch/distributed/distributed_c10d.py", 5), Frame("hook", "/m.py", 12))
    assert stacks == {FORWARD: 10, (*SCALE, *ENGINE): 18, (*collective, *ENGINE): 4, ENGINE: 8}
    phases = summarise(stacks, 0, make.span()).phase_counts
    assert phases == {"other": 10, "backward_code": 18, "communication": 4, "backward": 8}


def test_threads_that_are_not_autograds_change_nothing() -> None:
    alone = {FORWARD: 10, ENGINE: 30}
    assert parse_recording(CUDA, {7}).stacks == alone
    assert parse_recording(CUDA, {7}, lambda: {9}).stacks == alone, "Python started it and named it"


def test_autograd_samples_never_exceed_the_training_threads_wait() -> None:
    """Several devices have a thread each, and threads are not read in the same instant."""
    busy = CUDA + "thread (29);hook (/m.py:12) 40\n"
    stacks = parse_recording(busy, {7}, lambda: {28, 29}).stacks
    assert stacks.total() == 40
    assert ENGINE not in stacks
    not_waiting = CUDA.replace("_engine_run_backward", "somewhere_else")
    assert parse_recording(not_waiting, {7}, lambda: {28}).stacks.total() == 40


def test_thread_names_are_read_only_for_backward_python_code() -> None:
    def unexpected() -> set[int]:
        raise AssertionError("asked")

    parse_recording(f"thread (7): MainThread;{LOOP} 30\nthread (28) 18\n", {7}, unexpected)
    parse_recording("thread (7): MainThread;main (/t.py:8) 30\nthread (28);hook (/m.py:12) 3\n", {7}, unexpected)


def test_a_dump_of_a_backward_shows_where_autograds_thread_stands() -> None:
    def thread(number: int, name: str | None, stack: tuple[Frame, ...]) -> dict[str, object]:
        frames = [{"name": frame.function, "filename": frame.file, "line": frame.line} for frame in stack]
        return {"os_thread_id": number, "thread_name": name, "frames": frames}

    dump = json.dumps([thread(31, None, FORWARD), thread(28, "Dummy-1", SCALE), thread(7, "MainThread", ENGINE)])
    assert parse_dump(dump, {7}, lambda: {28}) == (*SCALE, *ENGINE)
    assert parse_dump(dump, {7}) == ENGINE


def test_autograd_threads_are_found_under_ids_of_all_namespaces(tmp_path: Path) -> None:
    for number, name in ((4121, "python"), (4140, "pt_autograd_0"), (4141, "pt_nccl_watchdg"), (4142, "pt_autograd_1")):
        folder = tmp_path / "task" / str(number)
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "status").write_text(f"Name:\t{name}\nNSpid:\t{number}\t{number - 4100}\n")
    assert pyspy.engine_threads(str(tmp_path)) == {4140, 40, 4142, 42}
    assert pyspy.engine_threads(str(tmp_path / "gone")) == frozenset()


def test_strange_file_names_do_not_break_the_frames_around_them() -> None:
    text = "thread (7);a (/x;y (c:3).py:3);b (/a b (1).py:2);c (<string>);d (/z.py:1) 19\n"
    (stack,) = parse_recording(text, {7}).stacks
    assert stack == (
        Frame("d", "/z.py", 1),
        Frame("c", "<string>", 0),
        Frame("b", "/a b (1).py", 2),
        Frame("a", "/x;y (c:3).py", 3),
    )


def test_garbled_lines_are_counted_and_the_rest_is_read() -> None:
    text = "thread (7);a (/x.py:1) 3\nthread (7);b (/line\nbreak.py:1) 2\nnonsense\nthread (7);c 1\n"
    recording = parse_recording(text, {7})
    assert recording.stacks == {(Frame("a", "/x.py", 1),): 3}
    assert recording.garbled_lines == 4


def test_names_that_could_steer_a_terminal_are_defused_and_bounded() -> None:
    (stack,) = parse_recording(f"thread (7);\x1b[2J (/{'d' * 9000}/m.py:1) 1\n", {7}).stacks
    assert stack[0].function == "�[2J"
    assert len(stack[0].file) < 300
    assert stack[0].file.endswith("/m.py")


def test_crafted_text_takes_linear_time() -> None:
    parse_recording("thread (7);" + "a (" * 80_000 + " 1\n" + "a (b);" * 40_000 + "\n", {7})


def test_the_tally_of_errors_is_read() -> None:
    assert parse_errors("py-spy> Wrote raw … Samples: 154 Errors: 2\n") == 2
    assert parse_errors("") == 0


def test_a_dump_gives_the_main_threads_stack_or_raises() -> None:
    frame = '{"name": "f", "filename": "/t.py", "line": 3}'
    text = f'[{{"os_thread_id": 1, "frames": []}}, {{"os_thread_id": 7, "frames": [{frame}]}}]'
    assert parse_dump(text, {7}) == (Frame("f", "/t.py", 3),)
    for nonsense in ("", "{}", "[1]", '[{"frames": 3}]', '[{"frames": [3]}]'):
        with pytest.raises(ValueError, match=r"."):
            parse_dump(nonsense, {7})


@pytest.mark.parametrize("line", ["true", "4294967296", "-1", "1e3", "null"])
def test_a_line_number_that_none_can_be_is_unknown(line: str) -> None:
    frame = f'{{"name": "f", "filename": "/t.py", "line": {line}}}'
    stack = parse_dump(f'[{{"os_thread_id": 7, "frames": [{frame}]}}]', {7})
    assert stack is not None and repr(stack[0].line) == "0"


def test_forged_counts_of_samples_do_not_overflow_the_message() -> None:
    forged = "".join(f"thread (7): MainThread;f (a.py:{line}) 999999999\n" for line in range(1, 7))
    sample = summarise(parse_recording(forged, {7}).stacks, 10**12, make.span())
    message = stack_summary(sample)
    assert message.samples == message.errors == 2**32 - 1 and message.distinct_stacks == 6


def test_failures_name_the_rank_the_reason_and_the_next_step() -> None:
    failed = pyspy.Ended(1, 0.0)
    denied = pyspy.explain_failure(RANK, failed, "Permission Denied: Try running again with 'sudo env'", True)
    assert denied.kind == "permission"
    assert denied.text == (
        "rank 3 (pid 4121): py-spy could not read memory: EPERM; "
        "the daemon needs CAP_SYS_PTRACE (see docs/troubleshooting.md)"
    )
    assert pyspy.explain_failure(RANK, failed, "Error: No such process", False).kind == "died"
    assert pyspy.explain_failure(RANK, None, "", True).kind == "timeout"
    log = "Error: Failed to find python version\n\nCaused by:\n   0: nope\n\nStack backtrace:\n   0: rust\n"
    unreadable = pyspy.explain_failure(RANK, failed, log, True)
    assert unreadable.kind == "unreadable"
    assert unreadable.text.endswith("(exit status 1): Failed to find python version Caused by: 0: nope")
