from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.profiles import flame_graph as module
from rankscope.analysis.profiles.flame_graph import flame_graph
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.profile import Profile, SampledStack

MAIN = Frame("main", "/app/train.py", 10)
LOAD = Frame("load_image", "/app/dataset.py", 88)
STEP = Frame("step", "/app/train.py", 20)
PROFILE = Profile.of([SampledStack((LOAD, MAIN), 4, 400), SampledStack((STEP, MAIN), 6, 600)])
REFERENCE = Profile.of([SampledStack((STEP, MAIN), 9, 900), SampledStack((LOAD, MAIN), 1, 100, rank=1)])
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    '"><img src=https://example.org/x onerror=alert(1)>',
    "]]>&lt;\u2028\u2029\x00\x1b[2J\ud800",
    "'; alert(1); '",
)


class Page(HTMLParser):
    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(content.decode())
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attributes
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open, []).append(data)

    @property
    def data(self) -> dict[str, Any]:
        found = json.loads(self.texts["script"][0])
        assert isinstance(found, dict)
        return found


def totals(data: dict[str, Any]) -> dict[tuple[str, ...], list[int]]:
    """Path of functions to its time here and in the reference."""
    paths: list[tuple[str, ...]] = [()]
    found = {(): [data["own"][0], data["reference"][0]]}
    for parent, frame, own, reference in zip(
        data["parent"], data["frame"], data["own"][1:], data["reference"][1:], strict=True
    ):
        paths.append((*paths[parent], data["frames"][frame][0]))
        found[paths[-1]] = [own, reference]
    return found


def test_the_page_holds_the_tree_of_both_profiles() -> None:
    data = Page(flame_graph(PROFILE, "rank 3", REFERENCE)).data
    assert data["compared"] is True
    assert totals(data) == {
        (): [0, 0],
        ("main",): [0, 0],
        ("main", "load_image"): [400, 100],
        ("main", "step"): [600, 900],
    }
    assert Page(flame_graph(PROFILE, "rank 3")).data["compared"] is False


def test_the_page_uses_and_allows_only_its_own_resources() -> None:
    content = flame_graph(PROFILE, "rank 3").decode()
    page = Page(content.encode())
    assert not re.search(r"https?:|//[a-z]|url\(|@import", content.replace("// ", ""))
    assert not {"src", "href", "style", "action"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    policy = next(value for _, value in page.attributes if value and value.startswith("default-src"))
    assert "unsafe" not in policy and policy.startswith("default-src 'none';")
    for kind, text in (("script", page.texts["script"][1]), ("style", page.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40)), min_size=3, max_size=3))
def test_names_from_processes_stay_data(names: list[str]) -> None:
    function, file, title = names
    hostile = Profile.of([SampledStack((Frame(function, file, 1), MAIN), 1, 100)])
    page = Page(flame_graph(hostile, title))
    assert page.tags == Page(flame_graph(PROFILE, "title")).tags
    shown = page.data["frames"][-1]
    assert len(shown[0]) == len(function) and shown[0].isprintable() and shown[1].isprintable()
    if function.isprintable() and file.isprintable():
        assert shown[:2] == [function, file]


def test_the_smallest_frames_become_part_of_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 2)
    assert totals(Page(flame_graph(PROFILE, "")).data) == {
        (): [0, 0],
        ("main",): [400, 0],
        ("main", "step"): [600, 0],
    }


def test_a_profile_without_samples_is_a_page_too() -> None:
    assert totals(Page(flame_graph(Profile.of(()), "nothing")).data) == {(): [0, 0]}
