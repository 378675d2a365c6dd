"""The CustomResourceDefinitions, made from the types: what the API server checks is what the code reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankscope.operator.kube.resources import (
    GROUP,
    NAME_PATTERN,
    VERSION,
    CaptureSpec,
    CaptureStatus,
    ProfilingPolicySpec,
    ProfilingPolicyStatus,
    TrainingRunSpec,
    TrainingRunStatus,
)

Schema = dict[str, Any]

# The keys of a structural schema; the API server refuses or ignores the rest of JSON Schema.
_KEPT = frozenset(
    {
        "type",
        "description",
        "default",
        "enum",
        "format",
        "pattern",
        "required",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
    }
)


@dataclass(frozen=True)
class Kind:
    kind: str
    plural: str
    short_names: tuple[str, ...]
    spec: type
    status: type
    description: str
    columns: tuple[tuple[str, str, str], ...]  # name, type, JSON path
    spec_rules: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.plural}.{GROUP}"


KINDS: tuple[Kind, ...] = (
    Kind(
        kind="TrainingRun",
        plural="trainingruns",
        short_names=("trun",),
        spec=TrainingRunSpec,
        status=TrainingRunStatus,
        description="A training job that Rankscope found, and what it says about it. Made by the operator.",
        columns=(
            ("Job", "string", ".spec.workload.name"),
            ("Ranks", "string", ".status.ranks.summary"),
            ("Step", "string", ".status.step"),
            ("MFU", "string", ".status.mfu"),
            ("Exposed", "string", ".status.exposed"),
            ("Verdict", "string", ".status.verdict.kind"),
            ("Age", "date", ".metadata.creationTimestamp"),
        ),
        spec_rules={},
    ),
    Kind(
        kind="Capture",
        plural="captures",
        short_names=("rcap",),
        spec=CaptureSpec,
        status=CaptureStatus,
        description="Requests a deep capture of some ranks of a run, and reports its result.",
        columns=(
            ("Run", "string", ".spec.run"),
            ("Ranks", "string", ".spec.ranks"),
            ("Phase", "string", ".status.phase"),
            ("Delivered", "string", ".status.delivered"),
            ("Skew-ms", "number", ".status.startSkewMs"),
            ("Age", "date", ".metadata.creationTimestamp"),
        ),
        spec_rules={
            "not": {"required": ["steps", "seconds"]},
            # Names outside Kubernetes have other characters, too.
            "allOf": [{"properties": {"run": {"pattern": NAME_PATTERN}}}],
        },
    ),
    Kind(
        kind="ProfilingPolicy",
        plural="profilingpolicies",
        short_names=("ppol",),
        spec=ProfilingPolicySpec,
        status=ProfilingPolicyStatus,
        description="How runs are watched and when they are captured by themselves.",
        columns=(
            ("Priority", "integer", ".spec.priority"),
            ("Runs", "integer", ".status.runs"),
            ("Age", "date", ".metadata.creationTimestamp"),
        ),
        spec_rules={},
    ),
)


def definition(kind: Kind) -> Schema:
    """The CRD as the API server takes it."""
    spec = structural_schema(kind.spec)
    spec.update(kind.spec_rules)
    schema: Schema = {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural_schema(kind.status),
        },
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": path} for name, type_, path in kind.columns
        ],
    }
    names = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "singular": kind.kind.lower(),
        "shortNames": list(kind.short_names),
        "categories": ["rankscope"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.name},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def structural_schema(type_: type) -> Schema:
    """A Struct as a structural schema: references filled in, only what Kubernetes knows."""
    (schema,), components = msgspec.json.schema_components([type_], ref_template="{name}")
    return _structural(schema, components)


def _structural(schema: Mapping[str, Any], components: Mapping[str, Any]) -> Schema:
    if "$ref" in schema:
        merged = {**components[schema["$ref"]], **{key: value for key, value in schema.items() if key != "$ref"}}
        return _structural(merged, components)
    if "anyOf" in schema or "allOf" in schema:
        parts: Sequence[Mapping[str, Any]] = schema.get("anyOf") or schema["allOf"]
        if len(parts) != 1:
            raise TypeError(f"a structural schema has one type for a field, not {parts}")
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "allOf")}
        return _structural({**parts[0], **rest}, components)
    result: Schema = {key: value for key, value in schema.items() if key in _KEPT}
    if "enum" in result and "type" not in result:
        result["type"] = "string"
    # OpenAPI 3.0, which CRDs use, has the exclusive bounds as flags.
    for bound, name, flag in (
        ("exclusiveMinimum", "minimum", "exclusiveMinimum"),
        ("exclusiveMaximum", "maximum", "exclusiveMaximum"),
    ):
        if bound in schema:
            result[name], result[flag] = schema[bound], True
    if "properties" in schema:
        result["properties"] = {name: _structural(part, components) for name, part in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        result["items"] = _structural(schema["items"], components)
    if isinstance(schema.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _structural(schema["additionalProperties"], components)
    if result.get("required") == []:
        del result["required"]
    return result
