from __future__ import annotations

from pathlib import Path
from struct import unpack

from rankscope.analysis.profiles.flame_graph import flame_graph
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.profile import Profile, SampledStack
from tests.integration.flame_graph_picture import HEIGHT, PICTURE, PLACE, WIDTH, draw
from tools.chromium import Page, page

SECOND = 10**9
MAIN = Frame("main", "/app/train.py", 10)
LOAD = Frame("load_image", "/app/dataset.py", 88)
READ = Frame("read", "/app/dataset.py", 90)
STEP = Frame("step", "/app/train.py", 20)
HOSTILE = Frame("</script><script>document.title='owned'</script>", "<img src=https://example.org onerror=alert(1)>", 1)
COLOUR = """(() => {
  const box = boxes.find((box) => label(box.node).startsWith(%r));
  return Array.from(context.getImageData(box.left + box.width - 8, box.top + 3, 1, 1).data);
})()"""


def profile(loading: int) -> Profile:
    return Profile.of(
        [
            SampledStack((LOAD, MAIN), loading, (loading - 1) * SECOND),
            SampledStack((READ, LOAD, MAIN), 1, SECOND),
            SampledStack((STEP, MAIN), 99 - loading, (99 - loading) * SECOND),
            SampledStack((HOSTILE, MAIN), 1, SECOND),
        ]
    )


def shown(browser: Page) -> list[str]:
    names = browser.value("boxes.map((box) => label(box.node))")
    assert isinstance(names, list)
    return names


def test_search_zoom_and_the_orders_work_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "flame.html"
    path.write_bytes(flame_graph(profile(41), "rank 3 </title><b>", profile(2)))
    with page(tmp_path) as browser:
        browser.open(path.as_uri())
        assert browser.value("document.title") == "rank 3 </title><b>"
        assert len(shown(browser)) == 6

        browser.type("/")
        browser.type("Load_Image")
        assert browser.value("element('search').value") == "Load_Image"
        assert browser.value("element('matched').textContent") == "41.0 % matched, reference 2.0 %"
        browser.press("Escape")
        assert browser.value("element('search').value + element('matched').textContent") == ""

        browser.click(*browser.value(PLACE % "load_image"))
        assert shown(browser) == ["all", "main (train.py:10)", "load_image (dataset.py:88)", "read (dataset.py:90)"]
        assert browser.value("element('detail').textContent").startswith("load_image (dataset.py:88): 41.0 %, 41.0 s")
        browser.click(*browser.value(PLACE % "main"))
        assert len(shown(browser)) == 5 + 1
        browser.press("Escape")
        assert browser.value("zoomed") == 0

        browser.value("element('order').click()")
        assert browser.value("boxes.filter((box) => tree.depth[box.node] === 1).map((box) => label(box.node))")[:2] == [
            "step (train.py:20)",
            "load_image (dataset.py:88)",
        ]
        browser.value("element('flip').click()")
        assert browser.value("boxes[0].top > boxes[1].top") is True

        assert browser.value("document.title") == "rank 3 </title><b>"
        problems = [one for one in browser.events if one["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
        requests = [one for one in browser.events if one["method"] == "Network.requestWillBeSent"]
        assert not problems
        assert {one["params"]["request"]["url"] for one in requests} == {path.as_uri()}


def test_colours_distinguish_more_and_less_than_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "flame.html"
    path.write_bytes(flame_graph(profile(41), "rank 3", profile(2)))
    with page(tmp_path) as browser:
        browser.open(path.as_uri())
        more, less = (browser.value(COLOUR % name) for name in ("load_image", "step"))
    assert more[0] > more[2] and less[2] > less[0]


def test_the_picture_in_the_documentation_can_be_drawn_again(tmp_path: Path) -> None:
    draw(tmp_path / "flame-graph.png")
    for picture in (tmp_path / "flame-graph.png", PICTURE):
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) <= 150_000
        assert unpack(">II", content[16:24]) == (WIDTH, HEIGHT)
