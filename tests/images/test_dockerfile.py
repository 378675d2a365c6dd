"""What the Dockerfile says, without building it: pins, hashes, users, and that all it copies is there."""

from __future__ import annotations

import re

import pytest

from tests.images.build_context import is_visible, read_rules, visible_files
from tests.images.dockerfile_reading import DockerfileError, Stage, assignments, read_stages
from tests.images.project_reading import ROOT, read_project

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
BAKE = (ROOT / "deploy" / "docker" / "bake.hcl").read_text()
RULES = read_rules((ROOT / ".dockerignore").read_text())
STAGES = read_stages(DOCKERFILE, {})
USERS = {"daemon": "0:0", "daemon-s3": "0:0", "operator": "65532:65532", "probe": "65532:65532"}


def test_every_base_is_our_stage_or_pinned_by_digest() -> None:
    for stage in STAGES.values():
        assert stage.base in STAGES or re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", stage.base)


def test_everything_copied_from_the_checkout_is_there_and_let_in() -> None:
    seen = set(visible_files(ROOT, RULES))
    for stage in STAGES.values():
        for copy in stage.all("COPY"):
            *sources, _ = copy.words
            for source in sources if "from" not in copy.flags else ():
                assert source in seen or any(name.startswith(f"{source}/") for name in seen), copy.value


def test_the_wheel_is_built_from_all_that_it_holds() -> None:
    """hatchling would leave out in silence what .dockerignore hides."""
    hatch = read_project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    seen = set(visible_files(ROOT, RULES))
    for folder in hatch["only-include"]:
        ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        hidden = {path for path in ours - seen if "__pycache__" not in path}
        assert not hidden, hidden
    assert set(hatch["force-include"]) <= seen


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".env",
        "tls.key",
        ".venv/bin/python",
        "deploy/helm/rankscope/values.yaml",
        "deploy/docker/README.md",
        "daemon/notes.txt",
        "daemon/rankscope/probe/__pycache__/ring.cpython-312.pyc",
        "tests/images/test_dockerfile.py",
    ],
)
def test_nothing_else_gets_near_a_build(path: str) -> None:
    assert not is_visible(path, RULES)


def test_packages_come_by_hash_or_from_an_earlier_stage() -> None:
    installs = [run.value for stage in STAGES.values() for run in stage.all("RUN") if "pip" in run.words[0]]
    assert len(installs) >= 6
    for install in installs:
        by_hash = "--require-hashes --only-binary :all: --requirement" in install
        assert by_hash or "--no-index --no-deps" in install, install
    assert not [
        run.value for stage in STAGES.values() for run in stage.all("RUN") if re.search(r"apt|curl|wget", run.value)
    ]


def test_no_image_holds_the_stages_that_build() -> None:
    for name in USERS:
        assert STAGES[name].base == "runtime"
        assert STAGES["runtime"].base not in STAGES


def test_a_copy_from_a_stage_names_an_earlier_one() -> None:
    earlier: set[str] = set()
    for stage in STAGES.values():
        assert {copy.flags["from"] for copy in stage.all("COPY") if "from" in copy.flags} <= earlier
        earlier.add(stage.name)


@pytest.mark.parametrize("name", USERS)
def test_an_image_has_its_labels_and_a_numeric_user(name: str) -> None:
    """Kubernetes can tell that a number is not root; a name it cannot."""
    stage: Stage = STAGES[name]
    user = stage.last("USER")
    assert user is not None
    assert user.value == USERS[name]
    labels = assignments(" ".join(label.value for label in stage.all("LABEL")))
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}title"] == f"rankscope-{name}"
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    assert {f"{prefix}{part}" for part in ("description", "revision", "version")} <= set(labels)


def test_bake_builds_each_image_for_both_platforms_with_an_sbom() -> None:
    components = re.findall(r"component = \[(.*)\]", BAKE)
    assert [name.strip('" ') for name in components[0].split(",")] == list(USERS)
    assert re.findall(r"targets = \[(.*)\]", BAKE) == components
    assert 'platforms  = ["linux/amd64", "linux/arm64"]' in BAKE
    assert '"type=sbom"' in BAKE
    # A version written here would be a second one.
    assert not re.search(r"\d+\.\d+\.\d+", BAKE)


@pytest.mark.parametrize("text", ["FROM a AS b\nADD x y\n", "FROM a AS b\nRUN --mount=type=secret,id=x cat\n"])
def test_what_these_tests_do_not_understand_they_refuse(text: str) -> None:
    with pytest.raises(DockerfileError):
        read_stages(text, {})
