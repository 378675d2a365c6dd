"""Names of the certificates: how daemons, operator, scrapers and webhooks know each other."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import grpc

from rankscope.common.tls import Read

DAEMON, OPERATOR, METRICS = "rankscope-daemon", "rankscope-operator", "rankscope-metrics"
CLIENT = "rankscope-client"  # of a user, for a correlator without Kubernetes
# Daemons, operator and users know each other by these names: no certificate for anything else may have one.
ROLES = frozenset({DAEMON, OPERATOR, METRICS, CLIENT})
AUTHORITY_SECRET = "rankscope-authority"
OPERATOR_SECRET = "rankscope-operator-tls"
API_SECRET = "rankscope-api-tls"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
# Pods have no names in DNS: every daemon's certificate has the role's name in place of an address.
DAEMON_NAME_OPTION = ("grpc.ssl_target_name_override", DAEMON)


class Use(Enum):
    """Extended key usage: the side of a connection that a certificate is good for."""

    SERVER = "1.3.6.1.5.5.7.3.1"
    CLIENT = "1.3.6.1.5.5.7.3.2"
    BOTH = f"{SERVER} {CLIENT}"

    @property
    def identifiers(self) -> list[str]:
        return self.value.split()


@dataclass(frozen=True)
class Role:
    """A certificate in a Secret: its names, and the side of a connection that it is good for."""

    secret: str
    names: Sequence[str]
    use: Use
    is_operators: bool = False  # shown by the operator itself

    @property
    def common_name(self) -> str:
        return self.names[0][:64]


def fleet_roles(namespace: str, api_names: Sequence[str] = ()) -> tuple[Role, ...]:
    """Raises ValueError for an API name that is not a name, or that would make its certificate an operator's or a
    daemon's."""
    service = f"rankscope-operator.{namespace}.svc"
    names = (service, f"{service}.cluster.local", *(host_name(name, "--api-name") for name in api_names))
    return (
        Role("rankscope-daemon-tls", (DAEMON,), Use.SERVER),
        Role(OPERATOR_SECRET, (OPERATOR,), Use.CLIENT, is_operators=True),
        Role("rankscope-metrics-tls", (METRICS,), Use.CLIENT),
        Role(API_SECRET, names, Use.SERVER, is_operators=True),
    )


def host_name(text: str, flag: str) -> str:
    """A name or address in the spelling that the certificate will have: otherwise it would seem to be another name.
    Raises ValueError, with `flag` as what it was given for."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        name = text.lower()
    if name in ROLES:
        raise ValueError(f"{flag} {text}: daemons know the operator by such a name; use a full host name")
    if len(name) > 253 or _HOST.fullmatch(name) is None:
        raise ValueError(f"{flag} {text!r} is neither a host name nor an address")
    return name


def daemon_credentials(read: Read) -> grpc.ChannelCredentials:
    """What the operator shows to daemons, read for every connection: certificates are rotated. Raises OSError where
    there is no certificate."""
    material = read()
    if material is None:
        raise OSError("the operator's certificate does not exist yet; the leader makes it (--fleet-certificates)")
    return grpc.ssl_channel_credentials(material.authorities, material.key, material.certificate)
