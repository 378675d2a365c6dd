"""Mistakes in objects of our kinds that a schema cannot describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rankscope.operator.kube.resources import AutomaticCaptures, ProfilingPolicySpec, Thresholds

_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# Bounded: this runs before the schema is checked, and endless digits would take forever.
_RANGE = re.compile(r"\b([0-9]{1,7})-([0-9]{1,7})\b")


def capture_mistakes(document: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[str]:
    spec = _spec(document)
    if old is not None:
        if spec != _spec(old):
            return ["spec cannot be changed once a capture is asked for: delete this Capture and make another"]
        return []
    given = [name for name in ("steps", "seconds") if spec.get(name) is not None]
    if len(given) == 2:
        return ["spec.steps and spec.seconds exclude each other: give one"]
    ranks = spec.get("ranks")
    if isinstance(ranks, str):
        for first, last in _RANGE.findall(ranks):
            if int(first) > int(last):
                return [f"spec.ranks: {first}-{last} is empty: write {last}-{first}"]
    return []


def run_mistakes(document: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[str]:
    if old is not None and _spec(document).get("workload") != _spec(old).get("workload"):
        return ["spec.workload cannot be changed: the run's history is that workload's"]
    return []


def policy_mistakes(document: Mapping[str, Any]) -> list[str]:
    try:
        spec = msgspec.convert(_spec(document), ProfilingPolicySpec)
    except msgspec.ValidationError:
        return []  # refused by the schema, or allowed by a newer one
    found = []
    for key, value in spec.selector.match_labels.items():
        if not _is_label_key(key) or (value and not _LABEL_NAME.fullmatch(value)):
            found.append(f"spec.selector.matchLabels: {key[:63]!r}: {value[:63]!r} is not a label: no pod can have it")
    automatic = spec.automatic_captures
    if isinstance(automatic, AutomaticCaptures):
        useless = [kind for kind in automatic.on if not kind.is_finding]
        if useless:
            found.append(f"spec.automaticCaptures.on: {', '.join(useless)} is no reason for a capture")
        if len(set(automatic.on)) != len(automatic.on):
            found.append("spec.automaticCaptures.on names a verdict twice")
    if isinstance(spec.thresholds, Thresholds) and spec.thresholds.mfu_target == 0:
        found.append("spec.thresholds.mfuTarget: no run is below 0: leave it out")
    return found


def policy_advice(document: Mapping[str, Any]) -> list[str]:
    """Warnings about what is allowed but probably not intended."""
    try:
        spec = msgspec.convert(_spec(document), ProfilingPolicySpec)
    except msgspec.ValidationError:
        return []
    parts = (spec.sampling, spec.thresholds, spec.automatic_captures, spec.duty_cycle)
    if all(part is msgspec.UNSET for part in parts):
        return ["the policy sets nothing: it only hides policies of lower priority"]
    return []


def _is_label_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return bool(_LABEL_NAME.fullmatch(name)) and (not slash or bool(_LABEL_PREFIX.fullmatch(prefix)))


def _spec(document: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = document.get("spec")
    return spec if isinstance(spec, Mapping) else {}
