"""Draws docs/images/flame-graph.png: the flame graph of a slow rank against its peers, in a real Chromium.

    .venv/bin/python -m tests.integration.flame_graph_picture

The job is made up: four ranks train on images, and rank 3 reads its images slowly."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Final

from rankscope.analysis.profiles.flame_graph import flame_graph
from tools.chromium import page
from tools.played_services import profile

PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "flame-graph.png"
WIDTH, HEIGHT = 1200, 364
# The frame that the mouse is over.
POINTED = "load_image"
PLACE = """(() => {
  const box = boxes.find((box) => label(box.node).startsWith(%r)), area = canvas.getBoundingClientRect();
  return [area.left + box.left + box.width / 2, area.top + box.top + 5];
})()"""


def draw(path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        title = "team/vit-large, rank 3, the last 10m, against its peers"
        (folder / "flame.html").write_bytes(flame_graph(profile(3, (3,)), title, profile(3, (0, 1, 2))))
        with page(folder) as browser:
            browser.call("Emulation.setScrollbarsHidden", hidden=True)
            browser.open((folder / "flame.html").as_uri(), WIDTH, HEIGHT)
            left, top = browser.value(PLACE % POINTED)
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
            taken = browser.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
    path.write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    draw(PICTURE)
