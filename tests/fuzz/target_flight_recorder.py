"""Dumps of torch's flight recorder: pickles and JSON that a training process wrote."""

from __future__ import annotations

import json

from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, DumpError
from rankscope.analysis.collectives.flight_recorder.dump import read_dump
from rankscope.analysis.collectives.flight_recorder.matching import analyze_dumps
from rankscope.analysis.collectives.flight_recorder.report import make_report, to_json
from rankscope.analysis.collectives.flight_recorder.tail import MAX_TAIL_BYTES, make_tail, match_tails
from tests.fuzz.checking import check_text
from tests.unit.analysis.collectives.flight_recorder.made_dumps import as_json, as_pickle, content, hung_job, record

_RECORDS = [
    record(1, "nccl:_all_gather_base", sizes=[[8, 2]], outputs=[[64]]),
    record(2, state="started"),
    record(3, "nccl:send 0->1", is_p2p=True, state="scheduled"),
    record(3, "nccl:coalesced", sizes=[], is_p2p=True),
]
_HEALTHY = as_pickle(content(_RECORDS, {"0": [0, 1]}))
_TAIL = make_tail(_HEALTHY)
SEEDS = [
    _TAIL,
    _HEALTHY,
    as_pickle(content(_RECORDS, {"0": [0, 1]}), 4),
    as_json(content(_RECORDS, {})),
    hung_job(2, 1)[0],
]
TOKENS = [
    *(b"cos\nsystem\n", b"X\x02\x00\x00\x00ok", b"\x85R", b"\x93", b"\x82\x01", b"Q", b"\x97", b"]q\x00h\x00a"),
    *(
        b"r\xff\xff\xff\xff",
        b"j\xff\xff\xff\xff",
        b"\x8a\x10",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"(",
        b"e",
        b"u",
    ),
    *(b"entries", b"pg_config", b"[0, 1, 2]", b"recv 1<-0", b"coalesced", b"gloo:barrier", b"completed", b"2.10"),
]


def run(data: bytes) -> None:
    catalog = Catalog()
    try:
        dumps = {0: read_dump(data, catalog), 1: read_dump(_HEALTHY, catalog)}
    except DumpError as error:
        check_text(str(error))
        return
    for operation in catalog.operations:
        check_text(operation.name)
        check_text(operation.shapes)
    for text in (*catalog.lines, *(group.label for group in catalog.groups)):
        check_text(text)
    try:
        tail = make_tail(data)
        assert len(tail) <= MAX_TAIL_BYTES
    except DumpError as error:
        check_text(str(error))
        tail = data
    assert match_tails({0: tail, 1: _TAIL, 2: data}).headline.isprintable()
    report = make_report(analyze_dumps(dumps, catalog))
    assert report.headline.isprintable()
    json.dumps(to_json(report), allow_nan=False).encode()
