from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rankscope.operator.kube.crds import KINDS, definition, structural_schema
from rankscope.operator.kube.resources import CaptureSpec, TrainingRunStatus


def parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for part in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])):
        yield from parts(part)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_schema_part_has_a_type_and_no_reference(kind: Any) -> None:
    version = definition(kind)["spec"]["versions"][0]
    for part in parts(version["schema"]["openAPIV3Schema"]):
        assert "type" in part, part
        assert not {"$ref", "anyOf", "title"} & part.keys()
    assert version["subresources"] == {"status": {}}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_printer_column_shows_a_field_that_exists(kind: Any) -> None:
    version = definition(kind)["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    for column in version["additionalPrinterColumns"]:
        place = schema
        path = column["jsonPath"].lstrip(".").split(".")
        if path[0] == "metadata":
            continue
        for name in path:
            place = place["properties"][name]
        assert place["type"] in (column["type"], "integer", "number")


def test_a_capture_has_not_both_lengths_and_nothing_unknown() -> None:
    (capture,) = (kind for kind in KINDS if kind.kind == "Capture")
    spec = definition(capture)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["not"] == {"required": ["steps", "seconds"]}
    with pytest.raises(msgspec.ValidationError, match="unknown field `stpes`"):
        msgspec.convert({"run": "a", "stpes": 3}, CaptureSpec)
    with pytest.raises(msgspec.ValidationError, match="ranks"):
        msgspec.convert({"run": "a", "ranks": "../../etc", "steps": 3}, CaptureSpec)


def test_what_was_not_measured_is_not_written() -> None:
    assert "mfuRatio" not in msgspec.to_builtins(TrainingRunStatus(phase="Running"))
    assert structural_schema(TrainingRunStatus)["properties"]["mfuRatio"] == {"type": "number"}
