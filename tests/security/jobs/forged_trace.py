"""A rank that steps and answers every capture with a sealed file of its choice: `forged_trace.py FILE_BYTES
[TEXT]`. Without a text it is one hole, which costs the rank no memory. With -1 no capture is answered."""

import fcntl
import os
import sys
import time

from rankscope.probe import ring_layout
from rankscope.probe.capture_commands import Answer, read_command
from rankscope.probe.ring import Ring

STEP_SECONDS = 0.02
SEALS = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW | ring_layout.F_SEAL_WRITE | ring_layout.F_SEAL_SEAL

trace = os.memfd_create(ring_layout.TRACE_NAME, os.MFD_ALLOW_SEALING)
os.truncate(trace, max(0, int(sys.argv[1])))
if len(sys.argv) > 2:
    os.pwrite(trace, sys.argv[2].encode(), 0)
fcntl.fcntl(trace, ring_layout.F_ADD_SEALS, SEALS)
ring = Ring()
mark = bytes(4)
print("stepping", flush=True)
while True:
    time.sleep(STEP_SECONDS)
    seconds = {"input_seconds": 0.0, "blocking_seconds": 0.0, "optimizer_seconds": 0.001, "checkpoint_seconds": 0.0}
    ring.append(time.monotonic_ns(), int(STEP_SECONDS * 1e9), seconds, 0, 1)
    if ring.command_mark() != mark:
        mark = ring.command_mark()
        command = read_command(ring, mark)
        if command is not None and command.verb == ring_layout.VERB_CAPTURE and int(sys.argv[1]) >= 0:
            size = os.fstat(trace).st_size
            Answer(ring, command.number).report(ring_layout.PHASE_WRITTEN, steps=command.steps, fd=trace, size=size)
