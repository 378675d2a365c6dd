"""Where a process listens, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

_LISTENING = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of TCP, and of UDP that is bound at all."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:
            continue
        if found:
            own.add(found[1])
    held = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in own and (protocol.startswith("udp") or words[3] == _LISTENING):
                address, _, port = words[1].partition(":")
                held.add((_address(address), int(port, 16)))
    return held


def _address(text: str) -> str:
    """Words of four bytes, each in the machine's own order (little here and everywhere this runs)."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
