from __future__ import annotations

import tracemalloc

from benchmarks.fleet_pods import document
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import read_pod

PODS = 1000


def test_a_pod_is_kept_in_little_over_a_kilobyte() -> None:
    """A cluster may have 200,000 of them; as they come from the API server, they are many times that."""
    inventory, kept = Inventory(), {}
    tracemalloc.start()
    try:
        for number in range(PODS):
            pod = read_pod(document(number))
            assert pod is not None
            kept[pod.uid] = pod
            inventory.changed(pod.uid, pod)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / PODS < 1300
    assert len(inventory.runs()) == -(-PODS // 16)
