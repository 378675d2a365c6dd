from __future__ import annotations

import math

import pytest

from rankscope.analysis.traces.joins.comparison import LiveSteps
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.request import kept_text, kept_verdict, length_of, options_of, patience_of, start_of
from rankscope.v1.capture_service_pb2 import CaptureOptions, StartCaptureRequest
from rankscope.v1.job_service_pb2 import Cause, Verdict
from rankscope.v1.window_pb2 import FrameShare


def test_a_length_is_steps_or_seconds() -> None:
    assert length_of(StartCaptureRequest(steps=3), {}, ()) == (3, None)
    assert length_of(StartCaptureRequest(seconds=0.5), {}, ()) == (None, 0.5)


def test_without_a_length_the_noise_of_the_steps_decides() -> None:
    quiet = {rank: LiveSteps(0.1, own, own - 0.001, own + 0.001) for rank, own in ((0, 0.04), (1, 0.09))}
    noisy = {rank: LiveSteps(0.1, own, own - 0.03, own + 0.03) for rank, own in ((0, 0.04), (1, 0.09))}
    few, none = length_of(StartCaptureRequest(), quiet, [1])
    many, _ = length_of(StartCaptureRequest(), noisy, [1])
    assert few is not None and many is not None and none is None
    assert few < many
    # All windows together are bounded.
    repeated = StartCaptureRequest(options=CaptureOptions(repeat=20))
    assert length_of(repeated, noisy, [1]) == (5, None)
    assert length_of(StartCaptureRequest(), {}, ()) == (None, 3.0)


def test_a_kept_verdict_is_bounded_and_printable() -> None:
    frames = [FrameShare(function="f\x1b[2J" + 9999 * "x", file="a\nb", line=3) for _ in range(99)]
    verdict = Verdict(culprits=range(999), reason=9999 * "y", cause=Cause(frames=frames, phase="p\n"))
    kept = kept_verdict(verdict)
    assert kept.ByteSize() < 4096
    (frame,) = kept.cause.frames
    assert all(text.isprintable() for text in (frame.file, frame.function, kept.cause.phase))


@pytest.mark.parametrize(
    "request_",
    [
        StartCaptureRequest(steps=0),
        StartCaptureRequest(steps=101),
        StartCaptureRequest(seconds=0),
        StartCaptureRequest(seconds=-1),
        StartCaptureRequest(seconds=61),
        StartCaptureRequest(seconds=math.nan),
        StartCaptureRequest(seconds=math.inf),
    ],
)
def test_a_length_out_of_bounds_is_refused(request_: StartCaptureRequest) -> None:
    with pytest.raises(CaptureError):
        length_of(request_, {}, ())


def test_a_schedule_and_its_total_recording_are_bounded() -> None:
    plain = options_of(StartCaptureRequest(steps=100))
    assert (plain.wait_steps, plain.warmup_steps, plain.repeat, plain.is_scheduled) == (0, None, 1, False)
    schedule = CaptureOptions(wait_steps=1000, warmup_steps=0, repeat=20)
    asked = options_of(StartCaptureRequest(steps=5, options=schedule))
    assert (asked.wait_steps, asked.warmup_steps, asked.repeat, asked.is_scheduled) == (1000, 0, 20, True)
    for request in (
        StartCaptureRequest(steps=6, options=schedule),
        StartCaptureRequest(seconds=3.1, options=schedule),
        StartCaptureRequest(steps=1, options=CaptureOptions(wait_steps=1001)),
        StartCaptureRequest(steps=1, options=CaptureOptions(warmup_steps=101)),
        StartCaptureRequest(steps=1, options=CaptureOptions(repeat=21)),
    ):
        with pytest.raises(CaptureError):
            options_of(request)


def test_patience_is_bounded() -> None:
    assert patience_of(StartCaptureRequest()) == 60
    assert patience_of(StartCaptureRequest(patience_seconds=0)) == 0
    for seconds in (-1.0, 601.0, math.nan):
        with pytest.raises(CaptureError):
            patience_of(StartCaptureRequest(patience_seconds=seconds))


def test_a_start_is_the_earliest_unless_requested_later() -> None:
    assert start_of(StartCaptureRequest(), 1000.0) == 1000.0
    assert start_of(StartCaptureRequest(start_unix_millis=1_010_000), 1000.0) == 1010.0


@pytest.mark.parametrize("millis", [0, 990_000, 2_000_000])
def test_a_start_ranks_cannot_keep_is_refused(millis: int) -> None:
    with pytest.raises(CaptureError, match="clocks of the nodes"):
        start_of(StartCaptureRequest(start_unix_millis=millis), 1000.0)


def test_words_of_a_caller_are_kept_as_one_short_line() -> None:
    assert kept_text("why\nnot\x1b[31m" + "x" * 1000).startswith("why not")
    assert len(kept_text("x" * 1000)) == 512
