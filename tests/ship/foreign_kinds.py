"""The kinds of others that the chart makes objects of, as far as it uses them: an unknown field is dropped by the API
server, and that is seen."""

from __future__ import annotations

from typing import Any

from tests.kube.api_server import ApiServer
from tests.support.waiting import wait_until

Schema = dict[str, Any]

_TEXT = {"type": "string"}
_TRUTH = {"type": "boolean"}
_NUMBER = {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}
_LABELS = {"type": "object", "additionalProperties": _TEXT}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    return {**made, "required": list(required)} if required else made


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_SELECTOR = _object(
    matchLabels=_LABELS,
    matchExpressions=_list(_object(("key", "operator"), key=_TEXT, operator=_TEXT, values=_TEXTS)),
)
_SECRET_KEY = _object(("key",), key=_TEXT, name=_TEXT, optional=_TRUTH)
_SECRET_OR_MAP = _object(secret=_SECRET_KEY, configMap=_SECRET_KEY)
_RELABELINGS = _list(
    _object(
        sourceLabels=_TEXTS,
        separator=_TEXT,
        targetLabel=_TEXT,
        regex=_TEXT,
        replacement=_TEXT,
        action={"type": "string"},
    )
)
_ENDPOINT = _object(
    port=_TEXT,
    path=_TEXT,
    scheme={"type": "string", "enum": ["http", "https"]},
    interval={
        "type": "string",
        "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
    },
    scrapeTimeout=_TEXT,
    honorTimestamps=_TRUTH,
    bearerTokenSecret=_SECRET_KEY,
    authorization=_object(type=_TEXT, credentials=_SECRET_KEY),
    tlsConfig=_object(
        ca=_SECRET_OR_MAP, cert=_SECRET_OR_MAP, keySecret=_SECRET_KEY, serverName=_TEXT, insecureSkipVerify=_TRUTH
    ),
    relabelings=_RELABELINGS,
    metricRelabelings=_RELABELINGS,
)
# A ServiceMonitor may also name files of the Prometheus pod, a PodMonitor may not.
_SERVICE_ENDPOINT = _object(
    **_ENDPOINT["properties"]
    | {
        "bearerTokenFile": _TEXT,
        "tlsConfig": _object(
            **_ENDPOINT["properties"]["tlsConfig"]["properties"], caFile=_TEXT, certFile=_TEXT, keyFile=_TEXT
        ),
    }
)
_NAMESPACES = _object(any=_TRUTH, matchNames=_TEXTS)
_RULE = _object(
    ("expr",),
    alert=_TEXT,
    record=_TEXT,
    expr={"x-kubernetes-int-or-string": True},
    labels=_LABELS,
    annotations=_LABELS,
    keep_firing_for=_TEXT,
    **{"for": _TEXT},
)
_ISSUER = _object(("name",), name=_TEXT, kind=_TEXT, group=_TEXT)

# Group, version, kind, plural, schema of the spec; kinds of a namespace.
KINDS: tuple[tuple[str, str, str, str, Schema], ...] = (
    (
        "monitoring.coreos.com",
        "v1",
        "PodMonitor",
        "podmonitors",
        _object(
            ("selector",),
            jobLabel=_TEXT,
            podTargetLabels=_TEXTS,
            podMetricsEndpoints=_list(_ENDPOINT),
            selector=_SELECTOR,
            namespaceSelector=_NAMESPACES,
            sampleLimit=_NUMBER,
        ),
    ),
    (
        "monitoring.coreos.com",
        "v1",
        "ServiceMonitor",
        "servicemonitors",
        _object(
            ("endpoints", "selector"),
            jobLabel=_TEXT,
            targetLabels=_TEXTS,
            endpoints=_list(_SERVICE_ENDPOINT),
            selector=_SELECTOR,
            namespaceSelector=_NAMESPACES,
            sampleLimit=_NUMBER,
        ),
    ),
    (
        "monitoring.coreos.com",
        "v1",
        "PrometheusRule",
        "prometheusrules",
        _object(
            groups=_list(
                _object(("name",), name=_TEXT, interval=_TEXT, limit=_NUMBER, labels=_LABELS, rules=_list(_RULE))
            )
        ),
    ),
    (
        "cert-manager.io",
        "v1",
        "Certificate",
        "certificates",
        _object(
            ("secretName", "issuerRef"),
            secretName=_TEXT,
            secretTemplate=_object(labels=_LABELS, annotations=_LABELS),
            commonName=_TEXT,
            dnsNames=_TEXTS,
            uris=_TEXTS,
            ipAddresses=_TEXTS,
            isCA=_TRUTH,
            duration=_TEXT,
            renewBefore=_TEXT,
            usages=_TEXTS,
            subject=_object(organizations=_TEXTS, organizationalUnits=_TEXTS),
            privateKey=_object(algorithm=_TEXT, size=_NUMBER, rotationPolicy=_TEXT, encoding=_TEXT),
            issuerRef=_ISSUER,
            revisionHistoryLimit=_NUMBER,
        ),
    ),
    (
        "cert-manager.io",
        "v1",
        "Issuer",
        "issuers",
        _object(selfSigned=_object(), ca=_object(("secretName",), secretName=_TEXT)),
    ),
)
# OpenShift's, of the cluster and without a spec. Lists may be null.
_TYPED = _object(("type",), type=_TEXT)
CONSTRAINTS = _object(
    (
        "allowHostDirVolumePlugin",
        "allowHostIPC",
        "allowHostNetwork",
        "allowHostPID",
        "allowHostPorts",
        "allowPrivilegedContainer",
        "allowedCapabilities",
        "defaultAddCapabilities",
        "priority",
        "readOnlyRootFilesystem",
        "requiredDropCapabilities",
        "volumes",
    ),
    **dict.fromkeys(
        (
            "allowHostDirVolumePlugin",
            "allowHostIPC",
            "allowHostNetwork",
            "allowHostPID",
            "allowHostPorts",
            "allowPrivilegeEscalation",
            "allowPrivilegedContainer",
            "readOnlyRootFilesystem",
        ),
        _TRUTH,
    ),
    **dict.fromkeys(
        (
            "allowedCapabilities",
            "defaultAddCapabilities",
            "groups",
            "requiredDropCapabilities",
            "seccompProfiles",
            "users",
            "volumes",
        ),
        _TEXTS | {"nullable": True},
    ),
    **dict.fromkeys(("fsGroup", "runAsUser", "seLinuxContext", "supplementalGroups"), _TYPED),
    priority=_NUMBER | {"nullable": True},
)
FOREIGN = {kind for _, _, kind, _, _ in KINDS} | {"SecurityContextConstraints"}


def install(server: ApiServer) -> None:
    kinds = [(*each[:4], "Namespaced", _object(("spec",), spec=each[4])) for each in KINDS]
    constraints = "securitycontextconstraints"
    kinds.append(("security.openshift.io", "v1", "SecurityContextConstraints", constraints, "Cluster", CONSTRAINTS))
    for group, version, kind, plural, scope, schema in kinds:
        served = {
            "name": version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema},
        }
        server.admin.create(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            {
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": scope,
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                    "versions": [served],
                },
            },
        )
    for group, version, _, plural, _, _ in kinds:
        wait_until(lambda path=f"/apis/{group}/{version}/{plural}": server.admin.is_served(path))
