from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli import main as command_line
from rankscope.cli.messages import Exit
from rankscope.daemon.config import SETTINGS
from tests.support.commands import Command


def run(
    *words: str, code: str = "from rankscope.cli.main import main; import sys; sys.exit(main())"
) -> tuple[int, str, str]:
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=180)
    return result.returncode, result.stdout, result.stderr


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom rankscope.cli.main import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print({'grpc', 'numpy', 'rankscope.cli.daemon', 'rankscope.daemon.loop'} & set(sys.modules))\n"
    )
    status, out, _ = run(code=code)
    assert status == 0
    assert all(subcommand.name in out for subcommand in command_line.SUBCOMMANDS)
    assert out.splitlines()[-1] == "set()"


def test_a_missing_extra_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> object:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert command_line.main(["top"]) == 2
    assert "rankscope top needs the cli extra: pip install 'rankscope[cli]'" in capsys.readouterr().err


def test_an_unknown_command_is_a_usage_error() -> None:
    status, _, error = run("frobnicate")
    assert status == 2
    assert (
        "usage: rankscope" in error and "error: COMMAND: there is no 'frobnicate'; choose from demo, run, up" in error
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("comapre a b", "COMMAND: there is no 'comapre'; did you mean compare?"),
        ("analyze trcae x", "KIND: there is no 'trcae'; did you mean trace?"),
        ("top --sort wiat", "--sort: there is no 'wiat'; did you mean wait?"),
        ("top --rows x", "--rows: invalid int value: 'x'; next step: rankscope top --help"),
        ("top --conect x", "unrecognized arguments: --conect x; did you mean --connect?"),
        ("flame --since -5m", "--since '-5m': say a number and s, m, h or d, as in 10m"),
        ("report fleet --since -5m", "--since '-5m': say "),
        ("export -o x --prometheus http://127.0.0.1:1 --since -5m", "--since '-5m': say "),
        ("top --rows -1", "--rows -1: at least one, as in --rows 8"),
        ("up --mfu-target nan", "--mfu-target: 'nan' is not a number above 0 and up to 1, as in 0.4"),
        ("correlator --daemon 127.0.0.1:1 --mfu-target 40", "--mfu-target: '40' is not a number above 0"),
    ],
)
def test_a_wrong_argument_is_one_error_with_a_next_step(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Command(capsys)(*words.split())
    assert (said.status, said.out) == (2, "")
    assert said.err.splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.parametrize("command", ["run --json", "analyze trace --ranks", "top --jsonl"])
def test_an_unknown_option_shows_the_usage_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, option = command.rsplit(" ", 1)
    with pytest.raises(SystemExit):
        command_line.main([*command.split(), "x"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: rankscope {words} [options]") and f"unrecognized arguments: {option}" in error


GROUPS = ("analyze", "report", "captures", "context", "certificates")


@pytest.mark.parametrize("words", [(), *((name,) for name in GROUPS)], ids=" ".join)
def test_a_group_without_a_command_prints_its_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(words) == Exit.OK
    bare = capsys.readouterr()
    with pytest.raises(SystemExit):
        command_line.main([*words, "--help"])
    assert (bare.out, bare.err) == (capsys.readouterr().out, "")
    assert bare.out.startswith(f"usage: {' '.join(('rankscope', *words))} [options] ")


def test_help_lists_commands_by_task_the_first_steps_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == Exit.OK
    out = capsys.readouterr().out
    titles = [f"\n{task}:\n" for task in command_line.TASKS]
    assert sorted(titles, key=out.index) == titles
    shown = [line.split()[0] for line in out.splitlines() if re.match("  [a-z]", line)]
    assert shown == [subcommand.name for subcommand in command_line.SUBCOMMANDS]
    assert shown[:3] == ["demo", "run", "up"]


@pytest.mark.parametrize("command", sorted(command_line.MODULES))
def test_usage_is_one_line(command: str) -> None:
    parser, places = command_line.make_parser()
    importlib.import_module(command_line.MODULES[command]).add_arguments(places[command])
    assert places[command].format_usage().count("\n") == 1
    assert parser.format_usage() == "usage: rankscope [options] COMMAND ...\n"


@pytest.mark.parametrize("command", ["daemon", "up", "doctor"])
def test_settings_come_last_by_groups(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: rankscope {command} [options] [settings]\n")
    own, settings = out.split("\nsettings of the daemon (docs/configuration.md):\n")
    assert "  --config FILE " in own
    titles = [f"\n{group}:\n" for group in dict.fromkeys(setting.group for setting in SETTINGS)]
    assert sorted(titles, key=settings.index) == titles
    assert not re.search(r"^  --[a-z-]+ \[?(?:TEXT|NUMBER)\b", out, re.MULTILINE)
    assert "--log-level debug|info|warning|error" in settings


def test_a_reader_of_help_may_leave() -> None:
    command = f"{shlex.quote(sys.executable)} -m rankscope.cli.main up --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.stderr) == ("usage: rankscope up [options] [settings]\n", "")


def test_a_bad_setting_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text("window_seconds = -1\n")
    status, _, error = run("daemon", "--config", str(file))
    assert status == 2
    assert error == f"error: {file}: window_seconds = -1: must be between 0.5 and 60\n"


def test_print_config_shows_values_and_where_they_came_from() -> None:
    status, out, _ = run("daemon", "--print-config", "--window-seconds", "4")
    assert status == 0
    lines = {line.split(" = ")[0]: line for line in out.splitlines()}
    assert lines["window_seconds"].endswith("# --window-seconds")
    assert lines["budget_ratio"].endswith("# default")


def test_a_flag_switches_off_what_is_on_by_default() -> None:
    _, off, _ = run("daemon", "--print-config", "--captures", "false", "--gpu=no")
    _, on, _ = run("daemon", "--print-config", "--captures", "--gpu")
    assert [line.split()[2] for line in off.splitlines() if line.startswith(("captures ", "gpu "))] == ["false"] * 2
    assert [line.split()[2] for line in on.splitlines() if line.startswith(("captures ", "gpu "))] == ["true"] * 2


def test_doctor_for_programs_is_one_json_object(tmp_path: Path) -> None:
    words = ("doctor", "--json", "--metrics-listen", "127.0.0.1:0", "--socket", str(tmp_path / "d.sock"))
    status, out, _ = run(*words)
    report = json.loads(out)
    assert report["healthy"] == (status == 0)
    assert {"check", "level", "text", "next_step"} == set(report["findings"][0])
    status, out, _ = run(*words, "--py-spy", str(tmp_path / "none"))
    assert status == 1
    assert not json.loads(out)["healthy"]
