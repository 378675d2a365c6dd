"""The name of a run and the metric labels made of it. In Kubernetes a run is called NAMESPACE/RUN, elsewhere RUN."""

from __future__ import annotations


def run_labels(name: str) -> dict[str, str]:
    """Labels that identify a run. `run_namespace` is empty outside Kubernetes."""
    namespace, slash, run = name.partition("/")
    return {"run_namespace": namespace, "run": run} if slash else {"run_namespace": "", "run": name}


def run_name(run_namespace: str, run: str) -> str:
    """The name that has these labels."""
    return f"{run_namespace}/{run}" if run_namespace else run
