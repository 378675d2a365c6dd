"""The real helm (tools/setup_helm.sh), with caches of its own and never the developer's cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".helm" / "helm"
CHART = ROOT / "deploy" / "helm" / "rankscope"
RELEASE = "rankscope"
NAMESPACE = "rankscope"
# Under an emulator, on a machine that does other things too.
CALL_SECONDS = 280.0

Document = dict[str, Any]


class HelmError(Exception):
    """What helm said when it refused."""


@dataclass(frozen=True)
class Helm:
    folder: Path
    kubeconfig: Path | None = None

    def run(self, *arguments: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),  # also where it caches what kinds the API server has
            "HELM_CACHE_HOME": str(self.folder / "cache"),
            "HELM_CONFIG_HOME": str(self.folder / "config"),
            "HELM_DATA_HOME": str(self.folder / "data"),
            "KUBECONFIG": str(self.kubeconfig or os.devnull),
            # A fifth quicker under the emulator; one call is over before there is much to collect.
            "GOGC": "off",
            "GOMEMLIMIT": "1GiB",
        }
        assert PROGRAM.exists(), f"{PROGRAM} is missing: run tools/setup_helm.sh"
        done = subprocess.run(
            [str(PROGRAM), *arguments],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise HelmError(f"helm {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
        return done.stdout

    def values_file(self, name: str, values: Mapping[str, Any]) -> str:
        path = self.folder / f"{name}.values.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        return str(path)

    def lint(self, name: str, values: Mapping[str, Any], chart: Path = CHART) -> str:
        return self.run("lint", "--strict", str(chart), "--values", self.values_file(f"lint-{name}", values))

    def template(self, name: str, values: Mapping[str, Any], *flags: str, chart: Path = CHART) -> str:
        """What an install would apply, hooks and their tests as well."""
        file = self.values_file(name, values)
        return self.run("template", RELEASE, str(chart), "--namespace", NAMESPACE, "--values", file, *flags)

    def template_all(self, cases: Mapping[str, Mapping[str, Any]], *flags: str) -> dict[str, list[Document]]:
        """What an install would apply, by name of the values. One call renders all of them, as parts of another chart:
        most of a call's time is the start of the emulated program."""
        parent = self.folder / f"all-{len(list(self.folder.glob('all-*')))}"
        (parent / "charts").mkdir(parents=True)
        (parent / "charts" / "rankscope").symlink_to(CHART)
        about = yaml.safe_load((CHART / "Chart.yaml").read_text())
        parts = [{"name": about["name"], "version": about["version"], "alias": name} for name in cases]
        chart = {"apiVersion": "v2", "name": "all", "version": "0.0.0", "dependencies": parts}
        (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
        found: dict[str, list[Document]] = {name: [] for name in cases}
        for text in re.split(r"^---$", self.template(parent.name, cases, *flags, chart=parent), flags=re.MULTILINE):
            if source := re.search(r"^# Source: all/charts/([^/]+)/", text, re.MULTILINE):
                found[source[1]] += documents(text)
        assert all(found.values())
        return found


class _UniqueKeys(yaml.CSafeLoader):
    """YAML keeps the last of two equal keys, so that a template which writes a label twice would go unseen."""


def _mapping(loader: yaml.CSafeLoader, node: yaml.MappingNode) -> Document:
    loader.flatten_mapping(node)
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    assert not twice, f"{sorted(twice)} twice in one mapping{node.start_mark}"
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def documents(text: str) -> list[Document]:
    # No other loader reads what a cluster is told; this one is the safe one and stricter.
    return [document for document in yaml.load_all(text, Loader=_UniqueKeys) if document]
