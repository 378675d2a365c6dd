"""Switches on the plugin that lets NCCL itself tell how long collectives take (nccl/plugin.c), and makes its memory: a
sealed memfd, as the probe's ring is.

NCCL loads a plugin when a process makes its first communicator, and one at most. A plugin that the user chose stays."""

from __future__ import annotations

import functools
import mmap
import os
import platform
from typing import Any, Optional

from . import nccl_layout
from .failure import disable, switch
from .nccl_turns import Turns
from .ring import sealed_memory

# Of NCCL: the path of a plugin.
CHOICE = "NCCL_PROFILER_PLUGIN"
SWITCH = "RANKSCOPE_NCCL"
OFF = "switched off by RANKSCOPE_NCCL=0"
OTHER = "NCCL_PROFILER_PLUGIN names another plugin"
NO_LIBRARY = "the NCCL plugin is not built for this machine"
NOT_LOADED = "NCCL did not load the plugin: it needs NCCL 2.27 or newer"
LOADED_AFTER_STEPS = 8
_INTERFACE = slice(nccl_layout.INTERFACE_OFFSET, nccl_layout.INTERFACE_OFFSET + nccl_layout.WANTED.size)
_WANTED = slice(nccl_layout.WANTED_OFFSET, nccl_layout.WANTED_OFFSET + nccl_layout.WANTED.size)


def library() -> str:
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nccl")
    return os.path.join(folder, "librankscope-nccl-{}.so".format(platform.machine()))


class NcclPlugin:
    """`descriptor` of the memory, once the plugin is switched on; `reason` says why it does not work."""

    def __init__(self) -> None:
        self.descriptor: Optional[int] = None
        self.reason = ""
        self.turns = Turns()
        self._memory: Optional[mmap.mmap] = None
        self._wanted = nccl_layout.WANT_OPERATIONS
        self._is_loaded = False

    def watch(self, bindings: Any) -> None:
        """Switches it on before torch makes its first process group of NCCL. Launchers and helpers make none."""
        group_class = getattr(bindings, "ProcessGroupNCCL", None)
        if group_class is None:
            return
        original = group_class.__init__

        @functools.wraps(original)
        def make(group: Any, *args: Any, **kwargs: Any) -> None:
            try:
                if switch.on and self.descriptor is None:
                    self.switch_on()
            except Exception as error:
                disable(error)
            original(group, *args, **kwargs)

        group_class.__init__ = make

    def switch_on(self) -> None:
        chosen, own = os.environ.get(CHOICE), library()
        # A launcher's variables come with those of its own process.
        is_others = chosen is not None and os.path.basename(chosen) != os.path.basename(own)
        if os.environ.get(SWITCH) == "0":
            self.reason = OFF
        elif is_others:
            self.reason = OTHER
        elif not os.path.exists(own):
            self.reason = NO_LIBRARY
        else:
            self.descriptor = self._make_memory()
            os.environ[nccl_layout.VARIABLE] = self.variable
            os.environ[CHOICE] = own

    def next_step(self, step: int) -> bool:
        """A border: `step` has ended. Whether all its collectives are known."""
        memory = self._memory
        if memory is None:
            return False
        if not self._is_loaded:
            self._is_loaded = any(memory[_INTERFACE])
            self.reason = NOT_LOADED if not self._is_loaded and step >= LOADED_AFTER_STEPS else ""
        wanted = nccl_layout.WANT_OPERATIONS if self.turns.is_on(step + 1) else nccl_layout.WANT_NOTHING
        if wanted != self._wanted:
            self._wanted = wanted
            memory[_WANTED] = nccl_layout.WANTED.pack(wanted)
        return self._is_loaded and self.turns.is_whole(step)

    @property
    def tells_every_step(self) -> bool:
        """NCCL has loaded the plugin, and is asked in all steps but those of a trial."""
        return self._is_loaded and self.turns.every == 1

    @property
    def variable(self) -> str:
        """Value of nccl_layout.VARIABLE: descriptor, inode and device."""
        assert self.descriptor is not None
        found = os.fstat(self.descriptor)
        return "{}:{}:{}".format(self.descriptor, found.st_ino, found.st_dev)

    def _make_memory(self) -> int:
        descriptor = sealed_memory(nccl_layout.MEMORY_NAME, nccl_layout.MEMORY_BYTES)
        memory = self._memory = mmap.mmap(descriptor, nccl_layout.MEMORY_BYTES)
        memory[_WANTED] = nccl_layout.WANTED.pack(self._wanted)
        memory[: nccl_layout.FIXED.size + 4] = nccl_layout.fixed_part(os.getpid())
        return descriptor
