"""Which addresses others can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Names other than localhost may be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
