from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli import main as command_line


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


def test_no_command_and_an_unknown_command_are_usage_errors() -> None:
    for words in ((), ("frobnicate",)):
        status, _, error = run(*words)
        assert status == 2
        assert "usage: rankscope" in error


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
