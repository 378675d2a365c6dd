"""The period of made and of recorded sequences of operations. A letter is an operation, a dot a pause of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankscope.daemon.steps.operation_period import Meetings, Period, find_period

RECORDINGS = sorted((Path(__file__).parents[2] / "data" / "nccl").glob("*.npz"))
MS = 1_000_000
BYTES = {"A": 1 << 20, "B": 1 << 21, "C": 1 << 24, "a": 4, "b": 8, "t": 16}
FUNCTION = {"A": 1, "B": 2, "C": 3, "a": 1, "b": 4, "t": 1}  # A, a and t share one sequence
GAP_NS, LASTS_NS, PAUSE_NS = 10_000, 100_000, 2 * MS


def played(text: str, *, lasts: Mapping[int, int] | None = None, pause_ns: int = PAUSE_NS, first: int = 0) -> Meetings:
    """The operations of a text; `x` is one of another group. `lasts` has what some operations last, by their place."""
    rows, counts, now, others = [], dict.fromkeys(FUNCTION.values(), first), 0, 0
    for letter in text.replace(" ", ""):
        if letter == ".":
            now += pause_ns
        elif letter == "x":
            others += 1
        else:
            function = FUNCTION[letter]
            start = now + GAP_NS
            now = start + (lasts or {}).get(len(rows), LASTS_NS)
            rows.append((7, function, BYTES[letter], counts[function], start, now, others))
            counts[function] += 1
    return Meetings(*np.array(rows, dtype=np.int64).reshape(-1, 7).T)


def per_step(text: str) -> int | None:
    """Operations of a step."""
    period = find_period(played(text))
    return None if period is None else period.shape[-1]


@pytest.mark.parametrize(
    ("step", "operations"),
    [
        ("ABC", 3),
        ("ABAB C", 5),  # accumulated gradients
        ("AB" * 40 + "C", 81),
        ("A" * 100 + "t", 101),
        ("." + "A" * 100, 100),
        ("." + "A" * 99 + "t", 100),
        (".A", 1),
        ("ab", 2),
        ("b" + "A" * 4 + ".", 5),
    ],
)
def test_the_smallest_repetition_is_the_step(step: str, operations: int) -> None:
    assert per_step(step * 20) == operations


@pytest.mark.parametrize(
    "text",
    [
        "A" * 2000,  # nothing marks a step
        "ABC" * 8,  # too few
        ("AAB" + "AB") * 40,  # no operation comes once a step
        ("." + "A" * 7 + "." + "A" * 5) * 30,
        ("AB" * 8 + "C") * 8,  # what repeats is a part of the step
        (".AA" * 5 + "t") * 20,  # five steps and a log, or a step with five pauses
        ("AABAB" * 5 + "a") * 20,  # five steps and a log, or a step of five parts
        "",
        "A",
    ],
)
def test_what_may_be_no_step_or_several_is_none(text: str) -> None:
    assert per_step(text) is None


def test_random_sequences_have_no_period() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        assert per_step("".join(random.choice([*"ABC.abt"], 2000))) is None


def test_logging_now_and_then_ends_no_step() -> None:
    steps = [f"ABaC{'aa' if number % 5 == 0 else ''}" for number in range(60)]
    period = find_period(played("".join(steps)))
    assert period is not None and period.shape[1:] == (3, BYTES["C"], 4)
    assert len(period.ends) == 60


def test_logging_between_bursts_ends_no_step() -> None:
    steps = [f".{'A' * 50}{'a' if number % 10 == 0 else ''}" for number in range(60)]
    period = find_period(played("".join(steps)))
    assert period is not None and period.shape[-1] == 50
    assert len(period.ends) == 60


def test_numbers_of_steps_are_the_same_on_all_ranks() -> None:
    """Rank 1 is late before each step; the others wait for it in the first operation of each burst. Rank 2's records
    begin later."""
    bursts = ("." + "A" * 100) * 30
    late = find_period(played(bursts, pause_ns=20 * MS))
    waiting = find_period(played(bursts, lasts={100 * number: 18 * MS for number in range(30)}))
    later = played(bursts).take(slice(1234, None))
    assert late is not None and waiting is not None and late.shape == waiting.shape
    numbers = [numbers_by_sequence(played(bursts), late), numbers_by_sequence(played(bursts), waiting)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 30
    some = find_period(later)
    assert some is not None and numbers_by_sequence(later, some).items() <= numbers[0].items()


def numbers_by_sequence(meetings: Meetings, period: Period) -> dict[int, int]:
    return dict(zip(meetings.sequence[period.ends].tolist(), period.numbers.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_the_machine_hides_no_bursts(seed: int) -> None:
    """A tenth of the gaps is long, for as much as two pauses; pauses vary, and every tenth is longer."""
    random = np.random.default_rng(seed)
    whole = played(("." + "A" * 100) * 60)
    late = random.exponential(PAUSE_NS, len(whole)) * (random.random(len(whole)) < 0.1)
    late[::100] += random.uniform(0, PAUSE_NS, 60)
    late[::1000] += 10 * PAUSE_NS
    shift = np.cumsum(late).astype(np.int64)
    period = find_period(replace(whole, start_ns=whole.start_ns + shift, stop_ns=whole.stop_ns + shift))
    assert period is not None and period.shape[-1] == 100
    assert (period.ends % 100 == 99).all()


def test_layers_of_a_model_are_no_steps() -> None:
    """Attention and MLP take turns, 32 layers are a token, and 10 tokens are an answer."""
    layers = played("A" * 64 * 100)
    late = np.tile([200_000, 350_000], 3200)
    late[::64] += PAUSE_NS
    late[::640] += 20 * PAUSE_NS
    shift = np.cumsum(late)
    period = find_period(replace(layers, start_ns=layers.start_ns + shift, stop_ns=layers.stop_ns + shift))
    assert period is not None and period.shape[-1] == 64
    assert (period.ends % 64 == 63).all()


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_marks_no_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = played("A" * 6000)
    late = random.exponential(PAUSE_NS, len(whole)) * (random.random(len(whole)) < random.uniform(0.005, 0.3))
    shift = np.cumsum(late).astype(np.int64)
    assert find_period(replace(whole, start_ns=whole.start_ns + shift, stop_ns=whole.stop_ns + shift)) is None


def test_a_start_up_is_no_part_of_the_loop() -> None:
    assert per_step("bAbBbC" * 3 + "t" * 100 + "ABC" * 40) == 3


def test_one_evaluation_is_passed_over() -> None:
    text = "ABC" * 30 + "BBBBBBBB" + "ABC" * 30
    period = find_period(played(text))
    assert period is not None and period.shape[-1] == 3
    assert period.ends[0] >= 90, "steps before it are not handed on with it"


def test_a_loop_that_came_before_is_forgotten() -> None:
    first, second = "ABC" * 500, "ab" * 20
    assert per_step(first + second) is None
    assert per_step(first + "." * 6000 + second) == 2


def test_missing_records_begin_the_sequence_anew() -> None:
    whole = played("ABC" * 60)
    rows = np.r_[:70, 73:180]
    assert find_period(whole.take(rows[:90])) is None
    period = find_period(whole.take(rows))
    assert period is not None and period.ends[0] >= 70


def test_replays_of_a_graph_have_one_number_and_no_steps() -> None:
    text = "ABC" * 60
    replayed = played(text)
    replayed.sequence[:] = 5
    assert find_period(replayed) is None


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_steps_are_found_or_nothing(path: Path) -> None:
    """At whatever time a look is taken, on the first rank and on the last. In each recording, NCCL is asked in half of
    the steps."""
    recording = np.load(path)
    ranks = sum(name.startswith("nccl_") for name in recording.files)
    looked_at = (0, ranks - 1)
    tables = [_meetings(recording, rank, ranks) for rank in looked_at]
    known: list[dict[tuple[int, ...], int]] = []
    for (meetings, issued_ns), steps in zip(tables, (recording[f"steps_{rank}"] for rank in looked_at), strict=True):
        host_end_ns = steps["host_end_ns" if "host_end_ns" in steps.dtype.names else "end_ns"]
        numbers: dict[tuple[int, ...], int] = {}
        for length in range(0, len(meetings), 24):
            period = find_period(meetings.take(slice(length)))
            if period is not None:
                true_step = np.searchsorted(host_end_ns, issued_ns[period.ends])
                assert (np.diff(true_step) == 1).all(), f"{period.shape} at {length}"
                ends = zip(meetings.sequence[period.ends].tolist(), period.numbers.tolist(), strict=True)
                numbers |= {(*period.shape, sequence): number for sequence, number in ends}
        known.append(numbers)
    for numbers in known[1:]:
        both = numbers.keys() & known[0].keys()
        assert all(numbers[key] == known[0][key] for key in both)
        assert len(both) >= 0.9 * max(len(numbers), len(known[0]))
    has_period = path.stem.startswith(("dp4", "ep2", "deepspeed_pp4"))
    assert bool(known[0]) is has_period, "the others have no operation of all ranks that comes once a step"


def _meetings(recording: Mapping[str, np.ndarray], rank: int, ranks: int) -> tuple[Meetings, np.ndarray]:
    records = recording[f"nccl_{rank}"]
    records = records[np.argsort(records["issued_ns"], kind="stable")]
    world = [number & 0xFFFFFFFF for number, size, _ in recording[f"comms_{rank}"].tolist() if size == ranks]
    meets = np.isin(records["communicator"], world) & (records["function"] < 9)
    chosen = records[meets]
    names = ("communicator", "function", "bytes", "sequence", "start_ns", "stop_ns")
    columns = [chosen[name].astype(np.int64) for name in names]
    return Meetings(*columns, np.cumsum(~meets)[meets]), chosen["issued_ns"].astype(np.int64)
