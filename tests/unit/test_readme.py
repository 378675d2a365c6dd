"""Every sentence of README.md has its evidence in tests/readme_claims.txt, and the evidence exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "tests" / "readme_claims.txt"
NOTHING = "-"
PERFORMANCE = "docs/performance.md"
# What a section with measurements names.
_TREE = re.compile(r"\bcommit:? ([0-9a-f]{7}|not recorded)", re.IGNORECASE)
_MACHINE = re.compile(r"\bH200\b|\bcores\b")

_PRINTED_TEXT = re.compile(r"^```text\n(.*)\n(?s:.*?)^```$", re.MULTILINE)
_COMMANDS = re.compile(r"^```\w+\n(?s:.*?)^```$", re.MULTILINE)  # tests/doc_commands.py has those
_HEADING, _COMMENT = re.compile(r"^#.*", re.MULTILINE), re.compile(r"<!--.*?-->")
_TABLE_HEAD = re.compile(r"^\|.*\|\n\|[-:|]+\|$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
_NEXT_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=[-|])")  # so is a row, or an item of a list
_NEXT_SENTENCE = re.compile(r"(?<=[.!?])(?<!^\d\.)\s+(?=[A-Z`])")  # not behind the number of a step


def sentences(page: str) -> Iterator[str]:
    """Sentences, rows of tables and first lines of printed texts, without the targets of links."""
    page = _PRINTED_TEXT.sub(r"\n\1\n", page)
    for left_out in (_COMMANDS, _HEADING, _COMMENT, _TABLE_HEAD):
        page = left_out.sub("\n", page)
    page = _LINK.sub(r"\1", page).replace("**", "")
    for paragraph in _NEXT_PARAGRAPH.split(page):
        for sentence in _NEXT_SENTENCE.split(" ".join(paragraph.split())):
            if sentence:
                yield sentence.removeprefix("- ")


def claims() -> dict[str, list[str]]:
    """The evidence of each sentence."""
    found: dict[str, list[str]] = {}
    for line in CLAIMS.read_text().splitlines():
        if line.startswith("    "):
            found[next(reversed(found))].append(line.strip())
        elif line and not line.startswith("#"):
            found[line] = []
    return found


EVIDENCE = sorted({evidence for named in claims().values() for evidence in named} - {NOTHING})


def test_every_sentence_of_the_readme_has_its_evidence() -> None:
    said, known = list(sentences((ROOT / "README.md").read_text())), claims()
    new = [sentence for sentence in said if not known.get(sentence)]
    assert not new, f"find their evidence, and write it into {CLAIMS.name} (its head says how): {new}"
    gone = known.keys() - set(said)
    assert not gone, f"the README no longer says this; remove it from {CLAIMS.name}: {gone}"


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_the_named_evidence_exists(evidence: str) -> None:
    if evidence.startswith(PERFORMANCE):
        heading, _, words = evidence.removeprefix(f"{PERFORMANCE}#").partition(": ")
        check_measurement(section((ROOT / PERFORMANCE).read_text(), heading), words)
    else:
        file, _, name = evidence.partition("::")
        assert (ROOT / file).is_file(), f"there is no {file}"
        assert re.search(rf"^\s*def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def section(page: str, anchor: str) -> str:
    """What follows the heading, up to the next of any level."""
    for part in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") == anchor:
            return text
    raise AssertionError(f"{PERFORMANCE} has no heading #{anchor}")


def check_measurement(text: str, words: str) -> None:
    assert sum(words in line for line in text.splitlines()) == 1, f"{PERFORMANCE}: one line there must have {words!r}"
    assert _TREE.search(text), f"{words!r}: say of which commit, `Commit: not recorded` if nobody knows"
    assert _MACHINE.search(text), f"{words!r}: say of which machine"


def test_a_changed_number_is_a_new_sentence() -> None:
    prose = "# A\n\nIt takes [2 s](b.md). It\nnames `x`.\n"
    blocks = "\n| a | b |\n|---|---|\n| **c** | 1 |\n\n```text\nd  1\ne\n```\n\n```sh\nf\n```\n"
    assert list(sentences(prose + blocks)) == ["It takes 2 s.", "It names `x`.", "| c | 1 |", "d 1"]


def test_a_measurement_without_a_commit_is_none() -> None:
    page = "# A b\n\n| c | 1 |\n\nCommit: not recorded; 2 cores.\n\n## D\n\n| e | 2 |\n"
    check_measurement(section(page, "a-b"), "| c |")
    with pytest.raises(AssertionError, match="of which commit"):
        check_measurement(section(page, "d"), "| e |")
