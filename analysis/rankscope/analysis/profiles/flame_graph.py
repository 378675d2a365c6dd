"""A profile for viewers: an interactive flame graph, folded stacks, and speedscope's JSON.

The flame graph is one HTML file that needs nothing else. Its script and style are the files `flame_graph.js` and
`flame_graph.css` beside this one. The data are a tree of frames in a block of JSON."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib import resources
from typing import Final

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.profile import Profile
from rankscope.common.text import printable

MAX_NODES: Final = 50_000
TITLE_CHARACTERS: Final = 300
# Readers know the format by this name; nothing is fetched from it.
SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def flame_graph(profile: Profile, title: str, reference: Profile | None = None) -> bytes:
    """With a `reference`, colours show what has a larger or smaller share than there."""
    tree = _Tree()
    tree.add(profile, 0)
    if reference is not None:
        tree.add(reference, 1)
    title = printable(title, TITLE_CHARACTERS)
    document = {"title": title, "compared": reference is not None, **tree.columns()}
    script, style = _part("flame_graph.js"), _part("flame_graph.css")
    legend = "more than the reference is red, less is blue" if reference is not None else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{content_policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style></head>
<body>
<header>
<h1>{escape(title)}</h1>
<input id="search" type="search" placeholder="Search ( / )" aria-label="Search functions and files" autocomplete="off">
<output id="matched"></output>
<button id="order" type="button" aria-pressed="false">Bottom-up</button>
<button id="flip" type="button" aria-pressed="false">Flame</button>
<button id="reset" type="button">Reset zoom</button>
<span>{escape(legend)}</span>
</header>
<p id="detail" aria-live="polite"></p>
<canvas id="graph" role="img" aria-label="Flame graph"></canvas>
<script id="profile" type="application/json">{_embedded(document)}</script>
<script>{script}</script>
</body></html>
""".encode(errors="replace")


@lru_cache
def content_policy() -> str:
    """Of the page. Names come from training processes: one that were not escaped could still neither run nor fetch
    anything."""
    script, style = (_digest(_part(f"flame_graph.{kind}")) for kind in ("js", "css"))
    return f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"


class _Tree:
    """Stacks merged from their outermost frames on. A parent comes before its children."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and frame
        self._values: list[list[int]] = [[0, 0]]  # of the root and the nodes: time of their own

    def add(self, profile: Profile, side: int) -> None:
        frames = [self._frames.setdefault(frame, len(self._frames)) for frame in profile.frames]
        nodes = self._nodes
        for stack, value in zip(profile.stacks(), _values(profile), strict=True):
            if not value:
                continue
            node = 0
            for frame in reversed(stack):
                key = (node, frames[frame])
                node = nodes.get(key, 0)
                if not node:
                    node = nodes[key] = len(self._values)
                    self._values.append([0, 0])
            self._values[node][side] += value

    def columns(self) -> dict[str, object]:
        """Beyond the limit, the smallest nodes become part of their parents."""
        keys = list(self._nodes)
        own = [list(value) for value in self._values]
        totals = [list(value) for value in self._values]
        for number in range(len(keys), 0, -1):
            parent = keys[number - 1][0]
            for side in (0, 1):
                totals[parent][side] += totals[number][side]
        # A parent is at least as large as its children and comes before them, so it is never left out alone.
        largest = sorted(range(1, len(keys) + 1), key=lambda number: (-max(totals[number]), number))
        kept = sorted(largest[:MAX_NODES])
        place = {0: 0} | {number: position for position, number in enumerate(kept, 1)}
        for number in range(len(keys), 0, -1):
            if number not in place:
                parent = keys[number - 1][0]
                own[parent] = [own[parent][0] + own[number][0], own[parent][1] + own[number][1]]
        frames = [keys[number - 1][1] for number in kept]
        used = {frame: position for position, frame in enumerate(dict.fromkeys(frames))}
        names = list(self._frames)
        return {
            "frames": [
                [printable(f.function), printable(f.file), f.line, f.kind] for f in map(names.__getitem__, used)
            ],
            "parent": [place[keys[number - 1][0]] for number in kept],
            "frame": [used[frame] for frame in frames],
            "own": [own[number][0] for number in (0, *kept)],
            "reference": [own[number][1] for number in (0, *kept)],
        }


def _values(profile: Profile) -> Sequence[int]:
    """Nanoseconds by stack."""
    values = [0] * len(profile.stack_ends)
    for stack, nanos in zip(profile.stack.tolist(), profile.nanos.tolist(), strict=True):
        values[stack] += nanos
    return values


def _embedded(document: object) -> str:
    """JSON that ends no script element, whatever the names are."""
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@lru_cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def folded(profile: Profile, *, in_nanos: bool = False) -> bytes:
    """A line per stack, outermost frame first, with its samples or nanoseconds: for `flamegraph.pl`, speedscope and
    others. Ranks, threads and phases are added up."""
    weights = profile.nanos if in_nanos else profile.samples
    totals: Counter[int] = Counter()
    for stack, weight in zip(profile.stack.tolist(), weights.tolist(), strict=True):
        totals[stack] += weight
    names = [_folded_name(frame) for frame in profile.frames]
    stacks = profile.stacks()
    lines = (
        f"{';'.join(names[frame] for frame in reversed(stacks[stack])) or '(no stack)'} {total}\n"
        for stack, total in totals.most_common()
    )
    return "".join(lines).encode(errors="replace")


def _folded_name(frame: Frame) -> str:
    """A semicolon would be read as two frames."""
    place = f"{frame.file}:{frame.line}" if frame.line else frame.file
    return printable(f"{frame.function} ({place})" if place else frame.function).replace(";", ":")


def speedscope(profile: Profile, title: str) -> bytes:
    """A profile per rank and thread, in nanoseconds of wall time."""
    stacks = profile.stacks()
    parts: dict[tuple[int, int], tuple[list[list[int]], list[int]]] = {}
    columns = (profile.rank, profile.thread, profile.stack, profile.nanos)
    for rank, thread, stack, nanos in zip(*(column.tolist() for column in columns), strict=True):
        samples, weights = parts.setdefault((rank, thread), ([], []))
        samples.append(stacks[stack][::-1])
        weights.append(nanos)
    document = {
        "$schema": SPEEDSCOPE_SCHEMA,
        "name": title,
        "exporter": "rankscope",
        "shared": {
            "frames": [
                {"name": frame.function}
                | ({"file": frame.file} if frame.file else {})
                | ({"line": frame.line} if frame.line else {})
                for frame in profile.frames
            ]
        },
        "profiles": [
            {
                "type": "sampled",
                "name": f"rank {rank}" + (f", {profile.threads[thread]}" if profile.threads[thread] else ""),
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
            for (rank, thread), (samples, weights) in sorted(parts.items())
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode()
