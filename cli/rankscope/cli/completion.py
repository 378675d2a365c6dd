"""`rankscope completion`: a shell's completion script, made from the parsers of the commands."""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.cli.messages import Exit, to_stdout

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
examples:
  source <(rankscope completion bash)        now; the line in ~/.bashrc or ~/.zshrc (with zsh) makes it stay
  rankscope completion fish > ~/.config/fish/completions/rankscope.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> int:
    commands = tuple(_commands())
    if arguments.shell == "fish":
        to_stdout(_fish(commands))
    else:
        # zsh runs bash's script.
        head = "autoload -U +X bashcompinit && bashcompinit\n" if arguments.shell == "zsh" else ""
        to_stdout(head + _bash(commands))
    return Exit.OK


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str
    has_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A command, or an action of one."""

    path: tuple[str, ...]  # empty: `rankscope` itself
    words: dict[str, str]  # what may follow, with its help: commands, or the values of an argument
    has_actions: bool  # `words` are commands
    flags: tuple[Flag, ...]


def _commands() -> Iterator[Command]:
    # `main` imports the module of a command that is called: this one is called by it.
    from rankscope.cli.main import MODULES, make_parser

    parser, places = make_parser()
    for words, place in places.items():
        try:
            importlib.import_module(MODULES[words]).add_arguments(place)
        except ModuleNotFoundError:
            continue  # its extra is not installed: the name is completed, its flags are not
    yield from _walk((), parser)


def _walk(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Command]:
    words: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    flags = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            words |= {each.dest: each.help or "" for each in action._choices_actions}
        elif not action.option_strings:
            words |= dict.fromkeys(map(str, action.choices or ()), "")
        elif action.help is not argparse.SUPPRESS:
            choices = tuple(map(str, action.choices or ()))
            flags.append(Flag(tuple(action.option_strings), action.help or "", action.nargs not in (0, "?"), choices))
    yield Command(path, words, bool(below), tuple(flags))
    for name, each in below.items():
        yield from _walk((*path, name), each)


def _bash(commands: tuple[Command, ...]) -> str:
    paths = "|".join(f'" {" ".join(command.path)}"' for command in commands if command.path)
    values, words = [], []
    for command in commands:
        path = "".join(f" {name}" for name in command.path)
        names = " ".join(name for flag in command.flags for name in flag.names)
        words.append(f'        "{path}") words="{" ".join(command.words)}" flags="{names}" ;;')
        by_choices: defaultdict[str, list[str]] = defaultdict(list)
        for flag in command.flags:
            if flag.has_value and "--context" not in flag.names:
                by_choices[" ".join(flag.choices)] += [f'"{path} {name}"' for name in flag.names]
        values += [f'        {"|".join(names)}) words="{choices}" ;;' for choices, names in by_choices.items()]
    return _BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


# Where no word fits, the shell completes files.
_BASH = """\
# bash completion of rankscope
_rankscope() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" path="" words="" flags="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${{COMP_WORDS[i]}}" in
        {paths}) path="$path ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$path $previous" in
        *" --context") words="$(rankscope context list --names 2>/dev/null)" ;;
{values}
        *)
    case "$path" in
{words}
    esac ;;
    esac
    case "$current" in
        -*) words="$flags" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _rankscope rankscope"""


def _fish(commands: tuple[Command, ...]) -> str:
    lines = ["# fish completion of rankscope"]
    for command in commands:
        seen = [f"__fish_seen_subcommand_from {name}" for name in command.path]
        if command.words:
            none = f"not __fish_seen_subcommand_from {' '.join(command.words)}"
            when = _quoted("; and ".join([*seen, none] if command.has_actions or not seen else seen))
            lines += [
                f"complete -c rankscope -n {when} -f -a {_quoted(word)} -d {_quoted(text)}"
                for word, text in command.words.items()
            ]
        when = f" -n {_quoted('; and '.join(seen))}" if seen else ""
        for flag in command.flags:
            long = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = " -r" if flag.has_value else ""
            if "--context" in flag.names:
                value = " -x -a '(rankscope context list --names 2>/dev/null)'"
            elif flag.choices:
                value = f" -x -a {_quoted(' '.join(flag.choices))}"
            lines.append(f"complete -c rankscope{when} {long}{value} -d {_quoted(flag.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """For fish: in single quotes, only the quote and the backslash are special."""
    plain = " ".join(text.replace("%%", "%").split())
    return "'" + plain.replace("\\", "\\\\").replace("'", "\\'") + "'"
