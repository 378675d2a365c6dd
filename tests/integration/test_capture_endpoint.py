"""libkineto's protocol between real sockets, across network namespaces, with clients that cannot be trusted."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rankscope.daemon.captures.kineto import endpoint as endpoints
from rankscope.daemon.captures.kineto import sockets
from rankscope.daemon.captures.kineto.clients import CLIENTS_PER_PROCESS
from rankscope.daemon.captures.kineto.endpoint import Endpoint, Offer
from rankscope.daemon.captures.kineto.sockets import (
    DEAD_AFTER_SECONDS,
    SlowError,
    SocketError,
    bind_file,
    remove_dead_clients,
)
from tests.support.measuring import Measured
from tests.support.waiting import wait_until

from .kineto_peers import endpoint_for, offer, peer, watch

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="to enter network namespaces needs root")

DAEMON = "\0dynolog\0"


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ks") as folder:  # a socket's path is short
        yield folder


@contextmanager
def served_directory(directory: str) -> Iterator[Endpoint]:
    with endpoint_for(socket_directory=directory) as endpoint:
        wait_until(lambda: endpoint.served_seconds(0) is not None)
        yield endpoint


def test_the_polled_socket_answers_and_hands_an_offer_once() -> None:
    with peer() as trainer, endpoint_for(trainer) as endpoint:
        trainer.do(do="hear", seconds=0)
        handed: list[float] = []
        endpoint.offer(trainer.pid, offer("A=1\n", trainer, lambda: handed.append(time.time())))
        assert trainer.answers() == [["dynoconfigclient-0", DAEMON, "req", True, "A=1\n"]]
        # The endpoint sends under its lock, and then calls `handed`.
        assert not endpoint.withdraw(trainer.pid)
        assert len(handed) == 1
        assert trainer.answers() == [["dynoconfigclient-0", DAEMON, "req", True, ""]]
        assert endpoint.client_count() == 1
        client = endpoint.client(trainer.pid)
        assert client is not None and client.is_ready and client.namespace == trainer.namespace


def test_nobody_but_the_sender_hears_an_answer() -> None:
    with peer() as trainer, peer() as neighbour, endpoint_for(trainer, neighbour):
        bystander = {"name": "dynoconfigclient-1", "poll": {}}
        assert trainer.answers(**bystander)[0][0] == "dynoconfigclient-1"
        assert neighbour.polls() == [""]
        assert [name for name, *_ in trainer.answers(name="dynoconfigclient-0")] == ["dynoconfigclient-0"]
        assert trainer.do(do="hear", seconds=0.3) == []
        assert neighbour.do(do="hear", seconds=0.3) == []


def test_a_registration_is_answered_with_a_count() -> None:
    with peer() as trainer, endpoint_for(trainer):
        registration = struct.pack("<Q32siiq", 16, b"ctxt", 0, 7, 0)
        ((_, sender, kind, is_whole, text),) = trainer.answers(hex=registration.hex())
        assert (sender, kind, is_whole) == (DAEMON, "ctxt", True)
        assert struct.unpack("<i", text.encode("latin-1"))[0] >= 1


def test_an_offer_waits_while_the_users_own_profiler_runs() -> None:
    with peer() as trainer, endpoint_for(trainer) as endpoint:
        endpoint.offer(trainer.pid, offer("A=1\n", trainer))
        assert trainer.polls(mask=1) == [""]
        client = endpoint.client(trainer.pid)
        assert client is not None and not client.is_ready
        assert trainer.polls(mask=0) == [""]
        assert trainer.polls(mask=2) == ["A=1\n"]


def test_an_offer_is_for_one_incarnation_of_one_process_only() -> None:
    with peer() as trainer, peer() as other, endpoint_for(trainer, other) as endpoint:
        endpoint.offer(trainer.pid, Offer(trainer.start_ticks + 1, lambda: "A=1\n", lambda: None))
        assert trainer.polls() == [""], "another process had that pid"
        endpoint.offer(trainer.pid, offer("B=1\n", trainer))
        assert trainer.polls(in_child=True) == [""], "a child of the rank, with the rank's own socket"
        lie = {"pids": [trainer.pid, trainer.own_pid]}
        assert other.texts(poll=lie) == [""], "what a message says of pids proves nothing"
        assert trainer.polls() == ["B=1\n"]


def test_a_process_that_claims_another_namespaces_pid_is_not_answered() -> None:
    with peer() as trainer, peer() as liar, endpoint_for(trainer, liar) as endpoint:
        endpoint.offer(trainer.pid, offer("A=1\n", trainer))
        assert liar.is_ignored(spoofed_pid=trainer.pid)
        wait_until(lambda: endpoint.tallies["unvouched"] == 1)
        assert trainer.polls() == ["A=1\n"]


def test_pids_are_told_apart_across_pid_namespaces() -> None:
    with peer("--pid", "--fork", "--kill-child", "--mount-proc") as boxed:
        children = Path(f"/proc/{boxed.pid}/task/{boxed.pid}/children").read_text().split()
        pid = int(children[0])
        with endpoint_for(boxed) as endpoint:
            assert boxed.own_pid == 1
            assert boxed.polls() == [""]
            assert endpoint.client(pid) is not None
            assert endpoint.client(1) is None


MALFORMED = {
    "nothing": b"",
    "less than a header": b"\1\2\3",
    "a header alone that promises more": struct.pack("<Q32s", 100, b"req"),
    "a huge size": struct.pack("<Q32s", 2**64 - 1, b"req") + bytes(16),
    "an unknown type": struct.pack("<Q32s", 0, b"evil"),
    "a type without an end": struct.pack("<Q32s", 16, b"r" * 32) + bytes(16),
    "2³¹ pids": struct.pack("<Q32siIq", 16, b"req", 3, 2**31, 0),
    "minus one pid": struct.pack("<Q32siiq", 16, b"req", 3, -1, 0),
    "fewer pids than announced": struct.pack("<Q32siiqi", 20, b"req", 3, 2, 0, 1),
    "more pids than any process has ancestors": struct.pack("<Q32siiq", 4016, b"req", 3, 1000, 0) + bytes(4000),
    "an oversized datagram": struct.pack("<Q32siiq", 65536 + 16, b"req", 3, 16384, 0) + bytes(65536),
    "a short registration": struct.pack("<Q32si", 4, b"ctxt", 1),
}


def test_malformed_datagrams_are_met_with_silence_and_harm_nobody() -> None:
    with peer() as trainer, endpoint_for(trainer) as endpoint:
        for datagram in MALFORMED.values():
            trainer.tell(do="send", hex=datagram.hex(), seconds=0.05)
        answers = {name: trainer.answer() for name in MALFORMED}
        assert not any(answers.values()), answers
        wait_until(lambda: endpoint.tallies["malformed"] == len(MALFORMED))
        assert trainer.polls() == [""]


def test_descriptors_that_a_sender_passes_along_are_not_kept() -> None:
    def others() -> int:
        """Without files of /proc, which the endpoint's threads open and close."""
        found = 0
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                found += not str(link.readlink()).startswith("/proc/")
        return found

    with peer() as trainer, endpoint_for(trainer):
        assert trainer.polls() == [""]
        before = others()
        for _ in range(5):
            assert trainer.polls(with_descriptors=True) == [""]
        assert others() == before


def test_a_late_answer_is_not_sent_and_its_offer_stays() -> None:
    delays = [0.2]
    handed = threading.Event()

    def compose() -> str:
        time.sleep(delays.pop() if delays else 0.0)
        return "A=1\n"

    with peer() as trainer, endpoint_for(trainer) as endpoint:
        endpoint.offer(trainer.pid, Offer(trainer.start_ticks, compose, handed.set))
        # libkineto would take it for the answer to its next poll, and be one behind forever.
        assert trainer.is_ignored()
        wait_until(lambda: endpoint.tallies["late"] == 1)
        assert not handed.is_set()
        assert trainer.polls() == ["A=1\n"]
        assert handed.wait(60)


def test_a_clients_first_poll_on_a_new_socket_is_unanswered() -> None:
    # It may be libkineto's last try to send, after which it does not wait for an answer.
    with peer() as trainer, endpoint_for(trainer, settling_seconds=3600.0) as endpoint:
        endpoint.offer(trainer.pid, offer("A=1\n", trainer))
        assert trainer.is_ignored()
        wait_until(lambda: endpoint.client(trainer.pid) is not None)  # but heard
        assert trainer.polls() == ["A=1\n"]
        assert trainer.polls() == [""]
        assert trainer.is_ignored(name="dynoconfigclient-1"), "another client"


def test_a_client_one_answer_behind_is_skipped_once() -> None:
    with peer() as trainer, endpoint_for(trainer) as endpoint:
        assert trainer.polls() == [""]
        endpoint.offer(trainer.pid, offer("A=1\n", trainer))
        endpoint.skip_next_poll(trainer.pid)
        assert trainer.is_ignored()
        wait_until(lambda: not endpoint.skips_next_poll_of(trainer.pid))
        assert trainer.polls() == ["A=1\n"]


def test_a_flooded_namespace_costs_bounded_memory_and_starves_no_other(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "DATAGRAMS_PER_SECOND", 500)  # a busy machine sends few more than the usual limit
    with peer() as flooder, peer() as trainer, endpoint_for(flooder, trainer) as endpoint:
        flooder.tell(do="flood", clients=3_000, also_noise=True)
        flooded = threading.Thread(target=flooder.answer)
        flooded.start()
        answers = []
        while flooded.is_alive() or len(answers) < 20:
            answers.append(trainer.polls(seconds=0.2))
            time.sleep(0.02)
        assert answers.count([""]), endpoint.tallies
        measured("polls answered beside a flood", answers.count([""]) / len(answers), "of all", at_least=0.9)
        assert endpoint.client_count() <= CLIENTS_PER_PROCESS + 1
        assert endpoint.tallies["malformed"] > 0
        assert endpoint.tallies["deferred"] > 0, "the flood was slowed down"


def test_polls_are_answered_while_another_namespace_is_being_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    real = sockets.bind_in

    def slow_for_the_second(pid: int, namespace: int, proc_root: Path) -> socket.socket:
        if pid == second.pid:
            entered.set()
            assert leave.wait(180)
        return real(pid, namespace, proc_root)

    monkeypatch.setattr(sockets, "bind_in", slow_for_the_second)
    with peer() as first, peer() as second, endpoint_for(first) as endpoint:
        endpoint.watch({first.namespace: first.pid, second.namespace: second.pid})
        assert entered.wait(180)
        assert first.polls() == [""]
        assert endpoint.served_seconds(second.namespace) is None
        leave.set()
        wait_until(lambda: endpoint.served_seconds(second.namespace) is not None)
        assert second.polls() == [""]


def test_a_namespace_without_ranks_is_left_and_its_clients_forgotten() -> None:
    with peer() as trainer, endpoint_for(trainer) as endpoint:
        assert trainer.polls() == [""]
        endpoint.watch({})
        wait_until(lambda: endpoint.served_seconds(trainer.namespace) is None and endpoint.client_count() == 0)
        assert trainer.do(do="squat") == "squatted", "the name is free again"
        watch(endpoint, {trainer.namespace: trainer.pid})
        failure = endpoint.failure(trainer.namespace)
        assert failure is not None and "another profiling daemon (dynolog), or a process that should not" in failure
        assert f"Address already in use; it belongs to pid {trainer.pid} (python" in failure, failure


def test_an_unenterable_namespace_is_retried_with_another_process() -> None:
    with peer() as moved, peer() as trainer, endpoint_for() as endpoint:
        watch(endpoint, {trainer.namespace: moved.pid})
        failure = endpoint.failure(trainer.namespace)
        assert failure is not None and "is another by now" in failure
        endpoint.watch({trainer.namespace: trainer.pid})
        wait_until(lambda: endpoint.failure(trainer.namespace) is None)
        assert trainer.polls() == [""]


def test_a_namespace_missed_for_lack_of_cpu_is_retried_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, tries = sockets.bind_in, []

    def slow_at_first(pid: int, namespace: int, proc_root: Path) -> socket.socket:
        tries.append(pid)
        if len(tries) == 1:
            raise SlowError("no answer within 10 s")
        return real(pid, namespace, proc_root)

    monkeypatch.setattr(sockets, "bind_in", slow_at_first)
    monkeypatch.setattr(sockets, "RETRY_SLOW_SECONDS", 0.0)
    with peer() as trainer, endpoint_for() as endpoint:
        endpoint.watch({trainer.namespace: trainer.pid})
        wait_until(lambda: endpoint.served_seconds(trainer.namespace) is not None)
        assert len(tries) == 2 and endpoint.failure(trainer.namespace) is None


def test_file_sockets_serve_only_clients_naming_the_identical_directory(
    directory: str,
) -> None:
    link = directory + "-link"
    Path(link).symlink_to(directory)
    try:
        with peer() as trainer, served_directory(directory) as endpoint:
            endpoint.offer(trainer.pid, offer("A=1\n", trainer))
            assert trainer.is_ignored(directory=link), "libkineto would abort its process over the sender's name"
            assert trainer.is_ignored(directory=directory + "/", name="dynoconfigclient-1")
            assert trainer.is_ignored(to=directory, name="dynoconfigclient-2"), "an abstract client"
            assert trainer.is_ignored(directory=directory, name="another")
            wait_until(lambda: endpoint.tallies["unvouched"] == 4)
            answer = trainer.answers(directory=directory, name="dynoconfigclient-3")
            assert answer == [["dynoconfigclient-3", f"{directory}/dynolog", "req", True, "A=1\n"]]
            client = endpoint.client(trainer.pid)
            assert client is not None and client.namespace == trainer.namespace
    finally:
        Path(link).unlink()


def test_a_client_whose_socket_becomes_a_link_is_not_answered(directory: str) -> None:
    with peer() as trainer, served_directory(directory):
        assert trainer.polls(directory=directory) == [""]
        path = Path(directory, "dynoconfigclient-0")
        path.rename(Path(directory, "away"))
        path.symlink_to("away")
        assert trainer.is_ignored(directory=directory)


def test_only_a_stale_socket_file_is_replaced_and_ours_removed(directory: str) -> None:
    path = Path(directory, "dynolog")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(str(path))
    with served_directory(directory), pytest.raises(SocketError, match="served by another daemon"):
        bind_file(directory)
    assert not path.exists()


def test_socket_files_of_dead_clients_are_removed_and_no_others(directory: str) -> None:
    def client(name: str) -> socket.socket:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.bind(f"{directory}/{name}")
        return own

    client("dynoconfigclient-dead").close()
    client("dynoconfigclient-young").close()
    client("something-else").close()
    Path(directory, "dynoconfigclient-file").write_text("")
    with client("dynoconfigclient-alive"):
        long_ago = time.time() - DEAD_AFTER_SECONDS - 1
        for entry in Path(directory).iterdir():
            if entry.name != "dynoconfigclient-young":
                os.utime(entry, (long_ago, long_ago))
        remove_dead_clients(directory)
        assert {entry.name.rpartition("-")[2] for entry in Path(directory).iterdir()} == {
            "young",
            "else",
            "file",
            "alive",
        }
