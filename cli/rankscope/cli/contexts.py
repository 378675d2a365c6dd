"""Which server a command asks: flags, and named servers in `~/.config/rankscope/contexts.yaml`, like kubeconfig.

The file holds addresses and paths, no secrets. It decides who receives a token, so only its owner may write it."""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rankscope.cli.messages import CommandError
from rankscope.cli.output_file import open_output

VARIABLE = "RANKSCOPE_CONTEXT"
TOKEN_VARIABLE = "RANKSCOPE_TOKEN"
# Always there: the daemon of this machine.
LOCAL = "local"
FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")


class EndpointError(CommandError):
    """Nothing was sent: names the flag or the file, the reason and the next step. Never contains a token."""


@dataclass(frozen=True)
class Endpoint:
    """How to reach a server. The fields are named like the flags, and like the keys of the file."""

    connect: str | None = None
    certificate_authority: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    tls_server_name: str | None = None
    token_file: Path | None = None
    kubeconfig: Path | None = None
    plaintext: bool = False

    @property
    def given(self) -> dict[str, str | bool]:
        """What is set, by the names of the flags."""
        values = {name.replace("_", "-"): getattr(self, name) for name in FIELDS}
        return {name: value if isinstance(value, bool) else str(value) for name, value in values.items() if value}


FIELDS = tuple(one.name for one in fields(Endpoint))
_PATHS = ("certificate_authority", "client_certificate", "client_key", "token_file", "kubeconfig")


def add_connection_arguments(parser: argparse.ArgumentParser, has_token_file: bool = False) -> None:
    """Add the flags by which a command chooses its server. They are the same for all commands. `has_token_file` is True
    if the command has a flag of this name already."""
    group = parser.add_argument_group("server (docs/cli.md; default: the daemon of this machine)")
    group.add_argument(
        "--connect", metavar="HOST:PORT", help="a daemon, a correlator or an operator to ask; also unix:PATH"
    )
    group.add_argument("--context", metavar="NAME", help="a server that `rankscope context set` has named")
    group.add_argument(
        "--certificate-authority", type=Path, metavar="FILE", help="who signed its certificate (default: the system's)"
    )
    group.add_argument("--client-certificate", type=Path, metavar="FILE", help="yours, where the server wants one")
    group.add_argument("--client-key", type=Path, metavar="FILE", help="its key")
    group.add_argument(
        "--tls-server-name", metavar="NAME", help="in its certificate, where HOST is not (a port-forward)"
    )
    if not has_token_file:
        group.add_argument("--token-file", type=Path, metavar="FILE", help=f"your token (default: {TOKEN_VARIABLE})")
    group.add_argument("--kubeconfig", type=Path, metavar="FILE", help="use the token of its current user")
    group.add_argument("--plaintext", action="store_true", help="without TLS; to this machine only")


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    """The flags, on top of the chosen context. `--connect` uses none: the token of one server is not for another."""
    given = {name: value for name in FIELDS if (value := getattr(arguments, name))}
    if arguments.connect is not None:
        if arguments.context is not None:
            raise EndpointError("--connect and --context are two servers: name one")
        return Endpoint(**given)
    contexts = load_contexts()
    named = contexts.find(chosen_name(arguments.context, contexts))
    if given and named.connect is None:
        flag = next(iter(given)).replace("_", "-")
        raise EndpointError(f"--{flag} goes with --connect HOST:PORT or --context NAME")
    return replace(named, **given)


@dataclass(frozen=True)
class Contexts:
    current: str = LOCAL
    named: Mapping[str, Endpoint] = field(default_factory=dict)

    def find(self, name: str) -> Endpoint:
        if name == LOCAL:
            return Endpoint()
        if name not in self.named:
            known = ", ".join([LOCAL, *sorted(self.named)])
            raise EndpointError(f"no context {name[:64]!r} in {contexts_path()}; there are: {known}")
        return self.named[name]

    def with_context(self, name: str, endpoint: Endpoint) -> Contexts:
        if _NAME.fullmatch(name) is None or name == LOCAL:
            raise EndpointError(
                f"context {name[:64]!r}: use up to 63 letters, digits, dots, dashes; {LOCAL!r} is this machine's daemon"
            )
        absolute: dict[str, Any] = {
            key: Path(value).absolute() for key in _PATHS if (value := getattr(endpoint, key)) is not None
        }
        return replace(self, named={**self.named, name: replace(endpoint, **absolute)})

    def without(self, name: str) -> Contexts:
        self.find(name)
        left = {key: value for key, value in self.named.items() if key != name}
        return Contexts(LOCAL if self.current == name else self.current, left)

    def use(self, name: str) -> Contexts:
        self.find(name)
        return replace(self, current=name)


def contexts_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rankscope" / "contexts.yaml"


def chosen_name(given: str | None, contexts: Contexts) -> str:
    """The flag, then the environment, then the file."""
    return given or os.environ.get(VARIABLE) or contexts.current


def load_contexts() -> Contexts:
    """Raises EndpointError. No file means no contexts."""
    path = contexts_path()
    try:
        # O_NONBLOCK: otherwise, opening a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return Contexts()  # none, or in the home of another user, as with `sudo -u`
    except OSError as error:
        raise EndpointError(f"{path}: {error.strerror}; remove it, or set XDG_CONFIG_HOME") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_owner(path, status)
        text = file.read(FILE_BYTES + 1)
    if len(text) > FILE_BYTES:
        raise EndpointError(f"{path}: more than {FILE_BYTES} bytes; is it a file of contexts?")
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The parser's own message quotes the file.
        raise EndpointError(
            f"{path}: not YAML; next: correct it, or remove it and use `rankscope context set`"
        ) from error
    return _read(path, document if document is not None else {})


def save_contexts(contexts: Contexts) -> None:
    import yaml

    path = contexts_path()
    named = {name: endpoint.given for name, endpoint in sorted(contexts.named.items())}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_output(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(yaml.safe_dump({"current": contexts.current, "contexts": named}, sort_keys=False).encode())
        path.chmod(0o600)  # where the file is written in place
    except OSError as error:
        raise EndpointError(f"{path}: {error.strerror}; next: check the owner and space of its directory") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise EndpointError(f"{path} is not trusted: it is not a plain file; remove it")
    if status.st_uid != os.geteuid():
        raise EndpointError(
            f"{path} is not trusted: it belongs to user {status.st_uid}, and you are user {os.geteuid()}; a token "
            "would go where that user says. Remove it, or set XDG_CONFIG_HOME"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise EndpointError(f"{path} is not trusted: others may write it; next: chmod 600 {path}")


def _read(path: Path, document: Any) -> Contexts:
    if not isinstance(document, dict) or set(document) - {"current", "contexts"}:
        raise EndpointError(f"{path}: its keys are `current` and `contexts`")
    named, current = document.get("contexts") or {}, document.get("current", LOCAL)
    if not isinstance(named, dict) or not isinstance(current, str):
        raise EndpointError(f"{path}: `contexts` holds names, and `current` is one of them")
    contexts = Contexts(LOCAL, {str(name): _endpoint(path, str(name), entry) for name, entry in named.items()})
    return replace(contexts, current=current)


def _endpoint(path: Path, name: str, entry: Any) -> Endpoint:
    where = f"{path}: context {name[:64]!r}"
    if not isinstance(entry, dict) or not isinstance(entry.get("connect"), str):
        raise EndpointError(f"{where} needs `connect: HOST:PORT`")
    values: dict[str, Any] = {}
    for key, value in entry.items():
        attribute = str(key).replace("-", "_")
        if attribute not in FIELDS:
            # Never quotes the value: it may be a token.
            raise EndpointError(f"{where}: no key {str(key)[:64]!r}; a token is kept in a file that token-file names")
        if not isinstance(value, bool if attribute == "plaintext" else str):
            raise EndpointError(f"{where}: {key} must be {'true or false' if attribute == 'plaintext' else 'a text'}")
        # As in kubeconfig: relative to the file.
        values[attribute] = path.parent / str(value) if attribute in _PATHS else value
    return Endpoint(**values)
