from __future__ import annotations

from typing import Any

from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Owner, Pod


def pod(uid: str, **fields: Any) -> Pod:
    known = {"uid": uid, "name": f"pod-{uid}", "namespace": "team", "node": "a", "phase": "Running"}
    return Pod(**{**known, **fields})


LABELS = {"training.kubeflow.org/job-name": "llama"}


def test_labelled_pods_make_a_run_at_once_others_with_ranks() -> None:
    inventory = Inventory()
    inventory.changed("1", pod("1", labels=LABELS))
    inventory.changed("2", pod("2", owner=Owner("apps/v1", "StatefulSet", "diffusion", "u")))
    assert [key.name for key in inventory.runs()] == ["llama"]
    inventory.ranks_seen_in(["2", "unknown"])
    assert [key.name for key in inventory.runs()] == ["llama", "diffusion"]
    inventory.deleted("2")
    assert [key.name for key in inventory.runs()] == ["llama"]


def test_a_pod_leaves_its_run_whenever_it_opts_out() -> None:
    inventory = Inventory()
    inventory.changed("1", pod("1", labels=LABELS))
    inventory.changed("2", pod("2", labels=LABELS, annotations={"rankscope.dev/watch": "false"}))
    ((_, run),) = inventory.runs().items()
    assert list(run.pods) == ["1"]
    inventory.changed("1", pod("1", labels=LABELS, annotations={"rankscope.dev/watch": "false"}))
    assert not inventory.runs() and inventory.find("1") is None
