"""Client of the API server: JSON in, JSON out, and errors that distinguish an outage from a refusal.

The kubernetes client gives configuration, tokens and connections; its typed objects are not used: building a
thousand pods as Python objects takes seconds, decoding their JSON milliseconds."""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import msgspec
import urllib3
import yaml

log = logging.getLogger(__name__)

REQUEST_SECONDS = 15.0
ERROR_CHARACTERS = 500
MAX_LINE_BYTES = 16 << 20
PAGE_OBJECTS = 500

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
JSON = "application/json"

Document = dict[str, Any]
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


class ClusterError(Exception):
    """No cluster is configured, or the configuration cannot be read."""


class ApiError(Exception):
    """The API server refused."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(f"the API server answered {status} ({reason}): {text}")
        self.status = status
        self.reason = reason


class ConflictError(ApiError):
    """Another client wrote first, or the object exists already."""


class GoneError(ApiError):
    """The requested history is no longer kept: list again."""


class MissingError(ApiError):
    """There is no such object."""


class UnreachableError(Exception):
    """No answer, or not in time: to be tried again."""


_ERRORS: Mapping[int, type[ApiError]] = {404: MissingError, 409: ConflictError, 410: GoneError}


class ObjectApi(Protocol):
    """The calls that controllers of our own kinds need: of an API server, or of `LocalObjects`."""

    def create(self, path: str, body: Any, **query: Any) -> Document: ...

    def merge(self, path: str, body: Any, **query: Any) -> Document: ...

    def delete(self, path: str, body: Any = None, **query: Any) -> Document: ...

    def pages(self, path: str, **query: Any) -> Iterator[Document]: ...

    def watch(self, path: str, idle_seconds: float, **query: Any) -> Iterator[Document]: ...


class Api:
    """Thread-safe. `kubeconfig` None takes the pod's service account."""

    def __init__(self, kubeconfig: Path | None = None) -> None:
        # Imported here: a second that a correlator without Kubernetes need not wait.
        from kubernetes import client, config

        settings = client.Configuration()
        try:
            if kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(str(kubeconfig), client_configuration=settings)
        # The client reads the file without checking its shape: a list where it wants a mapping is a TypeError there.
        except (config.ConfigException, yaml.YAMLError, TypeError, AttributeError, KeyError) as error:
            reason = " ".join(f"cannot reach a cluster: {error}".split())
            raise ClusterError(f"{reason}; name a --kubeconfig, or run in a pod") from error
        # Callers decide when to try again: a hidden retry would delay the renewal of a lease beyond its duration.
        settings.retries = False
        settings.connection_pool_maxsize = 32
        self._settings = settings
        self._client = client.ApiClient(settings)
        self._host = settings.host

    def token(self) -> str | None:
        """Our own; None where we authenticate with a certificate."""
        for auth in self._settings.auth_settings().values():
            scheme, _, token = str(auth["value"]).partition(" ")
            if scheme.lower() == "bearer" and token:
                return token
        return None

    def get(self, path: str, **query: Any) -> Document:
        return self._request("GET", path, query)

    def create(self, path: str, body: Any, **query: Any) -> Document:
        return self._request("POST", path, query, body)

    def replace(self, path: str, body: Any, **query: Any) -> Document:
        return self._request("PUT", path, query, body)

    def merge(self, path: str, body: Any, **query: Any) -> Document:
        return self._request("PATCH", path, query, body, MERGE_PATCH)

    def merge_lists(self, path: str, body: Any) -> Document:
        """Of Kubernetes' own kinds only: lists are merged item by item, so that others' conditions stay."""
        return self._request("PATCH", path, {}, body, STRATEGIC_MERGE_PATCH)

    def delete(self, path: str, body: Any = None, **query: Any) -> Document:
        return self._request("DELETE", path, query, body)

    def pages(self, path: str, **query: Any) -> Iterator[Document]:
        """A list in pages, each as it comes."""
        token = ""
        while True:
            page = self.get(path, limit=PAGE_OBJECTS, **query, **({"continue": token} if token else {}))
            yield page
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    def watch(self, path: str, idle_seconds: float, **query: Any) -> Iterator[Document]:
        """Events until the server ends the stream. Raises UnreachableError when nothing came for `idle_seconds`."""
        timeout = urllib3.Timeout(connect=REQUEST_SECONDS, read=idle_seconds)
        answer = self._send("GET", path, {**query, "watch": "true"}, None, JSON, timeout)
        try:
            for line in _lines(answer):
                event = msgspec.json.decode(line)
                if event.get("type") == "ERROR":
                    raise _refusal(int(event["object"].get("code") or 500), msgspec.json.encode(event["object"]))
                yield event
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"the watch of {path} broke off: {error}") from error
        except (msgspec.DecodeError, KeyError, AttributeError, ValueError) as error:
            raise UnreachableError(f"the watch of {path} sent something that is not an event: {error}") from error
        finally:
            answer.close()

    def _request(
        self, method: str, path: str, query: Mapping[str, Any], body: Any = None, content_type: str = JSON
    ) -> Document:
        answer = self._send(method, path, query, body, content_type, urllib3.Timeout(REQUEST_SECONDS))
        try:
            document = msgspec.json.decode(answer.read() or b"{}")
        except (urllib3.exceptions.HTTPError, OSError, msgspec.DecodeError) as error:
            raise UnreachableError(f"{method} {path}: the answer broke off: {error}") from error
        finally:
            answer.release_conn()
        if not isinstance(document, dict):
            raise UnreachableError(f"{method} {path}: the answer is not an object")
        return document

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        content_type: str,
        timeout: urllib3.Timeout,
    ) -> Any:
        headers: dict[str, str] = {"Accept": JSON, "Content-Type": content_type}
        for auth in self._settings.auth_settings().values():  # reads a rotated token again
            headers[auth["key"]] = auth["value"]
        url = f"{self._host}{quote(path)}"
        if query:
            url += "?" + urlencode(query)
        try:
            answer = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=timeout,
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {error}") from error
        if answer.status < 400:
            return answer
        try:
            text = answer.read(MAX_LINE_BYTES)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {error}") from error
        finally:
            answer.release_conn()
        # From a server that is starting or overloaded, or a proxy: an outage, not a refusal.
        if answer.status in (429, 502, 503, 504):
            if b"ResourceVersionTooLarge" in text:
                # Its store was restored from an older state, and would never reach the version that we wait for.
                raise GoneError(410, "ResourceVersionTooLarge", "the API server is behind what was read from it")
            raise UnreachableError(f"{method} {path}: {answer.status}")
        raise _refusal(answer.status, text)


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        document = msgspec.json.decode(body)
        reason, text = str(document.get("reason") or ""), str(document.get("message") or "")
    except (msgspec.DecodeError, AttributeError):
        reason, text = "", body.decode(errors="replace")
    return _ERRORS.get(status, ApiError)(status, reason, text[:ERROR_CHARACTERS])


def _lines(answer: Any) -> Iterator[bytes]:
    rest = b""
    for chunk in answer.stream(amt=None, decode_content=True):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line for line in whole if line)
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("an event without an end")


# The operator's own service account: its name, and its ownership of objects that the operator creates.


TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
ACCOUNT = "system:serviceaccount:"
AGAIN_SECONDS = 10.0
SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


class OwnName:
    """Our name for the API server; None while it is not known, and before Kubernetes 1.28 for a client certificate."""

    def __init__(self, api: Api, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._name: str | None = None
        self._ask_at = 0.0

    def __call__(self) -> str | None:
        with self._lock:
            if self._name is None and self._monotonic_seconds() >= self._ask_at:
                self._ask_at = self._monotonic_seconds() + AGAIN_SECONDS
                self._name = self._asked()
            return self._name

    def _asked(self) -> str | None:
        token = self._api.token()
        named = None if token is None else account_in(token)
        if named is not None:
            return named
        status = self._status(SELF_REVIEWS, "SelfSubjectReview")
        name = (status.get("userInfo") or {}).get("username")
        if name is None and token is not None:  # before 1.28, with the chart's role api
            status = self._status(TOKEN_REVIEWS, "TokenReview", spec={"token": token})
            name = (status.get("user") or {}).get("username") if status.get("authenticated") is True else None
        return str(name) if name else None

    def _status(self, path: str, kind: str, **content: Any) -> Document:
        try:
            answer = self._api.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": kind, **content})
        except (ApiError, UnreachableError):
            return {}
        return answer.get("status") or {}


def account_in(token: str) -> str | None:
    """The service account in a token of our own. It need not be verified: it is ours."""
    subject = _claims(token).get("sub")
    return subject if isinstance(subject, str) and subject.startswith(ACCOUNT) else None


def owners(token_file: Path = TOKEN_FILE) -> list[Document]:
    """`metadata.ownerReferences` of objects that we create besides our own kinds: our service account, so that the
    cluster's garbage collection removes them with it, when the chart is uninstalled. Empty outside of a pod."""
    try:
        account = _claims(token_file.read_text())["kubernetes.io"]["serviceaccount"]
        name, uid = account["name"], account["uid"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not (isinstance(name, str) and isinstance(uid, str)):
        return []
    return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": uid}]


def _claims(token: str) -> dict[str, Any]:
    """Of a JSON Web Token, unverified; empty where it is not one."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return {}
    return claims if isinstance(claims, dict) else {}
