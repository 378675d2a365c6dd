from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rankscope.cli.main import SUBCOMMANDS, main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "rankscope.bash"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("rankscope.cli.completion.to_stdout", lines.append)
        assert main(["completion", "bash"]) == 0
    path.write_text("\n".join(lines))
    return path


def completed(script: Path, *words: str) -> set[str]:
    """What a real bash offers for the last word."""
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        'rankscope() { printf "prod\\nlocal\\n"; }; _rankscope; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-u", "-c", program, "bash", str(script), "rankscope", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def test_bash_completes_commands_actions_flags_and_values(script: Path) -> None:
    assert completed(script, "") == {subcommand.name for subcommand in SUBCOMMANDS}
    assert completed(script, "ca") == {"capture", "captures"}
    assert completed(script, "captures", "") == {"ls", "show", "get", "cancel", "rm"}
    assert completed(script, "captures", "ls", "--con") == {"--connect", "--context"}
    assert completed(script, "top", "--so") == {"--sort"}
    assert completed(script, "top", "--sort", "w") == {"wait"}
    assert completed(script, "top", "--context", "") == {"prod", "local"}
    assert completed(script, "completion", "") == {"bash", "zsh", "fish"}


def test_bash_completes_files_where_no_word_fits(script: Path) -> None:
    assert completed(script, "compare", "") == set()
    assert completed(script, "top", "--token-file", "") == set()
    assert "complete -o bashdefault -o default -F _rankscope rankscope" in script.read_text()


def test_zsh_uses_the_bash_script_and_fish_its_own(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    head, rest = capsys.readouterr().out.split("\n", 1)
    assert head == "autoload -U +X bashcompinit && bashcompinit"
    assert rest.rstrip("\n") == script.read_text().rstrip("\n")
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "complete -c rankscope -n '__fish_seen_subcommand_from top' -l sort -x "
        "-a 'rank node step self wait input mfu cpu' -d 'order of the ranks (default: rank)'"
    ) in lines
