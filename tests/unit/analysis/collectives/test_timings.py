from __future__ import annotations

import json

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import fit_collectives
from rankscope.analysis.collectives.timings import UnreadableError, read_text

RANK_LINES = "".join(f"#  Rank  {n} Group  0 Pid  57123 on   node-1 device  {n} [0x1b] NVIDIA H100\n" for n in range(8))
NCCL_TESTS = f"""\
# nThread 1 nGpus 8 minBytes 8 maxBytes 17179869184 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{RANK_LINES}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    28.39    0.00    0.00      0    27.35    0.00    0.00      0
       65536         16384     float     sum      -1    31.20    2.10    3.68      0    30.80    2.13    3.72    N/A
    16777216       4194304     float     sum      -1    108.6  154.49  270.35      0    107.1  156.65  274.14      0
  1073741824     268435456     float     sum      -1   3950.1  271.83  475.70      0   3948.0  271.97  475.95      0
 17179869184    4294967296     float     sum      -1    61974  277.21  485.12      0    61970  277.23  485.15      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 215.437
"""


def test_reads_ranks_operation_and_both_times_from_all_reduce_perf() -> None:
    observed = read_text(NCCL_TESTS)
    assert len(observed) == 10 and not observed.in_order
    assert set(observed.ranks.tolist()) == {8} and set(observed.kind.tolist()) == {CollectiveKind.ALL_REDUCE}
    assert (observed.bytes[8], observed.seconds[8]) == (17179869184, pytest.approx(61974e-6))
    (fit,) = fit_collectives(observed)
    assert fit.beta_bytes_per_second == pytest.approx(485e9, rel=0.03)


def test_takes_a_missing_operation_from_the_file_name_or_option() -> None:
    gathered = NCCL_TESTS.replace("485.12", "242.56").replace("475.70", "237.85").replace("270.35", "135.18")
    gathered = gathered.replace("485.15", "242.58").replace("475.95", "237.97").replace("274.14", "137.07")
    with pytest.raises(UnreadableError, match="give --op"):
        read_text(gathered, name="output")
    assert set(read_text(gathered, name="all_gather_perf").kind.tolist()) == {CollectiveKind.ALL_GATHER}
    assert set(read_text(gathered, op="reduce_scatter").kind.tolist()) == {CollectiveKind.REDUCE_SCATTER}


def test_asks_for_the_ranks_that_the_output_does_not_list() -> None:
    cut = NCCL_TESTS.replace(RANK_LINES, "")
    with pytest.raises(UnreadableError, match="give --group-size"):
        read_text(cut)
    assert set(read_text(cut, ranks=8).ranks.tolist()) == {8}


@pytest.mark.parametrize(
    "text",
    [
        "op,bytes,us,ranks,group,time\nall_reduce,1024,20.5,8,dp,1\nAllGather,2048,30,8,tp,2\n",
        "\ufeffop;bytes;us;ranks;group;time\nall_reduce;1024;20.5;8;dp;1\n\nall_gather;2048;30;8;tp;2\n",
        "Op,Size,Seconds,nRanks,Group,Time\nallreduce,1024,2.05e-5,8,dp,1\n_allgather_base,2048,3e-5,8,tp,2\n",
        json.dumps(
            [
                {"op": "all_reduce", "bytes": 1024, "us": 20.5, "ranks": 8, "group": "dp", "time": 1},
                {"op": "all_gather", "bytes": 2048, "us": 30, "ranks": 8, "group": "tp", "time": 2},
            ]
        ),
        '{"op":"all_reduce","bytes":1024,"us":20.5,"ranks":8,"group":"dp","time":1}\n'
        '{"op":"all_gather","bytes":2048,"us":30,"ranks":8,"group":"tp","time":2}\n',
        '{"op":["all_reduce","all_gather"],"bytes":[1024,2048],"us":[20.5,30],"ranks":[8,8],"group":["dp","tp"],"time":[1,2]}',
    ],
    ids=["csv", "semicolons", "other names", "json", "json lines", "json columns"],
)
def test_reads_the_same_from_every_format(text: str) -> None:
    observed = read_text(text)
    assert list(observed.kind) == [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER]
    assert list(observed.bytes) == [1024, 2048]
    assert np.allclose(observed.seconds, [20.5e-6, 30e-6])
    assert [observed.groups[g] for g in observed.group] == ["dp", "tp"]
    assert list(observed.time_seconds) == [1, 2] and list(observed.ranks) == [8, 8]


def test_unstated_ranks_and_times_are_unknown() -> None:
    observed = read_text("op,bytes,us\nall_reduce,1024,20\n")
    assert list(observed.ranks) == [-1] and np.isnan(observed.time_seconds).all()
    assert list(read_text("op,bytes,us\nall_reduce,1024,20\n", ranks=4).ranks) == [4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("hello\nworld\n", "no operation"),
        ("op,bytes,us\n", "contains no collectives"),
        ("op,bytes,us\nall_reduce,many,3\n", "line 2: bytes 'many' is not a number"),
        ("op,bytes,us\nall_reduce,1e30,3\n", "line 2: bytes 1e\\+30 is not a valid size"),
        ("op,bytes,us\nall_reduce,-4,3\n", "line 2: bytes -4 is not a valid size"),
        ("op,bytes,us\nall_reduce,1024,nan\n", "line 2: us 'nan' is not a number"),
        ("op,bytes,us\nall_reduce,1024,0\n", "must be positive"),
        ("op,bytes,us,ranks\nall_reduce,1024,3,0\n", "ranks 0 is not a valid number of ranks"),
        ("op,bytes\nall_reduce,1024\n", "no duration"),
        ("op,bytes,us\nlaunder,1024,3\n", "'launder' is not a collective"),
        ('[{"op": "all_reduce"', "is not valid JSON"),
        ("[1, 2]", "entry 1 is not an object"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"op": {"a": 1}, "bytes": [1], "us": 3}', "is not a collective"),
        ("# nThread 1\n1024 256 float\n", "has no line"),
        (NCCL_TESTS.replace("    31.20    2.10", "    31.20"), "line 17: 12 columns where the header has 13"),
        (NCCL_TESTS.replace("31.20", "?"), "line 17: time '\\?' is not a number"),
    ],
)
def test_says_what_is_wrong_and_where(text: str, words: str) -> None:
    with pytest.raises(UnreadableError, match=words) as raised:
        read_text(text)
    assert "\n" not in str(raised.value)
