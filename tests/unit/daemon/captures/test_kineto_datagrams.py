"""libkineto's datagrams, as it writes them and as somebody hostile might."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.daemon.captures.kineto import datagrams


def request(mask: int = 3, count: int | None = None, pids: tuple[int, ...] = (7, 1), job_id: int = 42) -> bytes:
    number = len(pids) if count is None else count
    payload = struct.pack(f"<iiq{len(pids)}i", mask, number, job_id, *pids)
    return struct.pack("<Q32s", len(payload), b"req") + payload


def test_requests_and_registrations_parse_as_libkineto_writes_them() -> None:
    assert datagrams.parse(request()) == datagrams.Request(mask=3, job_id=42, pids=(7, 1))
    registration = struct.pack("<Q32siiq", 16, b"ctxt", 2, 99, 42)
    assert datagrams.parse(registration) == datagrams.Registration(gpu=2, pid=99, job_id=42)


@pytest.mark.parametrize(("mask", "is_ready"), [(3, True), (1, False), (2, True), (0, False)])
def test_only_the_masks_second_bit_requests_a_configuration(mask: int, is_ready: bool) -> None:
    message = datagrams.parse(request(mask))
    assert isinstance(message, datagrams.Request)
    assert message.is_ready is is_ready


@pytest.mark.parametrize("count", [-1, 1, 3, datagrams.MAX_PIDS + 1, 2**31 - 1, -(2**31)])
def test_a_request_that_lies_about_its_pids_is_malformed(count: int) -> None:
    with pytest.raises(datagrams.MalformedError, match="pids announced"):
        datagrams.parse(request(count=count))


def test_a_datagram_of_another_length_than_it_says_is_malformed() -> None:
    whole = request()
    for size in range(len(whole)):
        with pytest.raises(datagrams.MalformedError):
            datagrams.parse(whole[:size])
    with pytest.raises(datagrams.MalformedError):
        datagrams.parse(whole + b"\0")


@given(st.binary(max_size=2 * datagrams.MAX_DATAGRAM_BYTES))
def test_no_bytes_do_worse_than_being_malformed(datagram: bytes) -> None:
    try:
        message = datagrams.parse(datagram)
    except datagrams.MalformedError as error:
        assert len(str(error)) < 200
    else:
        assert isinstance(message, datagrams.Request | datagrams.Registration)


def test_the_longest_accepted_request_fits_the_buffer() -> None:
    longest = request(pids=tuple(range(datagrams.MAX_PIDS)))
    assert len(longest) == datagrams.MAX_DATAGRAM_BYTES
    assert isinstance(datagrams.parse(longest), datagrams.Request)


def test_answers_are_what_libkineto_reads() -> None:
    assert datagrams.configuration("A=1\n") == struct.pack("<Q32s", 4, b"req") + b"A=1\n"
    assert datagrams.configuration("") == struct.pack("<Q32s", 0, b"req")
    assert datagrams.count(3) == struct.pack("<Q32si", 4, b"ctxt", 3)
    with pytest.raises(UnicodeEncodeError):
        datagrams.configuration("ACTIVITIES_LOG_FILE=/tmp/ü")
