"""What helm makes of the chart: correct for Kubernetes old and new, and accepted by a real API server."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest

from tests.kube.api_server import ApiServer
from tests.ship import cluster
from tests.ship.combinations import COMBINATIONS
from tests.ship.conftest import NEW, RENDERED_TWICE, Rendered
from tests.ship.foreign_kinds import FOREIGN
from tests.ship.helm import NAMESPACE, Helm


def test_helm_lint_finds_nothing_to_say_about_the_chart(helm: Helm) -> None:
    told = helm.lint("everything", COMBINATIONS["everything"])
    assert "0 chart(s) failed" in told and "[WARNING]" not in told and "[INFO]" not in told, told


@functools.cache
def validate(manifest: str, version: str) -> None:
    """Once for all combinations that have the same."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_manifest_is_strictly_valid(rendered: dict[str, Rendered], name: str) -> None:
    """Rendered for the oldest: what is newer must know all of it, but for what has moved since."""
    versions = (NEW, "1.25") if name in RENDERED_TWICE else (NEW,)
    for document in rendered[name].documents:
        if document["kind"] not in FOREIGN and document["apiVersion"] != "policy/v1beta1":
            for version in versions:
                validate(json.dumps(document), version)


@pytest.mark.parametrize("name", RENDERED_TWICE)
def test_manifests_for_the_newest_kubernetes_are_strictly_valid(
    all_rendered: dict[tuple[str, str], Rendered], name: str, tmp_path: Path
) -> None:
    documents = all_rendered[name, NEW].documents
    file = tmp_path / "rendered.yaml"
    file.write_text("\n---\n".join(json.dumps(each) for each in documents))
    command = [str(Path(sys.executable).parent / "kubernetes-validate"), "-k", NEW, "--strict", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "ERROR" not in told, told
    known = [each for each in documents if each["kind"] not in FOREIGN]
    assert told.count("INFO") == len(known), told


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_api_server_accepts_every_manifest_without_dropping_fields(
    rendered: dict[str, Rendered], server: ApiServer, name: str
) -> None:
    kinds = cluster.resources(server.admin)
    # Indexed Jobs are newer than the API server of the tests, Kubernetes 1.20.
    for document in (each for each in rendered[name].documents if each["kind"] != "CronJob"):
        said = cluster.refused(server.admin, cluster.path_of(kinds, document, NAMESPACE), document)
        assert said is None, f"{document['kind']} {document['metadata']['name']}: {said}"
