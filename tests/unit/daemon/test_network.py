"""Network ports of the node, read from a tree like /sys, and their counters over time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.analysis.verdicts.network import EVENT_NAMES, NodeNetwork
from rankscope.daemon.network.collector import CounterHistory, NetworkCollector
from rankscope.daemon.network.ports import EVENTS, MAX_PORTS, TcpReading, read_ports, read_tcp
from rankscope.daemon.samples import RankProcess, Span
from rankscope.daemon.windows.window import RankSamples, assemble
from tools.network_tree import add_ethernet, add_infiniband, write, write_snmp

INTERVAL_SECONDS = 10.0
SPAN = Span(0, 2_000_000_000)


def rank(number: int, job: str = "train", pid: int = 4000) -> RankProcess:
    return RankProcess(job, number, number, 4, pid, 77, (pid,))


class Watched:
    """A collector on a tree, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.sys_root, self.proc_root, self.now = folder / "sys", folder / "proc", 1000.0
        self.collector = NetworkCollector(self.sys_root, self.proc_root, INTERVAL_SECONDS, lambda: self.now)
        for pid in (1, 4000, 4001):
            (self.proc_root / str(pid) / "ns").mkdir(parents=True)
            self.set_namespace(pid, 4026531840)

    def set_namespace(self, pid: int, inode: int) -> None:
        link = self.proc_root / str(pid) / "ns/net"
        link.unlink(missing_ok=True)
        link.symlink_to(f"net:[{inode}]")

    def pass_time(self, seconds: float = INTERVAL_SECONDS, *ranks: RankProcess) -> dict[int, NodeNetwork]:
        """What the windows of ranks have in the end, by rank."""
        found: dict[int, NodeNetwork] = {}
        for _ in range(round(seconds / INTERVAL_SECONDS)):
            self.now += INTERVAL_SECONDS
            self.collector.collect(ranks, SPAN)
            self.collector.read()
            samples = self.collector.collect(ranks, SPAN)
            found = {key[1]: sample for key, sample in samples.items() if isinstance(sample, NodeNetwork)}
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_infiniband_counts_words_and_reports_its_rate(tmp_path: Path) -> None:
    folder = add_infiniband(tmp_path)
    write(folder, counters__symbol_error=7, counters__link_downed=2, hw_counters__packet_seq_err=3)
    (port,) = read_ports(tmp_path)
    assert (port.device, port.port, port.link, port.is_up) == ("mlx5_0", 1, "infiniband", True)
    assert (port.rate_bits_per_second, port.transmitted_bytes, port.received_bytes) == (400e9, 4000, 8000)
    assert (port.events["symbol"], port.events["link_down"], port.events["packet_sequence"]) == (7, 2, 3)


def test_roce_is_told_by_its_link_layer(tmp_path: Path) -> None:
    write(add_infiniband(tmp_path, is_roce=True), state="1: DOWN", rate="100 Gb/sec (4X EDR)")
    (port,) = read_ports(tmp_path)
    assert (port.link, port.is_up, port.rate_bits_per_second) == ("roce", False, 100e9)


def test_virtual_interfaces_and_representors_are_left_out(tmp_path: Path) -> None:
    add_ethernet(tmp_path, "eth0")
    for name in ("lo", "veth12ab", "docker0", "cni0", "cali123", "bond0", "eth0.100"):
        add_ethernet(tmp_path, name, is_virtual=True)
    write(add_ethernet(tmp_path, "eth0_3"), phys_port_name="pf0vf3")
    write(add_ethernet(tmp_path, "can0"), type=280)
    assert [port.device for port in read_ports(tmp_path)] == ["eth0"]


def test_what_a_driver_does_not_support_is_missing_not_zero(tmp_path: Path) -> None:
    folder = add_ethernet(tmp_path)
    write(folder, speed=-1, operstate="unknown", statistics__rx_errors="N/A", statistics__tx_bytes=1 << 70)
    (folder / "carrier_down_count").unlink()
    (port,) = read_ports(tmp_path)
    assert (port.rate_bits_per_second, port.is_up, port.transmitted_bytes, port.received_bytes) == (None,) * 3 + (6000,)
    assert "receive" not in port.events and "link_down" not in port.events and port.events["discard"] == 0


def test_ports_are_bounded_and_in_a_natural_order(tmp_path: Path) -> None:
    for number in range(MAX_PORTS + 5):
        add_infiniband(tmp_path, f"mlx5_{number}")
    ports = read_ports(tmp_path)
    assert [port.device for port in ports] == [f"mlx5_{number}" for number in range(MAX_PORTS)]


def test_a_machine_without_a_network_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == ()


def test_a_file_that_blocks_does_not_hold_the_reader(tmp_path: Path) -> None:
    folder = add_ethernet(tmp_path)
    (folder / "speed").unlink()
    os.mkfifo(folder / "speed")
    assert read_ports(tmp_path)[0].rate_bits_per_second is None


def test_tcp_is_read_by_name_of_the_column(tmp_path: Path) -> None:
    write_snmp(tmp_path, 500, 20)
    assert read_tcp(str(tmp_path)) == TcpReading(500, 20)
    (tmp_path / "net/snmp").write_text("Tcp: OutSegs\nTcp: many\n")
    assert read_tcp(str(tmp_path)) is None and read_tcp(str(tmp_path / "gone")) is None


def test_this_machine_shows_its_tcp() -> None:
    assert read_tcp("/proc/self") is not None


def test_every_event_has_words() -> None:
    assert EVENT_NAMES.keys() == EVENTS.keys()


@pytest.mark.parametrize("after", [0, 3, 65_535])
def test_a_counter_that_resets_or_wraps_adds_nothing(after: int) -> None:
    history = CounterHistory(INTERVAL_SECONDS)
    for number, value in enumerate((65_530, 65_535, after, after + 4)):
        history.add({"symbol": value}, 10.0 * number)
    assert history.recent() == {"symbol": 9}


def test_a_counter_that_comes_and_goes_never_shrinks() -> None:
    history = CounterHistory(INTERVAL_SECONDS)
    for number, counters in enumerate(({"symbol": 5}, {"symbol": 25}, {}, {"symbol": 3}, {"symbol": 4})):
        history.add(counters, 10.0 * number)
        assert all(grown >= 0 for grown in history.recent().values())


def test_usual_is_the_median_minute_before_the_last() -> None:
    history = CounterHistory(INTERVAL_SECONDS)
    count = 0
    for number in range(60):
        count += 2 if number < 54 else 100
        history.add({"symbol": count}, 10.0 * number)
    assert history.recent() == {"symbol": 600} and history.seconds == 60
    assert history.usual("symbol", 0.0) == 12
    assert history.usual("symbol", 10.0 * 50) is None  # since then there is no minute but the last


def test_the_first_rank_of_each_job_carries_the_network(watched: Watched) -> None:
    add_infiniband(watched.sys_root)
    found = watched.pass_time(20, rank(3), rank(2), rank(7, "other", 4001))
    assert found.keys() == {2, 7} and found[2].ports[0].device == "mlx5_0"


def test_planted_errors_are_in_the_window(watched: Watched) -> None:
    folder = add_infiniband(watched.sys_root)
    watched.pass_time(300, rank(0))
    write(folder, counters__symbol_error=400, counters__port_xmit_data=26_000)
    network = watched.pass_time(10, rank(0))[0]
    window = assemble(rank(0), "node-a", SPAN, 1, RankSamples(network=network), lambda _: None).network
    assert (dict(window.ports[0].events), dict(window.ports[0].usual_events)) == ({"symbol": 400}, {"symbol": 0.0})
    assert (window.seconds, window.ports[0].transmitted_bytes, window.ports[0].received_bytes) == (60, 100_000, 0)


def test_errors_before_the_job_are_not_its_past(watched: Watched) -> None:
    folder = add_infiniband(watched.sys_root)
    for count in range(40):
        write(folder, counters__symbol_error=100 * count)
        watched.pass_time(10)
    assert watched.pass_time(10, rank(0))[0].ports[0].usual_events == {}


def test_retransmits_are_those_of_the_ranks_own_namespace(watched: Watched) -> None:
    watched.set_namespace(4000, 4026532000)
    for pid in (1, 4000):
        write_snmp(watched.proc_root / str(pid), 10_000, 10)
    watched.pass_time(400, rank(0))
    write_snmp(watched.proc_root / "4000", 12_000, 110)
    network = watched.pass_time(10, rank(0))[0]
    assert (network.tcp_segments, network.tcp_retransmits, network.is_own_namespace) == (2000, 100, True)
    assert watched.collector.status.tcp == TcpReading(10_000, 10)


def test_an_unknown_namespace_may_be_the_ranks_own(watched: Watched) -> None:
    add_infiniband(watched.sys_root)
    assert not watched.pass_time(20, rank(0))[0].is_own_namespace
    (watched.proc_root / "4000/ns/net").unlink()
    assert watched.pass_time(10, rank(0))[0].is_own_namespace


def test_a_reading_that_is_old_is_not_shown(watched: Watched) -> None:
    add_infiniband(watched.sys_root)
    watched.pass_time(20, rank(0))
    watched.now += 100 * INTERVAL_SECONDS  # the thread that reads is blocked
    assert watched.collector.collect([rank(0)], SPAN) == {} and watched.collector.status.ports == ()


def test_a_port_that_comes_back_has_no_past(watched: Watched) -> None:
    folder = add_infiniband(watched.sys_root)
    watched.pass_time(30, rank(0))
    state = (folder / "state").read_text()
    (folder / "state").unlink()
    assert watched.pass_time(10, rank(0)) == {}
    write(folder, state=state.strip(), counters__symbol_error=1 << 40)
    assert watched.pass_time(20, rank(0))[0].ports[0].events == {}
