"""Commands in the documents: they parse, what they name exists, and it is known whether a test executes them."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from rankscope.cli.main import MODULES
from tests.doc_commands import PAGES, ROOT, Block, blocks

CHART = ROOT / "deploy" / "helm" / "rankscope"
BLOCKS = blocks()
OF_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
TARGETS = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Programs of others. Add one here if a document is right to use it.
FOREIGN = {
    *("alertmanager", "amtool", "prometheus", "promtool"),
    *("docker", "helm", "kind", "kubectl", "sbatch", "scontrol", "srun", "systemctl"),
    *("all_reduce_perf", "nsys", "nvidia-smi", "pip", "pipx", "python", "python3", "torchrun"),
    *(
        "cd",
        "curl",
        "dmesg",
        "export",
        "grep",
        "install",
        "jq",
        "make",
        "openssl",
        "sed",
        "source",
        "sudo",
        "tail",
        "umask",
    ),
}
# Prometheus and Alertmanager, daemon, operator, a job's own.
PORTS = {"9090", "9093", "9443", "9464", "9465", "9466", "9467", "9468", "23456", "29500"}
PATHS = {"", "/", "/metrics", "/healthz", "/readyz", "/api/v1/alerts"}
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(words: list[str]) -> None:
    """Raises ValueError for what the command would refuse."""
    if words[:1] == ["--version"]:
        return
    chosen = next((each for each in (" ".join(words[:2]), *words[:1]) if each in MODULES), None)
    if chosen is None and any(each.split()[0] in words[:1] for each in MODULES):
        raise ValueError("a kind is required")
    if chosen is None:
        raise ValueError(f"there is no such command; there are {', '.join(MODULES)}")
    parser = Parser(prog=f"rankscope {chosen}", add_help=False)
    importlib.import_module(MODULES[chosen]).add_arguments(parser)
    parser.add_argument("--help", action="store_true")
    parser.parse_args(words[len(chosen.split()) :])


def chart_values() -> set[str]:
    def paths(values: dict[str, object], prefix: str = "") -> set[str]:
        found = {f"{prefix}{name}" for name in values}
        for name, value in values.items():
            if isinstance(value, dict):
                found |= paths(value, f"{prefix}{name}.")
        return found

    return paths(yaml.safe_load((CHART / "values.yaml").read_text()))


def blocks_of(page: Path) -> list[Block]:
    return [block for block in BLOCKS if block.page == page]


@OF_PAGE
def test_a_marked_block_names_its_test_or_a_reason(page: Path) -> None:
    for block in blocks_of(page):
        if block.mark:  # the others: tests/integration/test_doc_commands.py
            check_mark(block)


def check_mark(block: Block) -> None:
    kind, _, about = block.mark.partition(": ")
    assert kind in ("illustration", "executed") and about, (
        f"{block}: write `<!-- illustration: REASON -->` or `<!-- executed: tests/FILE.py -->` before it"
    )
    if kind == "executed":
        test = ROOT / about
        assert test.is_file(), f"{block}: there is no {about}; name the test that executes it"
        for program, *words in block.commands():
            if program in ("rankscope", "make"):
                assert words[0] in test.read_text(), f"{block}: {about} does not execute {program} {words[0]}"


@OF_PAGE
def test_rankscopes_commands_parse(page: Path) -> None:
    for block in blocks_of(page):
        for words in block.commands():
            if Path(words[0]).name == "rankscope":
                try:
                    parse(words[1:])
                except ValueError as error:
                    pytest.fail(f"{block}: {' '.join(words)}: {error}; correct the page, or the command")


@OF_PAGE
def test_commands_in_sentences_have_only_options_that_exist(page: Path) -> None:
    """They may leave out arguments: `rankscope capture --json`."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for text in re.findall(r"`rankscope ([a-z][^`\n]*)`", prose):
        try:
            parse(shlex.split(text.replace("…", "")))
        except ValueError as error:
            is_short = re.search("required|expected (one|at least one) argument", str(error))
            assert is_short, f"{page.name}: `rankscope {text}`: {error}; correct the page, or the command"


@OF_PAGE
def test_what_a_command_names_exists(page: Path) -> None:
    for block in blocks_of(page):
        for words in block.commands():
            check_names(f"{block}: {' '.join(words)}", *words)


def check_names(where: str, program: str, *words: str) -> None:
    if "/" not in program and program != "rankscope":
        assert program in FOREIGN, f"{where}: unknown program; correct it, or add it to FOREIGN"
    if program == "make":
        unknown = {word for word in words if "=" not in word} - TARGETS
        assert not unknown, f"{where}: the Makefile has no {unknown}"
    for text in (program, *words):
        path = text.rpartition("=")[2]
        if path.split("/")[0] in TOP and "/" in path and "*" not in path:
            assert (ROOT / path).exists(), f"{where}: there is no {path}"
        for port, below in re.findall(r"^(?:https?://)?[\w.\[\]:-]*?:(\d{4,5})(/[\w/-]*)?$", text):
            assert port in PORTS, f"{where}: nothing listens on {port}; correct it, or add it to PORTS"
            assert below in PATHS, f"{where}: nothing serves {below}"
    if program == "helm":
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        unknown = {one.partition("=")[0] for text in settings for one in text.split(",")} - chart_values()
        assert not unknown, f"{where}: the chart has no value {unknown}"
    if program == "kubectl":
        named = set(re.findall(r"\b(rankscope-[a-z-]+)", " ".join(words)))
        unknown = named - _names_in_the_chart()
        assert not unknown, f"{where}: the chart makes no {unknown}"


def _names_in_the_chart() -> set[str]:
    """Of its objects, for a release without overrides."""
    text = "\n".join(path.read_text() for path in CHART.glob("templates/**/*.*"))
    named = set(re.findall(r"\brankscope-[a-z-]+", text))
    named |= {f"rankscope-{end}" for end in re.findall(r'"rankscope\.fullname" [.$\w]* ?\)? ?}}-([a-z]+)', text)}
    return named | {f"rankscope-{path.stem}" for path in (CHART / "files" / "roles").glob("*.yaml")}


def test_commands_are_found_in_the_pages() -> None:
    assert len({block.page for block in BLOCKS}) > 20
    assert any(not block.mark for block in BLOCKS) and any(block.mark.startswith("executed") for block in BLOCKS)
    # An indented block cannot be marked, and is found by no test.
    for page in {block.page for block in BLOCKS} | set((ROOT / "docs").glob("*.md")):
        indented = re.findall(r"\n\n    \$? ?(?:rankscope|make|helm) .*", page.read_text())
        assert not indented, f"{page.name}: put it between ```console and ```: {indented[0].strip()}"
