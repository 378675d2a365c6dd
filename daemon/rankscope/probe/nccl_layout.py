"""The memory that the NCCL plugin writes (nccl/plugin.c), the probe makes and the daemon reads. Little-endian, fixed
size.

      0  fixed part      magic, version, header bytes, record bytes, capacity, owner's pid, id; crc32
     64  counters        u64 records written so far, u64 operations that were not recorded
     80  wanted          u32 of bits, the events that NCCL is asked for: the probe writes it, the plugin passes it on
     84  interface       u32, the version of NCCL's interface; 0 until NCCL has loaded the plugin
    128  communicators   a row each, while the communicator exists
   8192  records         record n (from 1) lies in slot (n - 1) % capacity

A record is one collective or message: when the GPU began and ended it, by a timer that is this GPU's own. Several
threads write records; the number of a record is 0 while it is written, and stored last."""

import struct

from . import ring_layout

MEMORY_NAME = "rankscope-nccl"
# Descriptor, inode and device of the memory, for the plugin.
VARIABLE = "RANKSCOPE_NCCL_MEMORY"
MAGIC = b"RNKSNCL\0"
VERSION = 1
HEADER_BYTES = 8192
CAPACITY = 1 << 14

# As in the ring.
FIXED, CHECKSUM, COUNTERS = ring_layout.FIXED, ring_layout.CHECKSUM, ring_layout.COUNTERS
COUNTERS_OFFSET = 64
WANTED = struct.Struct("<I")
WANTED_OFFSET = 80
INTERFACE_OFFSET = 84

# Its own rank; how many operations; the last of each: sequence << 8 | function.
COMMUNICATOR = ring_layout.Layout(
    hash="Q",
    **dict.fromkeys(("ranks", "rank"), "I"),
    **dict.fromkeys(("issued", "started", "finished", "last_issued", "last_started", "last_finished"), "Q"),
)
COMMUNICATORS_OFFSET = 128
COMMUNICATORS = 64

# Start and stop are by the GPU's timer; issued and seen, which is found to be over, by CLOCK_MONOTONIC. A communicator
# is the low half of its hash, the sequence that of its function there, the peer that of a message or -1.
RECORD = ring_layout.Layout(
    **dict.fromkeys(("number", "start_ns", "stop_ns", "issued_ns", "seen_ns", "bytes"), "Q"),
    **dict.fromkeys(("communicator", "sequence"), "I"),
    peer="i",
    **dict.fromkeys(("function", "algorithm", "protocol", "channels"), "B"),
)
MEMORY_BYTES = HEADER_BYTES + CAPACITY * RECORD.size

# Numbers from 1; 0 is another.
FUNCTIONS = (
    "AllReduce",
    "AllGather",
    "ReduceScatter",
    "Broadcast",
    "Reduce",
    "AlltoAll",
    "Gather",
    "Scatter",
    "SendRecv",
    "Send",
    "Recv",
)
ALGORITHMS = ("RING", "TREE", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")

# Bits of NCCL's events. With groups alone the plugin is called and records nothing, so that it sees the next change.
WANT_NOTHING = 1
WANT_OPERATIONS = 1 | 2 | 4 | 64


def fixed_part(pid: int) -> bytes:
    return ring_layout.fixed_part(MAGIC, VERSION, HEADER_BYTES, RECORD.size, CAPACITY, pid)
