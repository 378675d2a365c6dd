"""The ring's layout, version 4: what the probe writes and the daemon reads. Little-endian, fixed size.

      0  fixed part   magic, version, header bytes, record bytes, capacity, owner's pid, ring id; crc32
     64  counters     u64 records written so far, u64 steps so far; record n (from 1) lies in slot (n - 1) % capacity
     80  state        u32: 1 running, 2 the probe has disabled itself
     84  abilities    u32 of bits; 0 in rings of probes that cannot capture
    128  live part    refreshed about once a second; crc32
    256  facts        u32 length, u32 crc32, JSON
   3072  command      the one part that the daemon writes: u32 number, which moves last, then the command; crc32
   3328  answer       how far the probe is with the command; crc32
   4096  groups       time in collectives per process group, summed since the process began; crc32
   4608  ranges       time of the training thread by NVTX range, summed since the first one; crc32
   8192  records

A record covers one step, or several that together took 10 ms: microsecond steps are not worth a record each, and so the
ring always holds more than a minute. It ends at `end_ns` (CLOCK_MONOTONIC) and covers `span_ns` nanoseconds and `steps`
steps; its causes are seconds within that span. But its DDP_SECONDS belong to the record *before* it: DDP publishes an
iteration's figures only when the next forward has begun. NaN is "not measured". A span of 0 has no known beginning
(the first step) or is not representative (FLOPs were being counted).

On a GPU (FLAG_DEVICE) the span is the device's, and so are `input_seconds` (the device stood still for it) and
`exposed_seconds`; the end is when the device was done. A record is written when the device has finished the step, which
may be many steps after the host has enqueued it, at `host_end_ns`. On a CPU this is the end."""

import math
import os
import struct
import zlib


class Layout:
    """A row by the names of its fields, each with its format of `struct`. The daemon reads it by these names, too."""

    def __init__(self, **formats: str) -> None:
        self.formats = formats
        row = struct.Struct("<" + "".join(formats.values()))
        self.size, self.pack, self.unpack_from = row.size, row.pack, row.unpack_from


RING_NAME = "rankscope-ring"
# The ring has the first of these numbers that is free, so that the daemon finds it without a search, whatever else the
# process has open. Where the limit of open files is lower, it has any number.
DESCRIPTORS = (500, 4000, 32000)
MAGIC = b"RNKSCOPE"
VERSION = 4

HEADER_BYTES = 8192
CAPACITY = 8192

# magic, version, header bytes, record bytes, capacity, owner's pid (as the owner sees it), ring id (random)
FIXED = struct.Struct("<8sIIIIqQ")
CHECKSUM = struct.Struct("<I")

COUNTERS = struct.Struct("<QQ")
COUNTERS_OFFSET = 64
STATE = struct.Struct("<I")
STATE_OFFSET = 80
STATE_RUNNING = 1
STATE_DISABLED = 2
ABILITIES = struct.Struct("<I")
ABILITIES_OFFSET = 84
TAKES_CAPTURES = 1
HANDS_OVER_RECORDER = 2  # a thread beside the training loop answers VERB_RECORDER while no step ends

# Two clocks at one moment; device memory; collectives over all process groups. -1 is "not measured".
CLOCKS = ("monotonic_ns", "unix_ns")
MEMORY = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "total_bytes")
COLLECTIVES = ("collectives_enqueued", "collectives_completed")
LIVE = Layout(**dict.fromkeys((*CLOCKS, *MEMORY, *COLLECTIVES), "q"))
LIVE_OFFSET = 128

FACTS_HEAD = struct.Struct("<II")
FACTS_OFFSET = 256
COMMAND_OFFSET = 3072
FACTS_BYTES = COMMAND_OFFSET - FACTS_OFFSET - FACTS_HEAD.size

# The number alone, as the probe looks at it, and behind it the whole command: number again, verb, options; when to
# begin: unix ns, or that step if it is not 0; steps to wait after that, steps of warm-up; how much: steps, but not
# longer than ns; when to give up, unix ns. A number is drawn at random and is never 0.
COMMAND_NUMBER = struct.Struct("<I")
COMMAND = struct.Struct("<IIIqqIIIqq")
COMMAND_BODY_OFFSET = COMMAND_OFFSET + 8
VERB_CAPTURE = 1
VERB_DROP = 2  # forget the capture of the number that stands in the place of the step: cancelled, or fetched
VERB_RECORDER = 3  # hand over the records of torch's flight recorder, in the same way as a trace
MAX_RECORDER_BYTES = 4 << 20  # some 30,000 records
OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")  # bit 0 first
# Above them: how many windows to record after the first, each after as many steps of waiting and warm-up. A probe that
# cannot takes it for an option that it does not know, and says so.
MORE_WINDOWS_SHIFT = 8
MAX_WINDOWS = 20
# The last window begins within this much of the first.
WINDOWS_SECONDS = 600

# number of the command, phase, first step, unix ns of its beginning, steps, descriptor and bytes of the trace, ns that
# starting, stopping and writing took, length of the text; then the text
ANSWER = struct.Struct("<IIqqIiqqqqI")
ANSWER_OFFSET = 3328
GROUPS_OFFSET = 4096
ANSWER_TEXT_BYTES = GROUPS_OFFSET - ANSWER_OFFSET - ANSWER.size - 4
TRACE_NAME = "rankscope-trace"
# Where several windows were asked for: their traces one after the other, then u64 bytes of each, then this: how many
# there are, and the mark.
WINDOW_BYTES = struct.Struct("<Q")
WINDOWS = struct.Struct("<I8s")
WINDOWS_MARK = b"RNKWINDS"
PHASE_ARMED = 1
PHASE_HELD = 2  # another profiler is active
PHASE_RUNNING = 3
PHASE_WRITING = 4
PHASE_WRITTEN = 5
PHASE_FAILED = 6
PHASE_OFF = 7  # captures have failed in an unexpected way, and are not tried again

# A table: how many rows there are, crc32 of them; then the rows.
TABLE_HEAD = struct.Struct("<II")

# A row per process group and kind. The number is equal on all members; seconds are sums over the steps that were
# sampled: in collectives, and of the steps.
GROUP = Layout(number="Q", size="I", position="I", kind="I", samples="Q", seconds="d", step_seconds="d")
MAX_GROUPS = 8
GROUP_EXPOSED = 1  # the step's own stream (on a CPU: the training thread) stood still meanwhile
GROUP_OVERLAPPED = 2  # on another stream: other work may have gone on
GROUP_POINT_TO_POINT = 3  # exposed; members have different roles and are not comparable
GROUP_DDP = 4  # exposed, by DistributedDataParallel's own timers
GROUP_RECORDER = 5  # overlapped, by the durations of NCCL's flight recorder
GROUP_NCCL = 6  # overlapped, by NCCL's own times (nccl_layout.py): of every step; not in the ring

# A row per range: steps since the first range, seconds in it and in no range inside it. Older probes write none.
RANGES_OFFSET = 4608
RANGE_NAME_BYTES = 48
RANGE = Layout(name="{}s".format(RANGE_NAME_BYTES), steps="Q", seconds="d")
MAX_RANGES = 32

# What the probe measures in a step. A name of figures.py (in rankscope.analysis) is that figure.
DDP_SECONDS = ("ddp_forward_seconds", "ddp_backward_seconds", "ddp_communication_seconds", "ddp_overlap_seconds")
SECONDS = (
    "input_seconds",
    "blocking_seconds",  # of communication
    "optimizer_seconds",
    "checkpoint_seconds",
    *DDP_SECONDS,  # of the record before
    "host_seconds",
    "run_ahead_seconds",
    "exposed_seconds",  # of communication
    "in_backward_seconds",  # inside backward passes, on a CPU
)
RECORD = Layout(
    sequence="Q",
    **dict.fromkeys(("end_ns", "host_end_ns", "span_ns"), "q"),
    **dict.fromkeys(SECONDS, "f"),
    **dict.fromkeys(("flags", "steps"), "H"),
)
RECORD_BYTES = RECORD.size + CHECKSUM.size
RING_BYTES = HEADER_BYTES + CAPACITY * RECORD_BYTES
NOT_MEASURED = dict.fromkeys(SECONDS, math.nan)
MAX_STEPS = 0xFFFF

FLAG_DDP = 1  # DDP instances are watched: the wait of a step without DDP figures is unknown, not zero
FLAG_DEVICE = 2  # timed on the device
FLAG_EXPLICIT = 4  # marked by rankscope.probe.step()
FLAG_BLIND = 8  # most collectives are issued where the probe cannot time them: no figure is not zero
FLAG_NCCL = 16  # the NCCL plugin was asked for all collectives of the step

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 1
F_SEAL_SHRINK = 2
F_SEAL_GROW = 4
F_SEAL_WRITE = 8


def fixed_part(magic: bytes, version: int, header_bytes: int, record_bytes: int, capacity: int, pid: int) -> bytes:
    """With its checksum; the id is random."""
    ring_id = int.from_bytes(os.urandom(8), "little")
    fixed = FIXED.pack(magic, version, header_bytes, record_bytes, capacity, pid, ring_id)
    return fixed + CHECKSUM.pack(zlib.crc32(fixed))
