"""The documents say what the code does: names, defaults, commands and links are held against it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rankscope.cli.main import SUBCOMMANDS, TASKS
from rankscope.cli.messages import Exit
from rankscope.daemon.config import SETTINGS
from tools.exported_metrics import exported_metrics

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SOURCES = [
    path for root in ("analysis", "daemon", "operator", "cli") for path in (ROOT / root).glob("rankscope/**/*.py")
]


def document(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_metric_named_in_a_document_exists() -> None:
    for path in DOCUMENTS:
        unknown = set(re.findall(r"`(rankscope_[a-z_]+)", path.read_text())) - set(exported_metrics())
        assert not unknown, path


def test_every_setting_is_described_with_its_flag_variable_and_default() -> None:
    table = {cells[0].strip("`"): cells for cells in rows(document("configuration.md")) if len(cells) == 5}
    for setting in SETTINGS:
        cells = table[setting.name]
        assert cells[1:3] == [f"`{setting.flag}`", f"`{setting.variable}`"]
        if setting.name not in (
            "node",
            "socket",
            "py_spy",
            "capture_dir",
            "profile_dir",
        ):  # these depend on the machine
            default = setting.default()
            assert cells[3] == (str(default).lower() if isinstance(default, bool) else str(default)), setting.name


def test_settings_are_described_in_the_groups_of_the_help() -> None:
    page = document("configuration.md")
    for group in dict.fromkeys(setting.group for setting in SETTINGS):
        section = page.split(f"\n### {group[0].upper()}{group[1:]}\n")[1].split("\n#")[0]
        ours = [setting for setting in SETTINGS if setting.group == group]
        shown = {cells[0].strip("`"): cells[4] for cells in rows(section) if cells[0].startswith("`")}
        assert list(shown) == [setting.name for setting in ours]
        for setting in ours:
            assert all(re.search(rf"\b{choice}\b", shown[setting.name]) for choice in setting.choices), setting.name


def test_the_table_of_commands_is_that_of_the_help() -> None:
    table = document("cli.md").split("\n## ")[0]
    shown = [cells for cells in rows(table) if "`rankscope " in cells[1]]
    assert [cells[0] for cells in shown if cells[0]] == list(TASKS)
    assert [re.findall(r"`rankscope (\w+)", cells[1])[0] for cells in shown] == [one.name for one in SUBCOMMANDS]


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    table = document("cli.md").split("\n## Exit codes\n")[1]
    assert [int(cells[0]) for cells in rows(table) if cells[0].isdigit()] == [status.value for status in Exit]


def test_every_variable_the_code_reads_is_described() -> None:
    read = {name for path in SOURCES for name in re.findall(r"RANKSCOPE_[A-Z_]*[A-Z]", path.read_text())}
    settings = {setting.variable for setting in SETTINGS} | {"RANKSCOPE_DAEMON_CONFIG"}
    described = set(re.findall(r"`(RANKSCOPE_[A-Z_]*[A-Z])", document("configuration.md")))
    assert described == (read | settings) - {"RANKSCOPE_DAEMON"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_target_and_module_in_a_document_exists(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"python -m (rankscope[\w.]*)", text)) <= {"rankscope.probe.injection"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_in_a_document_exists(path: Path) -> None:
    others = re.compile("docker|^(amtool|helm|make) |kubectl |nsys (launch|start|stop) ", re.IGNORECASE)
    lines = [line for line in path.read_text().splitlines() if not others.search(line)]
    foreign = {
        "--admission-control-config-file",
        "--nproc-per-node",
        "--nonblocking",
        "--strict",
        "--help",
        "--pid",
        "--audience",
    }
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(lines))) - foreign
    known = {setting.flag for setting in SETTINGS}
    for source in (*(ROOT / "cli").glob("rankscope/cli/**/*.py"), ROOT / "tests" / "fuzz" / "__main__.py"):
        known |= set(re.findall(r"\"(--[a-z0-9-]+)\"", source.read_text()))
    assert used <= known


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def package_tables() -> Iterator[tuple[Path, list[str]]]:
    """Of architecture.md: a package's folder, and the modules that its row names."""
    parts = re.findall(r"^### (\w+).*?\n(.*?)(?=^#)", document("architecture.md"), re.MULTILINE | re.DOTALL)
    for part, section in parts:
        root = next(ROOT.glob(f"*/rankscope/{part}"))
        if part == "probe":
            yield root, re.findall(r"`(\w+)`", section)
        for cells in (cells for cells in rows(section) if cells[0].startswith("`")):
            packages = re.findall(r"`(\w+)`", cells[0])
            yield root, packages
            if len(packages) == 1 and (root / packages[0]).is_dir():
                yield root / packages[0], re.findall(r"`(\w+)`", cells[1])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_table_has_a_head(path: Path) -> None:
    """An empty line inside a table makes text of the rows below it."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^ *\|.*\n?)+", text, re.MULTILINE):
        assert re.match(r".*\n *\|[-: |]+\|\n", table), table[:200]


def test_the_map_of_the_source_tree_names_modules_that_exist() -> None:
    found = list(package_tables())
    assert len(found) > 40
    for folder, names in found:
        missing = [name for name in names if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file()]
        assert not missing, f"docs/architecture.md: {folder.relative_to(ROOT)} has no {', '.join(missing)}"


SOURCE_ENDINGS = (".py", ".sh", ".proto", ".md", ".yaml", ".js", ".c", ".json")


@cache
def paths_and_words() -> tuple[set[str], set[str]]:
    """Of all sources."""
    folders = ("analysis", "daemon", "operator", "cli", "tests", "tools", "benchmarks", "proto", "rules", "deploy")
    files = [
        *ROOT.glob("*"),
        *(ROOT / "docs").rglob("*"),
        *(each for root in folders for each in (ROOT / root).rglob("*")),
    ]
    paths = {f"/{each.relative_to(ROOT)}" for each in files}
    words = {word for each in files if each.suffix in SOURCE_ENDINGS for word in re.findall(r"\w+", each.read_text())}
    return paths, words


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md"], ids=lambda path: path.name)
def test_paths_and_names_in_the_maps_for_developers_exist(path: Path) -> None:
    paths, words = paths_and_words()
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    quoted = set(re.findall(r"`([^`\n]+)`", prose))
    assert len(quoted) > 50
    for text in quoted:
        if re.fullmatch(r"[\w.…-]+(/[\w.…-]+)*/?", text) and ("/" in text or text.endswith(SOURCE_ENDINGS)):
            if "NAME" in text or "FILE" in text or text.startswith(".venv"):
                continue
            start, _, end = text.rstrip("/").rpartition("/…/")
            ends = (f"/{end}", f"/{end}.py")
            assert any(each.startswith(f"/{start}" if start else "/") and each.endswith(ends) for each in paths), (
                f"{path.name}: there is no {text}"
            )
        elif re.fullmatch(r"_?[A-Z]\w+(\.\w+)?", text):  # a constant, a class or its attribute
            assert set(text.split(".")) <= words, f"{path.name}: no source has {text}"


def test_the_index_lists_every_page() -> None:
    pages = {each.relative_to(ROOT / "docs").as_posix() for each in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)", document("index.md"))) == set()


def test_the_readme_quotes_the_run_that_its_picture_shows() -> None:
    printed = (ROOT / "docs/images/demo.txt").read_text()
    quoted = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert quoted is not None
    for line in quoted[1].splitlines():
        assert line in printed.splitlines()
    table = [line.split() for line in printed.splitlines() if re.match(r"\s+\d+\s+\d+ .* ms ", line)]
    told = [cells for cells in rows(README.replace("**", "")) if cells[0].isdigit()]
    assert told == [[rank, *(f"{value} ms" for value in line[1::2][:3])] for rank, *line in table]


def test_the_picture_fetches_nothing() -> None:
    svg = (ROOT / "docs/images/demo.svg").read_text()
    assert not re.search(r"@import|@font-face|(url\(|href=)[\"']?\s*(https?:)?//", svg)


def test_the_json_keys_of_the_demo_are_described() -> None:
    tree = ast.parse((ROOT / "cli/rankscope/cli/demo_report.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "to_json")
    written = next(node.value for node in function.body if isinstance(node, ast.Return))
    assert isinstance(written, ast.Dict)
    keys = {key.value for key in written.keys if isinstance(key, ast.Constant)}
    assert keys <= set(re.findall(r"`(\w+)`", document("demo.md")))


ABSTAINING = (
    "__init__",
    "_judge_ranks",
    "_count_steps",
    "_unknown_steps",
    "_nothing",
    "_judge_windows",
    "_compare",
    "judge_stacks",
)


def test_every_reason_to_abstain_has_an_answer() -> None:
    """The words of the rules, less what they fill in."""
    page = re.sub(r"\b[NM]\b|\d+", "#", document("troubleshooting.md"))
    reasons: list[ast.expr] = []
    for name in ("detector.py", "rules.py", "stack_verdict.py"):
        tree = ast.parse((ROOT / "analysis/rankscope/analysis/verdicts" / name).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in ABSTAINING]
        for node in (node for function in functions for node in ast.walk(function)):
            if isinstance(node, ast.Assign | ast.Return) and node.value is not None:
                reasons.append(node.value)
            elif isinstance(node, ast.Call):
                reasons += [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                reasons += node.args[1:2] if "INSUFFICIENT_DATA" in ast.unparse(node) else []
                reasons += node.args if ast.unparse(node.func) == "_abstain" else []
    # Some begin with what is missing, which is a reason of its own.
    texts = {
        _words(reason).removeprefix("#; ") for reason in reasons if isinstance(reason, ast.Constant | ast.JoinedStr)
    }
    sentences = {text for text in texts if " " in text}
    assert len(sentences) >= 10
    assert not {sentence for sentence in sentences if sentence not in page}


def _words(reason: ast.expr) -> str:
    if isinstance(reason, ast.Constant):
        return str(reason.value)
    assert isinstance(reason, ast.JoinedStr)
    parts = [str(part.value) if isinstance(part, ast.Constant) else "#" for part in reason.values]
    return re.sub(r"\d+", "#", "".join(parts))


def test_the_probe_is_laid_out_as_the_documents_say(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "rankscope.probe.injection", str(tmp_path)], check=True)
    assert (tmp_path / "sitecustomize.py").is_file()
