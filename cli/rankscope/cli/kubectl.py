"""`kubectl rankscope`: the commands that ask a server, for the operator of the cluster that kubectl uses.

kubectl does what needs the cluster: the port-forward, the operator's authority, and a token for it."""

from __future__ import annotations

import argparse
import base64
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rankscope.cli import main as rankscope
from rankscope.cli.contexts import TOKEN_VARIABLE
from rankscope.cli.messages import CommandError, Exit, refuse
from rankscope.common.text import one_line

COMMANDS = ("top", "flame", "stacks", "hangs", "capture", "captures", "record", "doctor")
PORT = 9468
KUBECTL_SECONDS = 30.0
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
_EPILOG = """\
examples:
  kubectl rankscope --service-account team/ada top --run team/
  kubectl rankscope --service-account team/ada capture --run team/llama --output traces/
  RANKSCOPE_TOKEN=… kubectl rankscope captures ls --run team/

The operator accepts tokens for its own audience only, not the one that kubectl shows to the API server: docs/api.md.
`rankscope COMMAND --help` lists the flags of a command.
"""


class KubectlError(CommandError):
    """What kubectl could not do, and the next step."""

    status = Exit.UNREACHABLE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = rankscope.Parser(
        prog="kubectl rankscope",
        description="Asks the operator of this cluster, through a port-forward.",
        epilog=_EPILOG,
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="of kubectl (default: kubectl's)")
    parser.add_argument("--context", metavar="NAME", help="of kubectl (default: the current one)")
    parser.add_argument("--operator-namespace", default="rankscope", metavar="NS", help="default: rankscope")
    parser.add_argument("--service", default="rankscope-operator", metavar="NAME", help="default: rankscope-operator")
    parser.add_argument("--service-account", metavar="NS/NAME", help="get a token of it from the API server")
    parser.add_argument("--audience", default="rankscope", metavar="TEXT", help="of that token (default: rankscope)")
    parser.add_argument(
        "--certificate-authority", type=Path, metavar="FILE", help="of the operator (default: from its Secret)"
    )
    parser.add_argument("command", choices=COMMANDS, help="as in `rankscope COMMAND`")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    given = parser.parse_args(arguments)
    if {"-h", "--help"} & set(given.rest):
        return rankscope.main([given.command, *given.rest])
    kubectl = ["kubectl"]
    kubectl += [f"--kubeconfig={given.kubeconfig}"] if given.kubeconfig else []
    kubectl += [f"--context={given.context}"] if given.context else []
    try:
        with tempfile.TemporaryDirectory(prefix="rankscope-kubectl-") as folder:
            flags = _trust(kubectl, given, Path(folder))
            with _port_forward(kubectl, given) as port:
                return rankscope.main([given.command, *given.rest, "--connect", f"127.0.0.1:{port}", *flags])
    except KubectlError as error:
        return refuse(str(error), error.status)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _trust(kubectl: list[str], given: argparse.Namespace, folder: Path) -> list[str]:
    """Flags for the operator's certificate and the caller's token."""
    authority: Path | None = given.certificate_authority
    if authority is None:
        authority = folder / "ca.crt"
        secret = [f"--namespace={given.operator_namespace}", "get", "secret", "rankscope-api-tls"]
        words = [*kubectl, *secret, "-o", r"jsonpath={.data.ca\.crt}"]
        encoded = _ask(words, "or name it: --certificate-authority FILE")
        authority.write_bytes(base64.b64decode(encoded))
    flags = ["--certificate-authority", str(authority)]
    flags += ["--tls-server-name", f"{given.service}.{given.operator_namespace}.svc"]
    if given.service_account:
        namespace, _, name = given.service_account.rpartition("/")
        where = [f"--namespace={namespace}"] if namespace else []
        words = [*kubectl, *where, "create", "token", name, f"--audience={given.audience}"]
        token = folder / "token"
        # In a directory that only this user can enter.
        token.write_text(_ask(words, "may you create tokens of it? Else put one into RANKSCOPE_TOKEN"))
        return [*flags, "--token-file", str(token)]
    if "--token-file" not in given.rest and TOKEN_VARIABLE not in os.environ:
        text = f"the operator asks for a token; name --service-account NAMESPACE/NAME, or set {TOKEN_VARIABLE}"
        raise KubectlError(text, Exit.USAGE)
    return flags


def _ask(command: list[str], next_step: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KubectlError(f"kubectl: {_reason(error)}; is it installed, and does the cluster answer?") from error
    if done.returncode != 0 or not done.stdout.strip():
        raise KubectlError(f"kubectl: {one_line(done.stderr, 500) or 'an empty answer'}; {next_step}")
    return done.stdout.strip()


@contextmanager
def _port_forward(kubectl: list[str], given: argparse.Namespace) -> Iterator[int]:
    command = [*kubectl, f"--namespace={given.operator_namespace}", "port-forward", "--address=127.0.0.1"]
    command += [f"service/{given.service}", f":{PORT}"]
    try:
        # In a session of its own: a capture that Ctrl-C interrupts must still be able to reach the operator.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        raise KubectlError(f"kubectl: {_reason(error)}; is it installed?") from error
    with process:
        try:
            yield _port(process)
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    """Raises KubectlError if kubectl ends, or does not say a port in time."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, name="rankscope-port-forward", daemon=True).start()
    try:
        while line := lines.get(timeout=KUBECTL_SECONDS):
            if match := _FORWARDING.match(line):
                return int(match[1])
    except queue.Empty:
        raise KubectlError("kubectl port-forward says no port; does the operator run?") from None
    assert process.stderr is not None
    reason = one_line(process.stderr.read(4096), 500)
    raise KubectlError(f"kubectl port-forward: {reason or 'it ended'}; next: --operator-namespace NS, --service NAME")


def _reason(error: OSError | subprocess.TimeoutExpired) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "no answer"


if __name__ == "__main__":
    sys.exit(main())
