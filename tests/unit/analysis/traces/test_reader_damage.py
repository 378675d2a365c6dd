"""Damaged and hostile traces: mended and told, or refused with the place and the reason."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from rankscope.analysis.traces.reader import json_stream
from rankscope.analysis.traces.reader.events import lay_out
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Trace, TraceError
from tests.shared_data import H200

EVENT = '{"ph": "X", "cat": "kernel", "name": "n%d", "pid": 0, "tid": 7, "ts": %d.5, "dur": 2, "args": {"stream": 7}}'


def good(count: int, first: int = 0) -> str:
    return ",\n".join(EVENT % (number, number) for number in range(first, first + count))


def whole(*parts: str) -> bytes:
    return ('{"schemaVersion": 1, "traceEvents": [' + ",".join(parts) + '], "traceName": "x"}').encode()


def names(trace: Trace) -> list[str]:
    return [trace.named(int(index)) for index in trace.name]


@pytest.fixture(params=[64, 2 << 20], ids=["small pieces", "one piece"], autouse=True)
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", request.param)


@pytest.mark.parametrize(
    ("written", "name", "repair"),
    [
        ('"a\nb\x00c"', "a b c", "control character inside a string replaced by a space: 2 times (first at byte {2})"),
        ('"\xff"', "�", "invalid UTF-8 replaced by U+FFFD (byte {1})"),
        (r'"\ud83dx"', "�x", "lone surrogate replaced by U+FFFD (byte {1})"),
        (r'"\ud83d\ude00"', "😀", None),
        (r'"C:\Users\me"', r"C:\Users\me", "invalid escape read as a backslash: 2 times"),
        (r'"\\ud83d"', r"\ud83d", None),
        ('"NaN, Infinity"', "NaN, Infinity", None),
        ("null", "", None),
        ("17", "17", None),
    ],
)
def test_a_name_that_is_not_json_is_mended(written: str, name: str, repair: str | None) -> None:
    text = whole(good(3), '{"name": NAME, "ph": "X", "ts": 1, "dur": 1}', good(3, 3))
    place = text.index(b"NAME")
    trace = read_trace(text.replace(b"NAME", written.encode("latin-1" if "\xff" in written else "utf-8")))
    assert len(trace) == 7
    assert name in names(trace)
    expected = (repair or "?").format(place, place + 1, place + 2)
    assert [words.startswith(expected) for words in trace.repairs] == ([True] if repair else [])


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "Infinity", "inf", "-nan", "1e999", "9" * 6000])
def test_a_value_that_is_no_number_is_not_measured(value: str) -> None:
    mended = '{"ph": "X", "name": "odd: NaN, name", "ts": 1, "dur": 5, "args": {"stream": %s, "x": [%s]}}'
    trace = read_trace(whole(good(2), mended % (value, value), good(2, 2)))
    row = names(trace).index("odd: NaN, name")
    assert (len(trace), int(trace.stream[row]), int(trace.duration_ns[row])) == (5, -1, 5000)
    assert len(trace.repairs) == 1


@pytest.mark.parametrize(
    ("event", "kept", "repair"),
    [
        ('{"ph": "X", "ts": 1}', True, "event without a valid duration taken as 0"),
        ('{"ph": "X", "ts": 1, "dur": -4}', True, "negative duration taken as 0"),
        ('{"ph": "X", "dur": 4}', False, "event without a valid time dropped"),
        ('{"ph": "X", "ts": 1e308, "dur": 4}', False, "event without a valid time dropped"),
        ('{"ph": "X", "ts": "soon", "dur": 4}', False, "event without a valid time dropped"),
        ('{"ph": "X", "ts": [1], "dur": 4}', False, "event without a valid time dropped"),
        ('{"ts": 1, "dur": 4}', True, "event with a duration but no ph read as complete"),
        ('{"ph": "X", "ts": 1, "dur": 4, "pid": {}, "tid": [3], "args": [], "cat": 7}', True, None),
        ('{"ph": "X", "ts": 1, "dur": 4, "args": {"stream": [1], "device": "x", "External id": {}}}', True, None),
        ("17", False, "unreadable event skipped: expected object, got int (byte {})"),
        ("", False, "comma without a following event (byte {})"),
        ('{"ph": "X", "ts": 01}', False, "unreadable event skipped: invalid number (byte {})"),
    ],
)
def test_events_with_missing_or_odd_keys_are_repaired_or_dropped(event: str, kept: bool, repair: str | None) -> None:
    trace = read_trace(whole(good(2), event, good(2, 2)))
    assert len(trace) == 4 + kept
    place = len(whole(good(2), "")) - len('], "traceName": "x"}')
    assert trace.repairs == ((repair.format(place),) if repair else ())


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "name": "a "b", "ts": 1, "dur": 1}',
        '{"ph": "X", "name": "a "quoted" b", "ts": 1, "dur": 1}',
        '{"ph": "X", "name": "unclosed, "ts": 1, "dur": 1}',
        '{"ph": "X", "name": "a"]]}b", "ts": 1, "dur": 1}',
        '{"ph": "X", "ts": 1, "dur": 1, "args": {"deep": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"ph": "X", "ts": 1, "dur": 1, "args": {"open": ' + "[" * 100 + "}}",
    ],
    ids=["stray quote", "quoted word", "unclosed text", "feigned end", "deep nesting", "unclosed nesting"],
)
def test_one_broken_event_costs_no_other(event: str) -> None:
    trace = read_trace(whole(good(30), event, good(30, 30)))
    assert sorted(names(trace)) == sorted(f"n{number}" for number in range(60))
    assert len(trace.repairs) == 1
    assert trace.repairs[0].startswith("unreadable event skipped")


def test_a_cut_file_gives_its_complete_events_or_is_refused() -> None:
    text = whole(good(50))
    for cut in (text.rindex(b'"n49"') + 2, text.rindex(b'"dur": 2'), text.index(b'"n49"') - 30):
        trace = read_trace(text[:cut])
        assert len(trace) == 49
        assert trace.repairs == (
            "the file is cut off inside traceEvents: 49 complete events before the cut were read, the rest is "
            f"missing (byte {cut})",
        )
        with pytest.raises(TraceError, match=rf"cut off inside traceEvents; 49 complete .* \(byte {cut}\)"):
            read_trace(text[:cut], salvage=False)
    assert len(read_trace(text[: text.index(b', "traceName"')])) == 50
    assert len(read_trace(text + b"\n\n")) == 50


def test_a_comma_too_many_is_taken_away() -> None:
    trace = read_trace(whole(good(5) + ", \n"))
    assert len(trace) == 5
    assert trace.repairs == (f"trailing comma in traceEvents removed (byte {whole(good(5)).index(b']')})",)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b" \n\t ", "the file is empty"),
        (b"<!DOCTYPE html><html>", "this is HTML or XML, not a trace"),
        (b"hello", "not a JSON object or array; it begins with 'hello' .byte 0."),
        (b'{"a": 1, "b": []}', "JSON without traceEvents .its keys: a, b."),
        (b'{"a": {"traceEvents": []}}', "JSON without traceEvents .its keys: a."),
        (b'{"traceEvents": {}}', "traceEvents is not an array .byte 16."),
        (b'{"schemaVersion": 1, "devi', "it was cut off before its events .byte 26."),
        (b'{"a": 1,, "traceEvents": []}', "not valid JSON: .* .byte 8."),
        (b'{"traceEvents": [{"ph": "X", "ts": ', "cut off before its first event is complete .byte 35."),
        (b"[1, 2]", "nothing in traceEvents can be read: .*expected object, got int: 2 times"),
        (b"PK\x03\x04" + bytes(20), "this is a zip archive"),
        (gzip.compress(whole(good(99)), mtime=0)[:-9], "the gzip data ends early, at byte "),
        (gzip.compress(whole(good(99)), mtime=0)[:7], "the gzip data ends early, at byte 7"),
        (
            gzip.compress(whole(good(99)), mtime=0)[:-8] + bytes(8),
            "the gzip data is damaged before byte .*incorrect data check",
        ),
        (gzip.compress(whole(good(9)), mtime=0) + b"junk", "unexpected data after the gzip data at byte "),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (whole(*(["1"] * 2000)), "more than 1000 events cannot be read; the last one: expected object, got int"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(data)
    assert "\n" not in str(caught.value)


def test_text_that_grows_beyond_the_limit_is_refused() -> None:
    packed = gzip.compress(whole(good(2000)))
    assert len(read_trace(packed)) == 2000
    with pytest.raises(TraceError, match="longer than the limit of 100000 bytes"):
        read_trace(packed, text_limit_bytes=100_000)


def test_an_endless_event_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 1000)
    monkeypatch.setattr(json_stream, "MAX_EVENT_BYTES", 100_000)
    blocks = iter([whole(good(3), '{"name": "')[:-20], *([b"a" * 10_000] * 1000)])
    with pytest.raises(TraceError, match=r"an event has no end: it is longer than 100000 bytes"):
        read_trace(blocks)
    assert len(list(blocks)) > 950, "most of it was never asked for"


def test_members_of_gzip_follow_one_another() -> None:
    text = whole(good(50))
    assert len(read_trace(gzip.compress(text[:700]) + gzip.compress(text[700:]) + bytes(64))) == 50


def test_random_damage_gives_a_trace_or_a_reason() -> None:
    text = gzip.decompress((H200 / "nccl_world1_3steps.json.gz").read_bytes())[:9000]
    text = (
        text[: text.rindex(b"},\n  {") + 1] + b'\n], "distributedInfo": {"rank": 1, "pg_config": [{"pg_name": "0"}]}}'
    )
    count = sum(event["ph"] == "X" for event in json.loads(text)["traceEvents"])
    tokens = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"NaN", b"\x00", b"\xff", b"null", b"1e999", b"\\ud8"]
    how, read = random.Random(3), 0
    for _ in range(60):
        damaged = bytearray(text)
        for _ in range(how.choice([1, 1, 2, 8])):
            place = how.randrange(len(damaged))
            damaged[place : place + how.choice([0, 0, 1, 9])] = how.choice([*tokens, bytes([how.randrange(256)])])
        try:
            trace = read_trace(bytes(damaged[: how.choice([None, None, how.randrange(len(damaged))])]))
        except TraceError:
            continue
        read += 1
        assert len(trace) == len(trace.name) == len(trace.stream) <= count
    assert read > 30


def test_many_broken_events_do_not_rescan_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container that writes such a trace must not keep its node's daemon busy for hours."""
    looked_at = []

    def count(text: bytes) -> object:
        looked_at.append(len(text))
        return lay_out(text)

    monkeypatch.setattr(json_stream, "lay_out", count)
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 2 << 20)
    broken = '{"ph": "X", "name": "b"c", "pid": 0, "ts": 1}'
    text = whole(*[part for number in range(150) for part in (good(10, 10 * number), broken)])
    read_trace([text])
    assert sum(looked_at) < 40 * len(text)
