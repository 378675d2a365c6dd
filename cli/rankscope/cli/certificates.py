"""`rankscope certificates`: an authority and certificates for daemons, a correlator and its users."""

from __future__ import annotations

import argparse
from pathlib import Path

from rankscope.cli.messages import refuse, to_stdout
from rankscope.operator.certificates.folder import (
    AUTHORITY_DAYS,
    CERTIFICATE_DAYS,
    CertificateFolderError,
    FleetRole,
    Issued,
    init,
    issue,
)

_EPILOG = """\
examples:
  rankscope certificates init pki                                                    once, on a safe machine
  rankscope certificates issue pki --role daemon node-1 --address 10.0.0.1           for each node
  rankscope certificates issue pki --role correlator head --address 10.0.0.100       for the correlator
  rankscope certificates issue pki --role client alice                               for each user

ca.key signs certificates that open every node: keep it off the nodes. docs/tls.md describes the roles.
"""
_USES = {
    FleetRole.DAEMON: (
        "copy the folder to /etc/rankscope/tls on {name}, for root only, and start\n"
        "  rankscope daemon --grpc-listen 0.0.0.0:9465 --tls-certificate /etc/rankscope/tls/tls.crt \\\n"
        "    --tls-key /etc/rankscope/tls/tls.key --tls-client-authority /etc/rankscope/tls/ca.crt"
    ),
    FleetRole.CORRELATOR: (
        "copy the folder to /etc/rankscope/tls on {name}, for the correlator's user only, and start\n"
        "  rankscope correlator --daemons-file FILE --api-listen 0.0.0.0:9468 \\\n"
        "    --tls-certificate /etc/rankscope/tls/tls.crt --tls-key /etc/rankscope/tls/tls.key \\\n"
        "    --tls-authority /etc/rankscope/tls/ca.crt"
    ),
    FleetRole.CLIENT: (
        "give the folder to {name}, who calls the correlator with\n"
        "  rankscope capture --run RUN --connect HOST:9468 --certificate-authority ca.crt \\\n"
        "    --client-certificate tls.crt --client-key tls.key"
    ),
    FleetRole.METRICS: (
        "copy the folder to Prometheus, and name its files in tls_config of the scrape configuration (docs/tls.md)"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    made = actions.add_parser("init", help="make an authority in an empty folder")
    made.add_argument("folder", type=Path, metavar="DIR", help="where ca.crt and ca.key are written")
    _add_days(made, AUTHORITY_DAYS)
    issued = actions.add_parser("issue", help="sign a certificate with the authority in a folder")
    issued.add_argument("folder", type=Path, metavar="DIR", help="the folder of `rankscope certificates init`")
    issued.add_argument("name", metavar="NAME", help="the host's name, or the user's; captures are audited under it")
    issued.add_argument(
        "--role", required=True, choices=[role.word for role in FleetRole], help="what the certificate is for"
    )
    issued.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a further name or IP address of the host (may be repeated)",
    )
    _add_days(issued, CERTIFICATE_DAYS)


def _add_days(parser: argparse.ArgumentParser, days: int) -> None:
    parser.add_argument(
        "--days", type=_days, default=days, metavar="N", help="valid for so long (default: %(default)s)"
    )


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= 36500:
        raise argparse.ArgumentTypeError("1 to 36500")
    return days


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.action == "init":
            _tell(init(arguments.folder, arguments.days))
            to_stdout("keep ca.key here; next: rankscope certificates issue --help")
            return 0
        role = FleetRole[arguments.role.upper()]
        _tell(issue(arguments.folder, role, arguments.name, arguments.address, arguments.days))
    except CertificateFolderError as error:
        return refuse(str(error))
    to_stdout(_USES[role].format(name=arguments.name))
    return 0


def _tell(made: Issued) -> None:
    names = f" for {', '.join(made.names)}" if made.names else ""
    to_stdout(f"{made.folder}: valid until {made.until:%Y-%m-%d}{names}")
