"""Hangs by their causes, with stalls as daemons report them of real jobs, and what only takes long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rankscope.analysis.profiles.stack_groups import PLACES_NAMED
from rankscope.analysis.verdicts.hang import HangWatch, find_hang
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, FIXED
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import UNREADABLE, JobWindow, Stall, columns_of

TORCH = "/venv/lib/python3.12/site-packages/torch"
PYTHON = "/usr/lib/python3.12"
MAIN = "main (/app/train.py:80)"
IN_BACKWARD = (
    f"_engine_run_backward ({TORCH}/autograd/graph.py:979)",
    f"backward ({TORCH}/autograd/__init__.py:395)",
    f"Tensor.backward ({TORCH}/_tensor.py:648)",
    MAIN,
)
IN_BARRIER = (
    f"barrier ({TORCH}/distributed/distributed_c10d.py:4820)",
    f"wrapper ({TORCH}/distributed/c10d_logger.py:81)",
    "synchronize (/app/train.py:61)",
    MAIN,
)
IN_LOADER = (
    f"select ({PYTHON}/selectors.py:415)",
    f"get ({PYTHON}/multiprocessing/queues.py:113)",
    f"_MultiProcessingDataLoaderIter._try_get_data ({TORCH}/utils/data/dataloader.py:1275)",
    f"_BaseDataLoaderIter.__next__ ({TORCH}/utils/data/dataloader.py:734)",
    MAIN,
)
IN_WORKER = (
    "read_shard (/app/dataset.py:31)",
    "Shards.__getitem__ (/app/dataset.py:40)",
    f"fetch ({TORCH}/utils/data/_utils/fetch.py:52)",
    *IN_LOADER,
)
IN_CHECKPOINT = (
    f"_open_zipfile_writer_file.__init__ ({TORCH}/serialization.py:828)",
    f"save ({TORCH}/serialization.py:1002)",
    "save_checkpoint (/app/ckpt.py:51)",
    MAIN,
)
IN_CHECKPOINT_GATHER = (
    f"all_gather_object ({TORCH}/distributed/distributed_c10d.py:3100)",
    f"_DistWrapper.all_reduce ({TORCH}/distributed/checkpoint/utils.py:230)",
    f"save ({TORCH}/distributed/checkpoint/state_dict_saver.py:170)",
    "save_checkpoint (/app/ckpt.py:51)",
    MAIN,
)

WAITING = Stall(9.0, "backward", IN_BACKWARD, 66, 65, same_stack_looks=3, is_working=False)
IDLE = Stall(9.0, "other", ("update_cache (/app/cache.py:63)", MAIN), 65, 65, same_stack_looks=3, is_working=False)


def judge(odd: Stall, waiting: Stall = WAITING, ranks: int = 4, departed: tuple[int, ...] = ()) -> Verdict | None:
    """The last rank is the odd one."""
    stalls = dict.fromkeys(range(ranks - 1), waiting) | {ranks - 1: odd}
    present = {rank: stall for rank, stall in stalls.items() if rank not in departed}
    return find_hang(present, departed, step_seconds=0.1, known_steps=True, policy=DEFAULT_POLICY)


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize(
    ("phase", "stack", "place"),
    [
        ("input", IN_LOADER, "main (train.py:80)"),
        ("input", IN_WORKER, "read_shard (dataset.py:31)"),
        ("other", IDLE.stack, "update_cache (cache.py:63)"),
        ("forward", ("wait_for_schedule (/app/model.py:7)", MAIN), "wait_for_schedule (model.py:7)"),
    ],
)
def test_the_awaited_rank_is_named_with_its_own_line(
    phase: str, stack: tuple[str, ...], place: str, ranks: int
) -> None:
    verdict = judge(replace(IDLE, phase=phase, stack=stack), ranks=ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.cause.phase) == (Kind.HANG, (ranks - 1,), phase)
    frame = verdict.cause.frames[0]
    assert f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})" == place
    others = {2: "rank 0", 3: "ranks 0-1"}.get(ranks, f"{ranks - 1} ranks")
    assert verdict.reason.endswith(f"; rank {ranks - 1} in {place}, {others} in backward (train.py:80)")
    assert verdict.cause.evidence.startswith(f"it entered 65 collectives, the others 66; rank {ranks - 1} in")


def test_the_collective_that_ranks_wait_in_is_named() -> None:
    verdict = judge(IDLE, replace(WAITING, phase="communication", stack=IN_BARRIER))
    assert verdict is not None
    assert "rank 3 in update_cache (cache.py:63), ranks 0-2 in barrier (train.py:61)" in verdict.reason


def test_a_stopped_rank_is_named_even_where_it_waits_itself() -> None:
    verdict = judge(replace(WAITING, is_stopped=True))
    assert verdict is not None
    assert (verdict.culprits, verdict.cause.phase) == ((3,), "stopped")
    assert "a signal has stopped it" in verdict.reason


def test_an_ended_rank_is_named_with_the_others_place() -> None:
    verdict = judge(IDLE, departed=(3,))
    assert verdict is not None
    assert (verdict.culprits, verdict.cause.phase, verdict.cause.frames) == ((3,), "ended", ())
    assert verdict.reason.endswith(
        "its process has ended while the others wait for it; ranks 0-2 in backward (train.py:80)"
    )


@pytest.mark.parametrize("ranks", [2, 64])
def test_a_working_rank_is_no_hang_however_many_wait(ranks: int) -> None:
    assert judge(replace(IDLE, is_working=True), ranks=ranks) is None
    evaluating = replace(IDLE, phase="forward", stack=("evaluate (/app/train.py:9)", MAIN), is_working=True)
    assert judge(evaluating, ranks=ranks) is None


def test_a_rank_working_endlessly_is_a_hang_before_the_timeout() -> None:
    seconds = DEFAULT_POLICY.hang_working_seconds
    waiting = replace(WAITING, seconds_since_step=seconds)
    looping = replace(IDLE, stack=("spin (/app/train.py:9)", MAIN), is_working=True, seconds_since_step=seconds)
    verdict = judge(looping, waiting)
    assert verdict is not None
    assert (verdict.culprits, verdict.cause.frames[0].function) == ((3,), "spin")
    assert judge(replace(looping, seconds_since_step=seconds - 1), waiting) is None
    # The others enter collectives again and again, as in an evaluation with a slow rank.
    assert judge(looping, replace(waiting, same_stack_looks=0)) is None
    uncounted = replace(looping, collectives_enqueued=None, collectives_completed=None)
    assert judge(uncounted, waiting) is None


def test_ranks_that_wait_may_use_cpu() -> None:
    assert judge(IDLE, replace(WAITING, is_working=True)) is not None


def test_hosts_that_wait_for_their_devices_wait_wherever_they_stand() -> None:
    """A CUDA host spins where it reads a result, or where its queue is full."""
    spinning = replace(WAITING, phase="other", stack=("log_loss (/app/train.py:70)", MAIN), is_working=True)
    verdict = judge(IDLE, spinning)
    assert verdict is not None
    assert verdict.culprits == (3,)
    assert "rank 3 in update_cache (cache.py:63), ranks 0-2 in log_loss (train.py:70)" in verdict.reason
    assert judge(replace(IDLE, is_working=True), spinning) is None
    assert judge(IDLE, replace(spinning, same_stack_looks=1)) is None, "the hosts run ahead"
    # Its counters are from before it took Python's lock.
    old = replace(IDLE, is_working=True, collectives_enqueued=44, collectives_completed=43)
    assert judge(old, spinning) is None


def test_hosts_that_ran_ahead_by_different_numbers_all_wait() -> None:
    """DDP's timers stop each host at another step."""
    spinning = replace(WAITING, phase="forward", stack=("main (/app/train.py:70)", MAIN), is_working=True)
    stalls = {
        0: replace(spinning, collectives_enqueued=69, collectives_completed=65),
        1: replace(spinning, collectives_enqueued=71, collectives_completed=65),
        2: replace(spinning, collectives_enqueued=75, collectives_completed=65),
        3: replace(IDLE, phase="input", stack=IN_WORKER, collectives_enqueued=65, collectives_completed=65),
    }
    verdict = find_hang(stalls, (), step_seconds=0.1, known_steps=True, policy=DEFAULT_POLICY)
    assert verdict is not None
    assert verdict.culprits == (3,)


def test_a_compile_is_no_hang_whatever_is_seen_of_it() -> None:
    assert judge(replace(IDLE, phase="compile", is_working=False, seconds_since_step=3600.0)) is None


def test_a_checkpoint_hangs_when_it_makes_no_progress_for_long() -> None:
    seconds = DEFAULT_POLICY.hang_checkpoint_seconds + 1
    waiting = replace(WAITING, seconds_since_step=seconds)
    stuck = replace(IDLE, phase="checkpoint", stack=IN_CHECKPOINT, seconds_since_step=seconds)
    verdict = judge(stuck, waiting)
    assert verdict is not None
    assert (verdict.culprits, verdict.cause.phase, verdict.cause.frames[0].function) == (
        (3,),
        "checkpoint",
        "save_checkpoint",
    )
    assert judge(replace(stuck, seconds_since_step=seconds - 2), waiting) is None
    assert judge(replace(stuck, is_working=True), waiting) is None
    assert judge(replace(stuck, is_working=None), waiting) is None


def test_ranks_waiting_in_a_checkpoint_wait_for_its_writer() -> None:
    seconds = DEFAULT_POLICY.hang_checkpoint_seconds + 1
    gathering = replace(
        WAITING, phase="checkpoint", stack=IN_CHECKPOINT_GATHER, seconds_since_step=seconds, collectives_enqueued=None
    )
    stuck = replace(
        gathering, stack=("write (/app/storage.py:12)", f"save ({TORCH}/distributed/checkpoint/filesystem.py:9)", MAIN)
    )
    verdict = judge(stuck, gathering)
    assert verdict is not None
    assert verdict.culprits == (3,)
    assert "rank 3 in write (storage.py:12), ranks 0-2 in all_gather_object (ckpt.py:51)" in verdict.reason
    assert judge(replace(stuck, is_working=True), gathering) is None
    early = replace(gathering, seconds_since_step=9.0)
    assert judge(early, early) is None


def test_waits_in_different_collectives_are_listed_apart_and_name_nobody() -> None:
    in_barrier = replace(WAITING, phase="communication", stack=IN_BARRIER)
    verdict = judge(in_barrier)
    assert verdict is not None
    assert verdict.culprits == ()
    places = "rank 3 in barrier (train.py:61), ranks 0-2 in backward (train.py:80)"
    assert verdict.cause.evidence == f"all ranks wait for each other; {places}"


def test_many_places_are_cut_to_odd_and_largest_ones() -> None:
    stalls = dict.fromkeys(range(64), WAITING)
    for rank in range(20):
        stalls[rank] = replace(WAITING, stack=(*IN_BACKWARD[:-1], f"main (/app/train.py:{rank})"))
    verdict = find_hang(stalls, (), 0.1, True, DEFAULT_POLICY)
    assert verdict is not None
    assert verdict.reason.count(" in backward (") == PLACES_NAMED
    assert verdict.reason.endswith("44 ranks in backward (train.py:80), and 17 more places")


# From the beginning of a hang to its end.

DESTROYING = (f"destroy_process_group ({TORCH}/distributed/distributed_c10d.py:2146)", MAIN)
EXITING = (f"_shutdown ({PYTHON}/threading.py:1624)",)
LEAVING = (
    replace(WAITING, phase="communication", stack=DESTROYING),
    replace(WAITING, phase="other", stack=EXITING),
    replace(WAITING, phase="other", stack=("Server.__del__ (/app/server.py:9)",)),
    replace(WAITING, phase=UNREADABLE, stack=()),
)
HUNG = {0: WAITING, 1: WAITING, 2: WAITING, 3: IDLE}


class Job:
    """Four ranks, a window of a second after the other."""

    def __init__(self) -> None:
        self.watch = HangWatch()
        self.since_seconds = 0.0

    def show(
        self,
        stalls: Mapping[int, Stall | None],
        seconds: int = 1,
        departed: tuple[int, ...] = (),
        steps: float | None = 0.0,
    ) -> Verdict | None:
        """The verdict after so many windows. `steps` of each rank that reports; None: they are not known."""
        for _ in range(seconds):
            self.since_seconds = 0.0 if steps else self.since_seconds + 1.0
            aged = {
                rank: stall and replace(stall, seconds_since_step=self.since_seconds)
                for rank, stall in stalls.items()
                if rank not in departed
            }
            columns = columns_of([{"rank": rank} | ({} if steps is None else {"steps": steps}) for rank in aged])
            window = JobWindow(1000.0, 1.0, 4, columns, departed, stalls=lambda aged=aged: aged)
            verdict = self.watch.observe(window, 0.1, DEFAULT_POLICY)
        return verdict


MOVING = dict.fromkeys(range(4))


def test_a_hang_stands_until_a_step_ends_whatever_stacks_show() -> None:
    job = Job()
    begun = job.show(HUNG, 8)
    assert begun is not None and begun.culprits == (3,)
    moved = replace(IDLE, stack=("elsewhere (/app/other.py:1)",), same_stack_looks=1, is_working=True)
    flickers: tuple[Mapping[int, Stall | None], ...] = ({**HUNG, 3: moved}, {**HUNG, 0: None}, MOVING, {})
    for stalls in flickers:
        standing = job.show(stalls, 3)
        assert standing is not None
        assert (standing.culprits, standing.cause) == ((3,), begun.cause)
    assert job.show(HUNG) == replace(begun, reason=begun.reason.replace("for 8 s", "for 21 s"))
    assert job.show(MOVING, steps=1.0) is None
    assert job.show(HUNG, 5) is None, "a new hang needs its time again"


def test_a_hang_without_step_records_ends_when_ranks_keep_moving() -> None:
    job = Job()
    begun = job.show(HUNG, 8, steps=None)
    assert begun is not None
    assert (begun.severity, begun.confidence) == (Severity.WARNING, Confidence.LOW)
    assert job.show(MOVING, 5, steps=None) is not None, "it is being ended, perhaps"
    assert job.show({**MOVING, 1: WAITING}, steps=None) is not None
    assert job.show(MOVING, 5, steps=None) is not None
    assert job.show(MOVING, 1, steps=None) is None


def test_a_hang_of_ranks_with_steps_is_an_alarm() -> None:
    verdict = Job().show(HUNG, 8)
    assert verdict is not None
    assert (verdict.severity, verdict.confidence) == (Severity.ALARM, Confidence.HIGH)


def test_ranks_that_end_during_a_hang_leave_its_cause() -> None:
    job = Job()
    begun = job.show(HUNG, 12)
    assert begun is not None
    left: tuple[int, ...] = ()
    for rank, stall in ((3, LEAVING[0]), (0, LEAVING[1]), (1, LEAVING[3])):
        leaving = job.show({**HUNG, rank: stall}, 2, departed=left)
        left = tuple(sorted((*left, rank)))
        ended = job.show(HUNG, 8, departed=left)
        for standing in (leaving, ended):
            assert standing is not None
            assert (standing.culprits, standing.cause) == (begun.culprits, begun.cause)


def test_better_evidence_refines_a_hang_until_it_is_old() -> None:
    unknown = {rank: replace(stall, phase=None, stack=(), collectives_enqueued=66) for rank, stall in HUNG.items()}
    job = Job()
    begun = job.show(unknown, 7)
    assert begun is not None and begun.culprits == ()
    refined = job.show(HUNG)
    assert refined is not None and refined.culprits == (3,)
    cleaning = replace(IDLE, stack=("clean_up (/app/train.py:99)", MAIN))
    unsteady = job.show({**HUNG, 3: replace(cleaning, same_stack_looks=1)})
    assert unsteady is not None and unsteady.cause == refined.cause
    old = job.show(HUNG, round(FIXED.hang_refined_seconds))
    late = job.show({**HUNG, 3: cleaning})
    assert old is not None and late is not None and late.cause == old.cause


@pytest.mark.parametrize("leaving", LEAVING)
def test_ranks_that_tear_down_or_exit_do_not_hang(leaving: Stall) -> None:
    job = Job()
    everywhere = dict.fromkeys(range(4), leaving)
    assert job.show(everywhere, round(FIXED.hang_leaving_seconds) - 1) is None
    assert job.show(everywhere, 30, departed=(0, 1, 2)) is None, "one after the other"


def test_destructors_after_the_program_are_no_hang() -> None:
    """Two ranks of a healthy job stood at the last line of their module for 15 s, on two cores with a load of 11."""
    module, minute = "<module> (/app/train.py:69)", round(FIXED.hang_leaving_seconds)
    for stack in ((module,), (f"__del__ ({TORCH}/utils/data/dataloader.py:9)", module)):
        at_its_end = dict.fromkeys(range(4), replace(WAITING, phase="other", stack=stack))
        assert Job().show(at_its_end, minute - 1, departed=(2,)) is None
        assert Job().show(at_its_end, minute + 1, departed=(2,)) is not None
    in_backward = replace(WAITING, stack=(*IN_BACKWARD[:-1], module))
    verdict = Job().show(dict.fromkeys(range(4), in_backward), 20, departed=(2,))
    assert verdict is not None and verdict.culprits == (2,)


def test_ranks_that_are_all_past_their_program_do_not_hang() -> None:
    """Another healthy job: the counters of one rank were old, so that it seemed to wait in a collective."""
    minute = round(FIXED.hang_leaving_seconds)
    module = replace(WAITING, phase="other", stack=("<module> (/app/train.py:69)",), collectives_enqueued=41)
    stalls = {0: replace(module, collectives_completed=40), 1: replace(module, collectives_completed=41)}
    assert Job().show(stalls, minute - 1) is None
    stuck = {**stalls, 0: replace(WAITING, collectives_enqueued=41, collectives_completed=40)}
    verdict = Job().show(stuck, 20)
    assert verdict is not None and verdict.culprits == (1,), "a rank that stays in the program's module is stuck there"


def test_a_teardown_that_never_ends_is_a_hang() -> None:
    """As NCCL's may be."""
    stalls = dict.fromkeys(range(4), replace(LEAVING[0], collectives_enqueued=None))
    verdict = Job().show(stalls, round(FIXED.hang_leaving_seconds) + 1)
    assert verdict is not None and verdict.culprits == ()


def test_a_rank_that_leaves_early_while_others_wait_is_named() -> None:
    """Its data ended before that of the others."""
    verdict = Job().show({**HUNG, 3: replace(LEAVING[0], collectives_enqueued=None)}, 8)
    assert verdict is not None
    assert verdict.culprits == (3,)


def test_ranks_that_leave_one_after_the_other_end_the_job() -> None:
    job = Job()
    job.show(MOVING, steps=1.0)
    for departed in ((), (3,), (1, 3), (0, 1, 3)):
        assert job.show(HUNG, 5, departed=departed) is None
    assert job.show(HUNG, 100, departed=(0, 1, 3)) is None, "most have left"


def test_those_who_wait_long_for_a_rank_that_ended_hang() -> None:
    job = Job()
    job.show(MOVING, steps=1.0)
    assert job.show(HUNG, 4) is None
    assert job.show(HUNG, 6, departed=(3,)) is None
    verdict = job.show(HUNG, departed=(3,))
    assert verdict is not None
    assert (verdict.culprits, verdict.cause.phase) == ((3,), "ended")
