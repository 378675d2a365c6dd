"""When the NCCL plugin is switched on, and when it is left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.daemon.steps.nccl_reader import read_memory
from rankscope.probe import nccl_layout, nccl_plugin
from rankscope.probe.injection import copy_to
from rankscope.probe.nccl_plugin import (
    CHOICE,
    LOADED_AFTER_STEPS,
    NO_LIBRARY,
    NOT_LOADED,
    OFF,
    OTHER,
    SWITCH,
    NcclPlugin,
    library,
)


class Bindings:
    """As torch has them, where it is built with NCCL."""

    def __init__(self) -> None:
        made: list[tuple[tuple[object, ...], str | None]] = []
        self.made = made

        class ProcessGroupNCCL:
            def __init__(self, *arguments: object) -> None:
                made.append((arguments, os.environ.get(CHOICE)))

        self.ProcessGroupNCCL = ProcessGroupNCCL


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclPlugin]:
    for name in (CHOICE, SWITCH, nccl_layout.VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    made = NcclPlugin()
    yield made
    if made.descriptor is not None:
        os.close(made.descriptor)


def test_it_is_on_before_the_first_group_is_made(plugin: NcclPlugin) -> None:
    bindings = Bindings()
    plugin.watch(bindings)
    assert plugin.descriptor is None
    bindings.ProcessGroupNCCL("store", 0, 4)
    bindings.ProcessGroupNCCL("store", 0, 2)
    assert bindings.made == [(("store", 0, 4), library()), (("store", 0, 2), library())]
    assert plugin.descriptor is not None
    memory = read_memory(plugin.descriptor)
    assert (memory.owner_pid, memory.interface, memory.written) == (os.getpid(), 0, 0)
    assert os.environ[nccl_layout.VARIABLE].split(":")[0] == str(plugin.descriptor)


def test_torch_without_nccl_is_left_alone(plugin: NcclPlugin) -> None:
    plugin.watch(object())
    assert (plugin.descriptor, plugin.reason) == (None, "")


@pytest.mark.parametrize("chosen", ["/opt/inspector/libnccl-profiler-inspector.so", "inspector", "none"])
def test_the_users_own_plugin_stays(plugin: NcclPlugin, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv(CHOICE, chosen)
    plugin.switch_on()
    assert (plugin.descriptor, plugin.reason, os.environ[CHOICE]) == (None, OTHER, chosen)


def test_a_launchers_choice_of_ours_is_not_the_users(plugin: NcclPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "/elsewhere/" + Path(library()).name)
    plugin.switch_on()
    assert os.environ[CHOICE] == library()


def test_one_variable_switches_it_off(plugin: NcclPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    plugin.switch_on()
    assert (plugin.descriptor, plugin.reason) == (None, OFF)
    assert CHOICE not in os.environ


def test_a_machine_without_a_library_is_told(plugin: NcclPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_plugin, "library", lambda: "/nowhere/librankscope-nccl-riscv64.so")
    plugin.switch_on()
    assert (plugin.descriptor, plugin.reason) == (None, NO_LIBRARY)


def test_the_injected_folder_holds_the_libraries(tmp_path: Path) -> None:
    copy_to(str(tmp_path))
    copied = tmp_path / "rankscope" / "probe" / "nccl"
    assert sorted(path.name for path in copied.iterdir()) == [
        "librankscope-nccl-aarch64.so",
        "librankscope-nccl-x86_64.so",
    ]
    assert (copied / Path(library()).name).read_bytes() == Path(library()).read_bytes()


def test_steps_are_known_once_nccl_has_loaded_it(plugin: NcclPlugin) -> None:
    assert not plugin.next_step(1)  # not switched on
    plugin.switch_on()
    assert [plugin.next_step(step) for step in range(1, LOADED_AFTER_STEPS)] == [False] * (LOADED_AFTER_STEPS - 1)
    assert plugin.reason == ""
    assert not plugin.next_step(LOADED_AFTER_STEPS)
    assert plugin.reason == NOT_LOADED
    assert not plugin.tells_every_step
    assert plugin.descriptor is not None
    os.pwrite(plugin.descriptor, nccl_layout.WANTED.pack(5), nccl_layout.INTERFACE_OFFSET)
    assert plugin.next_step(LOADED_AFTER_STEPS + 1)
    assert plugin.reason == ""
    assert plugin.tells_every_step
    plugin.turns.every = 8
    assert not plugin.tells_every_step


def test_turns_are_passed_on_to_nccl(plugin: NcclPlugin) -> None:
    plugin.switch_on()
    assert plugin.descriptor is not None
    wanted = set()
    for step in range(1, 120):
        plugin.next_step(step)
        (asked,) = nccl_layout.WANTED.unpack(os.pread(plugin.descriptor, 4, nccl_layout.WANTED_OFFSET))
        assert asked == (nccl_layout.WANT_OPERATIONS if plugin.turns.is_on(step + 1) else nccl_layout.WANT_NOTHING)
        wanted.add(asked)
    assert len(wanted) == 2
