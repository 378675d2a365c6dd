"""Ways to install the chart, as somebody would: each has a reason to be tried."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

_NOTHING_OPTIONAL: Values = {
    "webhooks": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "priorityClass": {"create": False},
    "tests": {"enabled": False},
    "rbac": {"people": False},
    "operator": {"replicas": 1, "podDisruptionBudget": {"enabled": False}},
}
_MONITORED: Values = {
    "metrics": {
        "podMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "interval": "10s",
            "scrapeTimeout": "5s",
            "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "go_.*"}],
        },
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "interval": "10s",
            "scrapeTimeout": "5s",
            "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "go_.*"}],
        },
    },
    "prometheusRule": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "thresholds": {"exposed_communication_ratio": 0.45},
        "runbookUrl": "https://wiki.example/runbooks",
        "grafanaUrl": "https://grafana.internal",
        "consoleUrl": "https://console.internal/rankscope/",
    },
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Training"}},
}
_HIGHLY_AVAILABLE: Values = {
    "replicas": 3,
    "shards": 4,
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "34%"},
    "tolerations": [{"key": "infra", "operator": "Exists"}],
    "priorityClassName": "system-cluster-critical",
    "mfuTarget": 0.4,
    "podSelector": "team=research",
    "nodeConditions": True,
    "console": {
        "enabled": True,
        "names": ["rankscope.example"],
        "prometheusUrl": "http://prometheus.monitoring:9090",
        "proxy": {"name": "login-proxy", "authorityConfigMap": "login-proxy-ca"},
    },
}
_CA_BUNDLE: Values = {
    "extraVolumes": [{"name": "ca-bundle", "configMap": {"name": "ca-bundle"}}],
    "extraVolumeMounts": [{"name": "ca-bundle", "mountPath": "/etc/ssl/extra", "readOnly": True}],
}
_PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]

COMBINATIONS: dict[str, Values] = {
    "default": {},
    "minimal": _NOTHING_OPTIONAL,
    "cpu-only": {
        "daemon": {"gpu": {"enabled": False}, "tolerations": []},
        "webhooks": {"injection": False, "probe": {"enabled": False}},
    },
    "no-namespace-entry": {"daemon": {"namespaceEntry": False, "kinetoSocketDir": "/run/rankscope/kineto"}},
    "no-captures": {"daemon": {"captures": {"enabled": False}, "stackRateHertz": 0}},
    "cert-manager": {"tls": {"mode": "certManager"}},
    "existing-secrets": {
        "tls": {"mode": "existing"},
        "alerts": {"enabled": True, "existingSecret": "alertmanager-token"},
        "image": {"registry": "registry.internal:5000/ml", "tag": "0.1.0-custom", "pullSecrets": [{"name": "regcred"}]},
    },
    "monitored": _MONITORED,
    "sharded": {"operator": _HIGHLY_AVAILABLE, "nameOverride": "profiler", "fullnameOverride": "ml-profiler"},
    "daemons-alone": {"operator": {"enabled": False}, "tls": {"mode": "existing"}},
    "operator-alone": {
        "daemon": {"enabled": False},
        "crds": {"install": False},
        "rbac": {"create": False},
        "tls": {"mode": "certManager", "certManager": {"issuerRef": {"name": "fleet", "kind": "ClusterIssuer"}}},
    },
    "capture-report": {
        "captureReport": {
            "enabled": True,
            "schedule": "30 2 * * *",
            "shards": 16,
            "capturesClaim": "captures",
            "reportsClaim": "reports",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "batch", "operator": "Exists"}],
        },
        "openshift": {"enabled": True},
        "networkPolicy": {"enabled": True},
    },
    "fleet-report": {
        "fleetReport": {
            "enabled": True,
            "schedule": "30 2 * * *",
            "since": "30d",
            "prometheusUrl": "https://mimir.monitoring/prometheus",
            "tenant": "ml",
            "tokenSecret": "mimir-token",
            "uploadUrl": "s3://reports/fleet",
            "credentialsSecret": "reports-s3",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "batch", "operator": "Exists"}],
        },
        "networkPolicy": {"enabled": True},
    },
    "everything": {
        **_MONITORED,
        "metrics": {**_MONITORED["metrics"], "tls": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "commonLabels": {"team": "platform"},
        "image": {"pullPolicy": "Always", "pullSecrets": [{"name": "regcred"}]},
        "operator": {
            **_HIGHLY_AVAILABLE,
            **_CA_BUNDLE,
            "logLevel": "debug",
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "podAnnotations": {"example.com/owner": "platform"},
            "podLabels": {"example.com/tier": "infra"},
            "serviceAccount": {"annotations": {"example.com/role": "rankscope"}},
            "nodeSelector": {"pool": "infra"},
        },
        "openshift": {"enabled": True},
        "daemon": {
            **_CA_BUNDLE,
            "kinetoSocketDir": "/run/rankscope/kineto",
            "windowSeconds": 0.5,
            "budgetRatio": 0.005,
            "metricsDetail": "full",
            "logLevel": "debug",
            "captures": {"uploadUrl": "s3://traces/fleet", "quotaBytes": 2147483648, "quotaSeconds": 86400},
            "profilePush": {
                "url": "https://pyroscope.monitoring:4040",
                "tenant": "team-a",
                "secretName": "pyroscope",
                "authorityConfigMap": "pyroscope-ca",
            },
            "dutyCycle": {"steps": 5, "seconds": 900, "budgetRatio": 0.001},
            "gpu": {"runtimeClassName": "nvidia", "dcgmUrl": "http://$(HOST_IP):9400/metrics", "intervalSeconds": 0.5},
            "socket": {"hostPath": "/run/rankscope"},
            "extraArgs": ["--watch-readers=8"],
            "extraEnvFrom": [{"secretRef": {"name": "object-store"}}],
            "appArmorProfile": "Unconfined",
            "podAnnotations": {"example.com/owner": "platform"},
            "podLabels": {"example.com/tier": "node"},
            "nodeSelector": {"pool": "gpu"},
        },
        "alerts": {"enabled": True},
        "webhooks": {"clientAuthority": "api-server-client-ca"},
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": _PEERS,
            "alertsFrom": _PEERS,
            "webhooksFrom": [{"ipBlock": {"cidr": "10.0.0.0/28"}}],
        },
    },
}
