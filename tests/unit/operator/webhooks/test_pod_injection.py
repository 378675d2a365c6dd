from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.operator.webhooks.pod_injection import (
    CONTAINERS,
    FOLDER,
    GIVEN_PYTHONPATH,
    IMAGE_PYTHONPATH,
    INJECTED,
    NOBODY,
    NOT_INJECTED,
    VOLUME,
    Injection,
    Mode,
    inject,
)

IMAGE = "registry.example/rankscope:1"


def patched(document: dict[str, Any], patch: Any) -> dict[str, Any]:
    """RFC 6902, strictly: what does not exist cannot be appended to or replaced."""
    root = copy.deepcopy(document)
    for operation in patch:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = root
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        value = copy.deepcopy(operation["value"])
        if isinstance(place, list):
            if last == "-":
                place.append(value)
            elif operation["op"] == "add":
                assert int(last) <= len(place)
                place.insert(int(last), value)
            else:
                place[int(last)] = value
        else:
            assert isinstance(place, dict)
            assert operation["op"] == "add" or last in place
            place[last] = value
    return root


def pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "worker-0"}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"containers": list(containers) or [{"name": "pytorch"}], **spec}}


def injected(document: dict[str, Any], wish: Mode = "probe", image: str | None = IMAGE) -> dict[str, Any]:
    return patched(document, inject(document, wish, image).patch)


def env(document: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {
        item["name"]: item.get("value", item.get("valueFrom")) for item in document["spec"]["containers"][index]["env"]
    }


def test_a_bare_pod_gets_environment_volume_and_init_container() -> None:
    result = injected(pod())
    assert env(result) == {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1", "PYTHONPATH": FOLDER}
    (container,) = result["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}]
    (init,) = result["spec"]["initContainers"]
    assert init["image"] == IMAGE
    assert init["command"][-1] == FOLDER
    assert result["spec"]["volumes"][0]["name"] == VOLUME
    assert result["metadata"]["annotations"] == {INJECTED: "kineto=pytorch probe=pytorch"}


def test_kineto_alone_adds_two_variables_and_nothing_else() -> None:
    result = injected(pod(), "kineto")
    assert env(result) == {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1"}
    assert result["spec"].keys() == {"containers"}


def test_what_the_user_set_stays_and_is_told() -> None:
    given = [{"name": "KINETO_USE_DAEMON", "value": "0"}, {"name": "PYTHONPATH", "value": "/src:$(HOME)/lib"}]
    result = injected(pod({"name": "pytorch", "env": given}))
    assert env(result) == {
        "KINETO_USE_DAEMON": "0",
        "TEARDOWN_CUPTI": "1",
        "PYTHONPATH": f"{FOLDER}:/src:$(HOME)/lib",
    }
    assert result["metadata"]["annotations"][INJECTED] == "probe=pytorch"


def test_a_path_from_elsewhere_goes_behind_ours_through_a_reference() -> None:
    source = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    given = [{"name": "A", "value": "1"}, {"name": "PYTHONPATH", "valueFrom": source}, {"name": "B", "value": "2"}]
    result = injected(pod({"name": "pytorch", "env": given}))
    names = [item["name"] for item in result["spec"]["containers"][0]["env"]]
    # A reference is only resolved to what stands before it.
    assert names[:4] == ["A", GIVEN_PYTHONPATH, "PYTHONPATH", "B"]
    assert env(result)[GIVEN_PYTHONPATH] == source
    assert env(result)["PYTHONPATH"] == f"{FOLDER}:$({GIVEN_PYTHONPATH})"


def test_of_a_path_that_is_set_twice_the_last_counts() -> None:
    given = [{"name": "PYTHONPATH", "value": "/one"}, {"name": "PYTHONPATH", "value": "/two"}]
    assert env(injected(pod({"name": "pytorch", "env": given})))["PYTHONPATH"] == f"{FOLDER}:/two"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([{"configMapRef": {"name": "all"}}], f"{FOLDER}:$(PYTHONPATH)"),
        ([{"prefix": "DB_", "secretRef": {"name": "db"}}], FOLDER),
        ([{"prefix": "PYTHON", "configMapRef": {"name": "p"}}], f"{FOLDER}:$(PYTHONPATH)"),
    ],
)
def test_a_path_that_env_from_may_bring_is_kept(sources: list[Any], expected: str) -> None:
    assert env(injected(pod({"name": "pytorch", "envFrom": sources})))["PYTHONPATH"] == expected


def test_mode_true_hides_no_pythonpath_that_the_image_may_set() -> None:
    injection = inject(pod(), "true", IMAGE)
    result = patched(pod(), injection.patch)
    assert "PYTHONPATH" not in env(result)
    assert "initContainers" not in result["spec"]
    assert "may set PYTHONPATH" in injection.notes[0]
    assert result["metadata"]["annotations"][NOT_INJECTED] == injection.notes[0]
    told = pod(annotations={IMAGE_PYTHONPATH: "/app"})
    assert env(injected(told, "true"))["PYTHONPATH"] == f"{FOLDER}:/app"
    nothing_there = pod(annotations={IMAGE_PYTHONPATH: ""})
    assert env(injected(nothing_there, "true"))["PYTHONPATH"] == FOLDER
    visible = pod({"name": "pytorch", "env": [{"name": "PYTHONPATH", "value": "/app"}]})
    assert env(injected(visible, "true"))["PYTHONPATH"] == f"{FOLDER}:/app"


def test_every_container_is_meant_unless_some_are_named() -> None:
    containers = ({"name": "pytorch"}, {"name": "sidecar", "env": [{"name": "X", "value": "1"}]})
    both = injected(pod(*containers))
    assert [("PYTHONPATH" in env(both, index)) for index in (0, 1)] == [True, True]
    assert len(both["spec"]["initContainers"]) == 1
    one = injected(pod(*containers, annotations={CONTAINERS: " pytorch ,"}))
    assert "PYTHONPATH" in env(one)
    assert one["spec"]["containers"][1] == containers[1]


def test_a_name_that_no_container_has_is_told() -> None:
    injection = inject(pod(annotations={CONTAINERS: "trainer"}), "probe", IMAGE)
    assert injection.notes == (f"{CONTAINERS}: no container is called trainer",)
    assert [operation["path"] for operation in injection.patch] == ["/metadata/annotations/rankscope.dev~1not-injected"]


def test_init_containers_of_the_user_stay_unchanged_before_ours() -> None:
    first = {"name": "download", "image": "x"}
    result = injected(pod(initContainers=[first]))
    assert result["spec"]["initContainers"][0] == first
    assert result["spec"]["initContainers"][1]["name"] == VOLUME


@pytest.mark.parametrize(
    "resources",
    [{"requests": {"cpu": "8"}, "limits": {"cpu": "8"}}, {"limits": {"memory": "1Gi", "nvidia.com/gpu": "8"}}],
)
def test_a_guaranteed_pod_stays_guaranteed(resources: dict[str, Any]) -> None:
    (init,) = injected(pod({"name": "pytorch", "resources": resources}))["spec"]["initContainers"]
    assert init["resources"]["requests"] == init["resources"]["limits"]
    assert init["resources"]["limits"].keys() == {"cpu", "memory"}


def test_a_best_effort_pod_stays_best_effort() -> None:
    for resources in ({}, {"limits": {"nvidia.com/gpu": "8"}}):
        (init,) = injected(pod({"name": "pytorch", "resources": resources}))["spec"]["initContainers"]
        assert "resources" not in init


def test_our_init_container_passes_the_users_security_policies() -> None:
    chosen = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, "privileged": True}
    (init,) = injected(pod({"name": "pytorch", "securityContext": chosen}))["spec"]["initContainers"]
    assert init["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": NOBODY,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (init,) = injected(pod(securityContext={"runAsNonRoot": True, "runAsUser": 1000}))["spec"]["initContainers"]
    assert "runAsUser" not in init["securityContext"]


@pytest.mark.parametrize(
    "document",
    [
        pod(volumes=[{"name": VOLUME, "hostPath": {"path": "/"}}]),
        pod({"name": "pytorch", "volumeMounts": [{"name": "data", "mountPath": f"{FOLDER}/"}]}),
    ],
)
def test_no_probe_is_injected_where_the_user_has_something_else(document: dict[str, Any]) -> None:
    injection = inject(document, "probe", IMAGE)
    assert "something else" in injection.notes[0]
    result = patched(document, injection.patch)
    assert env(result).keys() == {"KINETO_USE_DAEMON", "TEARDOWN_CUPTI"}
    assert "initContainers" not in result["spec"]


def test_without_an_image_for_it_there_is_no_probe() -> None:
    assert "--probe-image" in inject(pod(), "probe", None).notes[0]


@pytest.mark.parametrize(
    "document",
    [
        pod(annotations={"kubernetes.io/config.mirror": "x"}),
        pod(nodeSelector={"kubernetes.io/os": "windows"}),
        pod(os={"name": "windows"}),
    ],
)
def test_pods_that_must_not_be_changed_are_not(document: dict[str, Any]) -> None:
    assert inject(document, "probe", IMAGE).patch == ()


@pytest.mark.parametrize(
    "document",
    [{}, {"metadata": None, "spec": None}, {"metadata": {}, "spec": {"containers": "x"}}, {"metadata": {}, "spec": []}],
)
def test_what_is_no_pod_gets_nothing(document: dict[str, Any]) -> None:
    assert inject(document, "probe", IMAGE) == Injection()


TEXTS = st.sampled_from(["", "0", "1", "/src", f"/a:{FOLDER}:/b", FOLDER, "$(X)", f"{FOLDER}x"])
ENTRIES = st.builds(
    lambda name, value, source: {"name": name, **({"valueFrom": source} if source else {"value": value})},
    st.sampled_from(["PYTHONPATH", "KINETO_USE_DAEMON", "TEARDOWN_CUPTI", "HOME", "X"]),
    TEXTS,
    st.sampled_from([None, {"secretKeyRef": {"name": "s", "key": "k"}}]),
)
MOUNTS = st.builds(
    lambda name, path: {"name": name, "mountPath": path},
    st.sampled_from([VOLUME, "data"]),
    st.sampled_from([FOLDER, "/data", f"{FOLDER}/"]),
)


def optional(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(st.just({}), st.builds(lambda value: {name: value}, st.none() | st.lists(values, max_size=3)))


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    containers = [
        {
            "name": f"c{index}",
            **draw(optional("env", ENTRIES)),
            **draw(optional("volumeMounts", MOUNTS)),
            **draw(optional("envFrom", st.sampled_from([{"prefix": "DB_"}, {"configMapRef": {"name": "c"}}]))),
        }
        for index in range(draw(st.integers(1, 3)))
    ]
    volumes = st.sampled_from([{"name": "data", "hostPath": {}}, {"name": VOLUME, "emptyDir": {}}])
    annotations = st.dictionaries(
        st.sampled_from([CONTAINERS, INJECTED, NOT_INJECTED, IMAGE_PYTHONPATH, "else"]),
        st.sampled_from(["", "c0", "x"]),
    )
    spec = {
        "containers": containers,
        **draw(optional("volumes", volumes)),
        **draw(optional("initContainers", st.sampled_from([{"name": "download"}, {"name": VOLUME}]))),
    }
    metadata: dict[str, Any] = {"name": "p"}
    if draw(st.booleans()):
        metadata["annotations"] = draw(st.none() | annotations)
    return {"metadata": metadata, "spec": spec}


@given(pods(), st.sampled_from(["true", "kineto", "probe"]))
def test_any_pod_is_patched_once_and_keeps_what_it_had(document: dict[str, Any], wish: Mode) -> None:
    once = injected(document, wish)
    assert inject(once, wish, IMAGE).patch == ()
    for old, new in zip(document["spec"]["containers"], once["spec"]["containers"], strict=True):
        kept = [entry for entry in new.get("env") or () if entry in (old.get("env") or ())]
        changed = [entry for entry in old.get("env") or () if entry not in kept]
        assert {entry["name"] for entry in changed} <= {"PYTHONPATH"}
        for entry in changed:
            # Behind ours, as it was.
            path = next(e["value"] for e in reversed(new["env"]) if e["name"] == "PYTHONPATH")
            assert path in (f"{FOLDER}:{entry.get('value')}", FOLDER, f"{FOLDER}:$({GIVEN_PYTHONPATH})")
        names = [entry["name"] for entry in new.get("env") or ()]
        assert {"KINETO_USE_DAEMON", "TEARDOWN_CUPTI"} <= set(names) or CONTAINERS in once["metadata"]["annotations"]
        mounts = old.get("volumeMounts") or []
        assert (new.get("volumeMounts") or [])[: len(mounts)] == mounts
    for kind in ("volumes", "initContainers"):
        held = document["spec"].get(kind) or []
        assert (once["spec"].get(kind) or [])[: len(held)] == held


def test_injection_starts_the_probe_in_a_python_without_rankscope(tmp_path: Path) -> None:
    """As a kubelet would: the init container first, then the container with its variables, the volume in both."""
    (tmp_path / "theirs.py").write_text("name = 'training code'\n")
    result = injected(pod({"name": "pytorch", "env": [{"name": "PYTHONPATH", "value": str(tmp_path)}]}))
    folder = str(tmp_path / "volume")
    (init,) = result["spec"]["initContainers"]
    subprocess.run([sys.executable, *(part.replace(FOLDER, folder) for part in init["command"][1:])], check=True)
    program = "import sys, theirs; print(theirs.name, 'rankscope.probe.bootstrap' in sys.modules)"
    variables = {name: value.replace(FOLDER, folder) for name, value in env(result).items()}
    python = Path(sys.base_prefix) / "bin" / "python3"
    done = subprocess.run([python, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("training code True\n", "")


def test_a_pod_of_sixteen_thousand_containers_is_left_alone() -> None:
    many = pod(*({"name": f"c{number}"} for number in range(16_000)))
    assert inject(many, "true", IMAGE) == Injection(notes=("the pod has more than 128 containers",))


def test_the_work_grows_with_the_size_of_the_review() -> None:
    """Counted, not timed: how often an entry of the pod's lists is looked at."""

    class Counted(list[Any]):
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                Counted.looks += 1
                yield item

    def looks(size: int) -> int:
        env = [{"name": f"v{number}", "value": "x"} for number in range(size)]
        containers = [{"name": f"c{number}", "env": Counted(env), "volumeMounts": Counted()} for number in range(size)]
        volumes = [{"name": f"v{number}", "emptyDir": {}} for number in range(size * size)]
        Counted.looks = 0
        spec = {"containers": Counted(containers), "volumes": Counted(volumes)}
        assert inject({"metadata": {"name": "p"}, "spec": spec}, "true", IMAGE).notes
        return Counted.looks

    # Four times as many entries in all: containers, their variables and volumes.
    assert looks(64) <= 4.5 * looks(32)
