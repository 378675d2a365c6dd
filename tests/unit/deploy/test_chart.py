"""What can be told of the chart without helm; tests/ship renders and installs it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tools.chart_readme import ValuesError, described_values

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "rankscope"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from objects(part, f"{path}.{name}".lstrip("."))


def test_the_schema_takes_the_values_as_they_are() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


def test_schema_and_values_have_the_same_entries() -> None:
    for path, schema in objects(SCHEMA):
        if "properties" not in schema:
            continue
        assert schema["additionalProperties"] is False, path
        held: Any = VALUES
        for name in filter(None, path.split(".")):
            held = held[name]
        optional = {"global", "claims", "localhostProfile", "type", "level", "role", "user"}  # helm's, and Kubernetes'
        assert set(schema["properties"]) - optional == set(held) - optional, path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("operator.replicas", "two"),
        ("operator.replicas", 0),
        ("operator.replcas", 2),
        ("operator.console.port", 443),
        ("operator.console.names", ["https://rankscope.example"]),
        ("daemon.kinetoSocketDir", "/run/kineto/"),
        ("daemon.image.digest", "latest"),
        ("daemon.captures.quotaBytes", "10Gi"),
        ("tls.mode", "none"),
        ("prometheusRule.thresholds", {"input_bound_ratio": "high"}),
        ("nothing", {}),
    ],
)
def test_the_schema_refuses_what_is_wrong(path: str, value: object) -> None:
    changed = json.loads(json.dumps(VALUES))
    *folders, name = path.split(".")
    held = changed
    for folder in folders:
        held = held[folder]
    held[name] = value
    assert not jsonschema.Draft7Validator(SCHEMA).is_valid(changed)


def test_a_value_without_a_comment_is_told() -> None:
    with pytest.raises(ValuesError, match=r"without a comment: \['a\.c'\]"):
        described_values("a:\n  # -- This.\n  b: 1\n  c: 2\n")
    with pytest.raises(ValuesError, match=r"comments on nothing: \['a\.b'\]"):
        described_values("# -- A map that is told as a whole.\na:\n  # -- Its part.\n  b: 1\n")


def test_every_value_that_a_template_reads_exists() -> None:
    known = {path for path, _ in objects(SCHEMA)}
    for template in CHART.rglob("templates/**/*.*"):
        for path in re.findall(r"\.Values\.([A-Za-z.]+)", template.read_text()):
            assert path in known, f"{template.name}: {path}"


def test_every_value_is_read_by_some_template() -> None:
    text = "".join(template.read_text() for template in CHART.rglob("templates/**/*.*"))
    for value in described_values((CHART / "values.yaml").read_text()):
        *_, parent, name = ("", *value.path.split("."))
        # By its path, by way of a variable, or with all that it is among.
        read = rf"\.{parent}\.{name}\b|\$\w+\.{name}\b|\.{parent}\b(?!\.)" if parent else rf"\.Values\.{name}\b"
        assert re.search(read, text), value.path


def test_the_chart_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version.group(1)
    told = {each["image"] for each in yaml.safe_load(chart["annotations"]["artifacthub.io/images"])}
    parts = (VALUES["daemon"]["image"], VALUES["operator"]["image"], VALUES["webhooks"]["probe"]["image"])
    assert told == {f"{VALUES['image']['registry']}/{part['repository']}:{version.group(1)}" for part in parts}


def test_the_annotated_kinds_are_those_the_chart_installs() -> None:
    told = yaml.safe_load(yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]["artifacthub.io/crds"])
    made = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "files" / "crds").glob("*.yaml"))]
    assert {one["name"] for one in told} == {one["metadata"]["name"] for one in made}


def test_the_kind_instructions_load_the_charts_images() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    registry = re.search(r"make images .*REGISTRY=(\S+)", page)
    loaded = re.search(r"kind load docker-image (.*)", page)
    assert registry is not None and loaded is not None
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    parts = (VALUES["daemon"]["image"], VALUES["operator"]["image"], VALUES["webhooks"]["probe"]["image"])
    names = [part["repository"] for part in parts]
    assert loaded[1].split() == [f"{VALUES['image']['registry']}/{name}:{version}" for name in names]
    tag = '"${REGISTRY}rankscope-${component}:${VERSION}"'
    assert tag in (ROOT / "deploy/docker/bake.hcl").read_text()
    assert loaded[1].split() == [f"{registry[1]}{name}:{version}" for name in names]
