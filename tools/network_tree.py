"""A tree like /sys, with network ports whose counters a test or a benchmark sets."""

from __future__ import annotations

from pathlib import Path

INFINIBAND_COUNTERS = {
    "state": "4: ACTIVE",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "counters/port_xmit_data": 1000,
    "counters/port_rcv_data": 2000,
    **{
        f"counters/{name}": 0
        for name in (
            *("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards"),
            *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
        )
    },
}
ROCE_COUNTERS = {
    **{
        f"hw_counters/{name}": 0
        for name in (
            *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "out_of_buffer"),
            *("rx_icrc_encapsulated", "np_cnp_sent", "rp_cnp_handled", "roce_adp_retrans"),
        )
    },
}
ETHERNET_COUNTERS = {
    "type": 1,
    "speed": 25000,
    "operstate": "up",
    "carrier_down_count": 0,
    **{f"statistics/{name}": 0 for name in ("rx_errors", "tx_errors", "tx_dropped", "rx_missed_errors")},
    "statistics/tx_bytes": 5000,
    "statistics/rx_bytes": 6000,
}


def write(folder: Path, **values: object) -> None:
    """Files of one port; "/" in their names is "__"."""
    write_files(folder, {name.replace("__", "/"): value for name, value in values.items()})


def write_files(folder: Path, values: dict[str, object]) -> None:
    for name, value in values.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def add_infiniband(sys_root: Path, device: str = "mlx5_0", port: int = 1, *, is_roce: bool = False) -> Path:
    folder = sys_root / "class/infiniband" / device / "ports" / str(port)
    write_files(folder, {**INFINIBAND_COUNTERS, **ROCE_COUNTERS})
    if is_roce:
        write(folder, link_layer="Ethernet")
    return folder


def add_ethernet(sys_root: Path, name: str = "eth0", *, is_virtual: bool = False) -> Path:
    folder = sys_root / "class/net" / name
    write_files(folder, dict(ETHERNET_COUNTERS))
    if not is_virtual:
        (folder / "device").mkdir(exist_ok=True)
    return folder


def write_snmp(process: Path, segments: int, retransmits: int) -> None:
    """Of the network namespace of a process, by its folder in a tree like /proc."""
    (process / "net").mkdir(parents=True, exist_ok=True)
    text = f"Ip: Forwarding\nIp: 1\nTcp: RtoMin OutSegs RetransSegs InErrs\nTcp: 200 {segments} {retransmits} 0\n"
    (process / "net/snmp").write_text(text)
