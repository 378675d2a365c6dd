"""The webhook configurations: which objects are reviewed by which webhook, and the authorities to trust there.

A configuration that somebody else made (a chart) keeps its rules: we write only the authorities in it."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, Document, MissingError
from rankscope.operator.kube.resources import GROUP, VERSION
from rankscope.operator.webhooks.admission import INJECT_PATH, STAMP_PATH, STATUS_PATH, VALIDATE_PATH
from rankscope.operator.webhooks.pod_injection import INJECT, MODES

log = logging.getLogger(__name__)

NAME = "rankscope"
MADE_BY = {"app.kubernetes.io/managed-by": "rankscope-operator"}
_ROOT = "/apis/admissionregistration.k8s.io/v1"
_PATHS = {
    "MutatingWebhookConfiguration": f"{_ROOT}/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": f"{_ROOT}/validatingwebhookconfigurations",
}
# A pod's creation waits for this long at most when we do not answer.
INJECT_SECONDS = 3
OURS_SECONDS = 10


@dataclass(frozen=True)
class Address:
    """Where the API server reaches us: a Service, or a URL without a path for an operator outside the cluster."""

    namespace: str = ""
    service: str = ""
    port: int = 443
    url: str = ""

    def client(self, path: str) -> Document:
        if self.url:
            return {"url": self.url.rstrip("/") + path}
        service = {"namespace": self.namespace, "name": self.service, "path": path, "port": self.port}
        return {"service": service}


def configurations(address: Address, name: str = NAME) -> tuple[Document, ...]:
    """Without the authorities."""
    return (
        _configuration("MutatingWebhookConfiguration", name, [*_injecting(address), *_stamping(address)]),
        _configuration("ValidatingWebhookConfiguration", name, [_validating(address), _guarding(address)]),
    )


def _configuration(kind: str, name: str, webhooks: list[Document]) -> Document:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": dict(MADE_BY)},
        "webhooks": webhooks,
    }


def _injecting(address: Address) -> list[Document]:
    """The pod's own label decides; without one, the namespace's. A review does not have the namespace's labels, so
    there is a webhook for each of their values."""
    labelled = {"matchExpressions": [_expression("Exists"), _expression("NotIn", "false")]}
    made = [_pods(address, "pods", INJECT_PATH, {"objectSelector": labelled})]
    for mode in MODES:
        selectors = {
            "namespaceSelector": {"matchExpressions": [_expression("In", mode)]},
            "objectSelector": {"matchExpressions": [_expression("DoesNotExist")]},
        }
        made.append(_pods(address, f"namespaces-{mode}", f"{INJECT_PATH}/{mode}", selectors))
    return made


def _pods(address: Address, name: str, path: str, selectors: Mapping[str, Any]) -> Document:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    return {
        **_webhook(address, f"{name}.inject.{GROUP}", path, rule),
        **selectors,
        "reinvocationPolicy": "IfNeeded",
        "failurePolicy": "Ignore",
        "timeoutSeconds": INJECT_SECONDS,
    }


def _stamping(address: Address) -> list[Document]:
    """A capture without a requester is not allowed, and nobody may change the requester: without us no Capture is
    created or changed. It can be deleted; its finalizer can be removed once this configuration is deleted."""
    rule = _rule(["CREATE", "UPDATE"], "captures")
    webhook = _webhook(address, f"stamp.captures.{GROUP}", STAMP_PATH, rule)
    return [{**webhook, "reinvocationPolicy": "IfNeeded", "failurePolicy": "Fail"}]


def _validating(address: Address) -> Document:
    rule = _rule(["CREATE", "UPDATE"], "captures", "trainingruns", "profilingpolicies")
    # Objects that pass while we are away are checked again when they are read.
    return {**_webhook(address, f"validate.{GROUP}", VALIDATE_PATH, rule), "failurePolicy": "Ignore"}


def _guarding(address: Address) -> Document:
    """Only the operator writes a status. While it is away nobody does."""
    rule = _rule(["UPDATE"], *(f"{plural}/status" for plural in ("captures", "trainingruns", "profilingpolicies")))
    return {**_webhook(address, f"status.{GROUP}", STATUS_PATH, rule), "failurePolicy": "Fail"}


def _webhook(address: Address, name: str, path: str, rule: Document) -> Document:
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "clientConfig": address.client(path),
        "rules": [{**rule, "scope": "Namespaced"}],
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "timeoutSeconds": OURS_SECONDS,
    }


def _rule(operations: list[str], *resources: str) -> Document:
    return {"apiGroups": [GROUP], "apiVersions": [VERSION], "operations": operations, "resources": list(resources)}


def _expression(operator: str, *values: str) -> Document:
    expression: Document = {"key": INJECT, "operator": operator}
    return {**expression, "values": list(values)} if values else expression


class Configurations:
    """`publish` is called by the leader only, in every round."""

    def __init__(self, api: Api, address: Address, name: str = NAME) -> None:
        self._api = api
        self._wanted = configurations(address, name)

    def publish(self, bundle: bytes) -> bool:
        """True if both configurations had these authorities before this call."""
        stood = [self._publish(wanted, base64.b64encode(bundle).decode()) for wanted in self._wanted]
        return all(stood)

    def _publish(self, wanted: Document, bundle: str) -> bool:
        root, name = _PATHS[wanted["kind"]], wanted["metadata"]["name"]
        try:
            present = self._api.get(f"{root}/{name}")
        except MissingError:
            self._write(lambda: self._api.create(root, {**wanted, "webhooks": _trusting(wanted["webhooks"], bundle)}))
            return False
        is_ours = MADE_BY.items() <= (present["metadata"].get("labels") or {}).items()
        before = present.get("webhooks") or []
        after = _trusting(wanted["webhooks"] if is_ours else before, bundle)
        if all(_includes(old, new) for old, new in zip(before, after, strict=False)) and len(before) == len(after):
            return True
        self._write(lambda: self._api.replace(f"{root}/{name}", {**present, "webhooks": after}))
        return False

    def _write(self, send: Any) -> None:
        try:
            send()
        except ConflictError:
            log.debug("a webhook configuration was written by another replica; the next round looks again")
        except ApiError as error:
            log.warning("the webhook configurations cannot be written, see docs/injection.md: %s", error)


def _trusting(webhooks: list[Document], bundle: str) -> list[Document]:
    """With the authorities in our own webhooks. Somebody may have added others."""
    return [
        {**webhook, "clientConfig": {**webhook["clientConfig"], "caBundle": bundle}}
        if str(webhook["name"]).endswith(f".{GROUP}")
        else webhook
        for webhook in webhooks
    ]


def _includes(present: object, wanted: object) -> bool:
    """Whether everything wanted is present; the API server adds defaults."""
    if isinstance(wanted, Mapping):
        return isinstance(present, Mapping) and all(_includes(present.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(present, list)
            and len(present) == len(wanted)
            and all(_includes(old, new) for old, new in zip(present, wanted, strict=True))
        )
    return present == wanted
