"""What py-spy prints: the names of files, functions and threads in it are the training process' own."""

from __future__ import annotations

from rankscope.analysis.profiles.phases import PHASES, phase_of
from rankscope.daemon.export.rank_metrics import RankReport, RankTotals, add_window, rank_metrics
from rankscope.daemon.samples import ProcessSample, RankProcess, Span, StallDump
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.pyspy_output import (
    MAX_FRAMES_PER_STACK,
    MAX_NAME_LENGTH,
    parse_dump,
    parse_errors,
    parse_recording,
)
from rankscope.daemon.stacks.recording import MAX_FRAMES, summarise
from rankscope.daemon.windows.stalls import StallWatch
from rankscope.daemon.windows.window import RankSamples, assemble
from tests.fuzz.checking import check_message, check_metrics, check_text
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = recorded("pyspy")
TOKENS = [
    *(
        b"thread (",
        b"): MainThread;",
        b" (",
        b");",
        b".py:",
        b") 1\n",
        b"<module> (train.py:1)",
        b"/torch/",
        b" 999999999\n",
    ),
    *(b"Samples: ", b" Errors: ", b"forward (/x/torch/nn/modules/module.py:1)", b"Error: ", b"Permission denied"),
    *(b"backward (/x/torch/autograd/__init__.py:2)", b"all_reduce (/x/torch/distributed/distributed_c10d.py:3)"),
]
_RANK = RankProcess("j", 0, 0, 2, 23305, 7, (23305,))
_SPAN = Span(1_790_000_000_000_000_000, 1_790_000_005_000_000_000)
_IDLE = ProcessSample(0.0, None, None, None, None, None, None, None)
_WORDS = (
    "MainThread",
    "frames",
    "name",
    "filename",
    "line",
    "thread_name",
    "os_thread_id",
    "/x/torch/nn/modules/module.py",
)


def run(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    _check_recording(text)
    _check_dump(text)
    assert 0 <= parse_errors(text) < 10**12
    for is_alive in (True, False):
        problem = pyspy.explain_failure(_RANK, None, text, is_alive)
        assert problem.kind.isidentifier()
        problem = pyspy.explain_failure(_RANK, pyspy.Ended(1, 0.0), text, is_alive)
        assert problem.kind.isidentifier() and len(problem.text) < 4096, len(problem.text)


def _check_recording(text: str) -> None:
    recording = parse_recording(text, {23305})
    assert 0 <= recording.garbled_lines <= text.count("\n") + 1
    for stack in recording.stacks:
        assert len(stack) <= MAX_FRAMES_PER_STACK
        for frame in stack:
            check_text(frame.function, MAX_NAME_LENGTH + 1)
            check_text(frame.file, MAX_NAME_LENGTH + 1)
    sample = summarise(recording.stacks, parse_errors(text) + recording.garbled_lines, _SPAN)
    assert len(sample.frames) <= MAX_FRAMES and set(sample.phase_counts) <= set(PHASES)
    samples = RankSamples(process=_IDLE, stacks=sample)
    stall = StallWatch(None).observe(_RANK, samples, _SPAN)
    window = assemble(_RANK, "node", _SPAN, 1, samples, lambda _: None, stall)
    check_message(window)
    report = RankReport(window, add_window(RankTotals(), window))
    check_metrics(rank_metrics([report], full=True), series=80, data=text.encode())


def _check_dump(text: str) -> None:
    try:
        stack = parse_dump(text, {23305})
    except (ValueError, RecursionError):  # what dumping.py takes
        return
    if not stack:
        return
    assert len(stack) <= MAX_FRAMES_PER_STACK
    dump = StallDump(phase_of(stack), stack)
    assert dump.phase in PHASES
    watch = StallWatch(lambda ranks: {rank.key: dump for rank in ranks})
    samples = RankSamples(process=_IDLE, stacks=summarise({stack: 20}, 0, _SPAN))
    for number in range(3):
        span = Span(_SPAN.start_unix_nanos + number, _SPAN.end_unix_nanos + number)
        samples = RankSamples(process=_IDLE, stacks=summarise({stack: 20}, 0, span))
        stall = watch.observe(_RANK, samples, span)
        watch.fetch_stacks(100.0 * number)
        watch.join()
    window = assemble(_RANK, "node", _SPAN, 1, samples, lambda _: None, stall)
    check_message(window)


def mutator(plain: Mutator) -> JsonMutator:
    return JsonMutator(plain, _WORDS)
