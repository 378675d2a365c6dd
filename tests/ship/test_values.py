"""The chart's values: what is wrong is refused, with a message that tells where and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.ship.combinations import COMBINATIONS, Values
from tests.ship.helm import CHART, Helm, HelmError

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def refusal(helm: Helm, name: str, values: Values) -> str:
    with pytest.raises(HelmError) as refused:
        helm.template(name, values)
    return str(refused.value)


def test_wrong_types_and_unknown_keys_are_all_named_at_once(helm: Helm) -> None:
    told = refusal(
        helm,
        "wrong",
        {
            "daemon": {"windowSeconds": "fast", "stackRateHertz": 500, "gpus": True},
            "operator": {"replicas": 1.5},
            "tls": {"mode": "off"},
            "webhook": {"enabled": False},
        },
    )
    # Where each is, and what it may be.
    for words in (
        ("daemon.windowSeconds", "daemon/windowSeconds"),
        ("daemon.stackRateHertz", "daemon/stackRateHertz"),
        ("operator.replicas", "operator/replicas"),
        ("tls.mode", "tls/mode"),
        ("gpus",),
        ("webhook",),
    ):
        assert any(word in told for word in words), f"{words[0]} is not named:\n{told}"
    assert "certManager" in told, told  # the modes that there are
    assert "100" in told, told  # the highest rate


def test_conflicting_values_are_refused_with_the_next_step(helm: Helm) -> None:
    told = refusal(
        helm,
        "impossible",
        {
            "daemon": {
                "namespaceEntry": False,
                "dutyCycle": {"steps": 3},
                "gpu": {"enabled": False, "dcgmUrl": "http://x"},
                "profilePush": {"url": "http://x", "secretName": "token"},
            },
            "operator": {"enabled": False, "console": {"enabled": True, "port": 9468, "proxy": {"name": "login"}}},
            "alerts": {"enabled": True},
            "captureReport": {"enabled": True, "capturesClaim": "captures"},
            "fleetReport": {"enabled": True, "uploadUrl": "s3://reports/fleet"},
            "api": {"enabled": False},
        },
    )
    assert told.count("Next step:") >= 4, told
    for name in (
        *("daemon.dutyCycle.steps", "daemon.gpu.dcgmUrl", "daemon.profilePush.secretName", "alerts.enabled"),
        *("operator.console.enabled", "operator.console.port", "operator.console.proxy", "captureReport.reportsClaim"),
        "fleetReport.prometheusUrl",
    ):
        assert name in told, told


def test_an_unknown_threshold_is_refused_and_known_ones_are_listed(helm: Helm) -> None:
    told = refusal(helm, "threshold", {"prometheusRule": {"enabled": True, "thresholds": {"exposed": 0.5}}})
    assert "prometheusRule.thresholds.exposed" in told and "exposed_communication_ratio" in told, told


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_schema_takes_what_helm_is_tried_with(name: str) -> None:
    jsonschema.validate(_merged(DEFAULTS, COMBINATIONS[name]), SCHEMA)


def _merged(under: Any, over: Any) -> Any:
    if isinstance(under, dict) and isinstance(over, dict):
        return under | {key: _merged(under.get(key), value) for key, value in over.items()}
    return over


def _leaves(values: Values, schema: Values, path: str = "") -> Iterator[tuple[str, Any, Values]]:
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        assert key in schema.get("properties", {}), f"the schema does not know {here}"
        part = schema["properties"][key]
        if isinstance(value, dict) and part.get("properties"):
            assert part.get("additionalProperties") is False, f"the schema takes anything below {here}"
            yield from _leaves(value, part, here)
        else:
            yield here, value, part


def test_the_schema_refuses_a_wrong_type_of_every_value() -> None:
    for path, value, part in _leaves(DEFAULTS, SCHEMA):
        assert {"type", "enum", "anyOf", "oneOf"} & part.keys(), f"the schema takes anything for {path}"
        for wrong in ("x", 1, ["x"]) if isinstance(value, dict) else ([["x"]], {"x": {"y": 1}}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, part)


def test_the_readme_has_every_value() -> None:
    readme = (CHART / "README.md").read_text()
    for path, _, _ in _leaves(DEFAULTS, SCHEMA):
        # Some are told of as a whole, as resources are.
        assert f"`{path}`" in readme or f"`{path.rpartition('.')[0]}`" in readme, path
