from __future__ import annotations

from rankscope.operator.correlation.job_table import JobTable
from rankscope.v1 import identity_pb2, window_pb2
from tests.daemon_messages import hold

SECOND = 1_000_000_000


def identity(rank: int, *, world: int = 2, job: str = "j", pid: int = 100, incarnation: int = 1, node: str = "a"):  # type: ignore[no-untyped-def]
    return identity_pb2.RankIdentity(
        job=job, rank=rank, world_size=world, node=node, pid=pid + rank, incarnation=incarnation
    )


def window(rank: int, end_seconds: int, **who):  # type: ignore[no-untyped-def]
    return hold(
        window_pb2.RankWindow(
            identity=identity(rank, **who),
            start_unix_nanos=(end_seconds - 2) * SECOND,
            end_unix_nanos=end_seconds * SECOND,
            steps=20,
        )
    )


def test_a_tick_is_judged_when_every_rank_has_reported() -> None:
    table = JobTable(grace_seconds=1.0)
    table.accept([window(0, 100)], 100.1)
    assert table.take_ready(100.2) == {}
    table.accept([window(1, 100)], 100.3)
    assert table.take_ready(100.3)["j"].columns.rank.tolist() == [0, 1]
    assert table.take_ready(100.4) == {}


def test_a_silent_rank_is_awaited_only_for_the_grace_time() -> None:
    table = JobTable(grace_seconds=1.0)
    table.accept([window(0, 100)], 100.1)
    assert table.take_ready(101.2)["j"].columns.rank.tolist() == [0]


def test_a_tick_is_not_judged_while_windows_are_being_read() -> None:
    """A fleet's windows close at one border, and reading them all takes longer than the grace."""
    table = JobTable(grace_seconds=1.0)
    for rank in range(8):
        table.accept([window(rank, 100, world=10)], 100.3 + 0.3 * rank)
        assert table.take_ready(100.35 + 0.3 * rank) == {}
    assert len(table.take_ready(103.0)["j"].columns) == 8


def test_dripping_windows_do_not_delay_a_verdict_forever() -> None:
    table = JobTable(grace_seconds=1.0)
    judged = 0
    for number in range(60):
        now = 100.0 + 0.1 * number
        table.accept([window(number % 2, 100, world=10)], now)
        judged += len(table.take_ready(now + 0.05))
    assert judged == 1


def test_a_window_of_an_already_judged_tick_is_dropped() -> None:
    table = JobTable(grace_seconds=1.0)
    table.accept([window(0, 100)], 100.1)
    table.take_ready(102.0)
    table.accept([window(1, 100)], 102.1)
    assert table.jobs["j"].open_ticks == {}
    assert table.take_ready(110.0) == {}


def test_a_rank_returning_as_another_process_restarts_the_job() -> None:
    table = JobTable()
    table.accept([window(0, 100), window(1, 100)], 100.1)
    table.take_ready(100.2)
    table.accept([window(0, 102, pid=500, incarnation=9)], 102.1)
    assert table.take_restarted() == {"j"}
    assert table.take_restarted() == set()


def test_a_late_window_of_a_replaced_process_restarts_no_job() -> None:
    table = JobTable()
    table.accept([window(0, 102, pid=500, incarnation=9)], 102.1)
    table.accept([window(0, 102, pid=100, incarnation=1)], 102.2)
    assert table.take_restarted() == set()
    assert table.jobs["j"].latest[0].identity.pid == 500


def test_departed_ranks_are_told_and_no_longer_waited_for() -> None:
    table = JobTable(grace_seconds=10.0)
    table.accept([window(0, 100), window(1, 100)], 100.1)
    table.take_ready(100.2)
    table.depart([identity(1)])
    table.accept([window(0, 102)], 102.1)
    assert table.take_ready(102.2)["j"].departed == (1,)


def test_a_job_whose_ranks_have_all_ended_is_forgotten() -> None:
    table = JobTable()
    table.accept([window(0, 100), window(1, 100)], 100.1)
    table.depart([identity(0), identity(1)])
    assert table.take_ended(101.0) == ["j"]
    assert table.jobs == {}


def test_a_silent_job_is_forgotten() -> None:
    table = JobTable(forget_after_seconds=60.0)
    table.accept([window(0, 100)], 100.1)
    assert table.take_ended(130.0) == []
    assert table.take_ended(161.0) == ["j"]


def test_a_long_silent_ranks_window_goes_and_its_job_stays() -> None:
    """Or ranks that somebody makes up would fill the memory."""
    table = JobTable(forget_after_seconds=60.0)
    table.accept([window(0, 100), window(1, 100)], 100.1)
    for second in range(102, 180, 2):
        table.accept([window(0, second)], float(second))
        assert table.take_ended(float(second)) == []
    assert table.jobs["j"].latest.keys() == {0}


def test_ranks_outside_their_world_are_refused() -> None:
    table = JobTable()
    table.accept([window(7, 100), window(-1, 100)], 100.1)
    assert not table.jobs["j"].latest
    assert table.take_ready(200.0) == {}


def test_open_ticks_are_bounded_when_a_daemon_never_completes_one() -> None:
    table = JobTable(grace_seconds=1e9)
    for second in range(100, 300, 2):
        table.accept([window(0, second)], float(second))
    assert len(table.jobs["j"].open_ticks) <= 4


def test_an_impostors_larger_world_does_not_make_the_job_incomplete() -> None:
    table = JobTable()
    table.accept([window(0, 100), window(1, 100)], 100.1)
    table.accept([window(7, 100, world=64)], 100.2)
    assert table.jobs["j"].latest.keys() == {0, 1}
    assert table.take_ready(100.3)["j"].world_size == 2
