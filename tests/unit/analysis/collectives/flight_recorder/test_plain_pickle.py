from __future__ import annotations

import builtins
import copyreg
import io
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, DumpError
from rankscope.analysis.collectives.flight_recorder.dump import read_dump
from rankscope.analysis.collectives.flight_recorder.plain_pickle import PlainPickleError, load_plain

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 100), 1 << 100) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    SCALARS | st.tuples(SCALARS, SCALARS),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(value=PLAIN, protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_they_were_written(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value


def test_shared_parts_stay_shared() -> None:
    part = {"name": "f"}
    first, second = load_plain(pickle.dumps([part, part], 2))
    assert first is second


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


class Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "outside" if obj == "out" else None


def persistent() -> bytes:
    out = io.BytesIO()
    Persistent(out, 2).dump(["out"])
    return out.getvalue()


def attacks(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    return {
        "os.system": pickle.dumps(Calls(os.system, command), 2),
        "os.system, newest protocol": pickle.dumps(Calls(os.system, command)),
        "os.system in text": pickle.dumps(Calls(os.system, command), 0),
        "builtins.eval": pickle.dumps(Calls(builtins.eval, f"open({str(marker)!r}, 'w')"), 2),
        "inside a list": pickle.dumps({"version": "2.10", "entries": [Calls(os.system, command)]}, 4),
        "an object": pickle.dumps(marker, 2),
        "copyreg": pickle.dumps(Calls(vars(copyreg)["_reconstructor"], object, object, None), 2),
        "GLOBAL and REDUCE": b"cos\nsystem\n(X" + struct.pack("<I", len(command)) + command.encode() + b"tR.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nX\x01\x00\x00\x00ao.",
        "NEWOBJ": b"cbuiltins\ndict\n)\x81.",
        "BUILD": b"}}b.",
        "EXT1": b"\x82\x01.",
        "EXT2": b"\x83\x01\x00.",
        "EXT4": b"\x84\x01\x00\x00\x00.",
        "PERSID": b"Pnumber\n.",
        "BINPERSID": persistent(),
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "READONLY_BUFFER": b"\x80\x05\x97\x98.",
        "bytes": pickle.dumps(b"abc", 4),
        "bytearray": pickle.dumps(bytearray(b"abc"), 5),
        "a set": pickle.dumps({1, 2}, 4),
        "BINBYTES8 of an exabyte": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
        "BYTEARRAY8 of an exabyte": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
        "BINUNICODE of 4 GiB": b"\x80\x02X" + struct.pack("<I", 0xFFFFFFFF) + b".",
        "BINUNICODE8 of an exabyte": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        "LONG4 of 2 GiB": b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".",
        "LONG1 of 255 bytes": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
        "INT of a million digits": b"I" + b"1" * 1_000_000 + b"\n.",
        "a dict with numbers as keys": pickle.dumps({1: 2}, 2),
        "a dict with tuples as keys": pickle.dumps({("a",): 2}, 2),
        "nested tuples": pickle.dumps(((1,),), 2),
        "a tuple of lists": pickle.dumps(([],), 2),
        "tuples that double": b"\x80\x02K\x01\x85" + b"q\x00h\x00\x86" * 60 + b".",
        "many open marks": b"\x80\x02" + b"(" * 100_000,
        "nested lists without a value": b"\x80\x02" + b"]" * 100_000 + b"a" * 100_000 + b".",
        "appends to a dict": b"}K\x01a.",
        "items of a list": b"]K\x01K\x02s.",
        "an unknown protocol": b"\x80\x09N.",
        "no STOP": b"\x80\x02N",
        "an empty stack": b".",
        "two values": b"NN.",
        "an unknown memo": b"h\x07.",
        "a tuple of nothing": b"\x86.",
        "nothing": b"",
    }


@pytest.mark.parametrize("name", attacks(Path("x")))
def test_a_malicious_pickle_executes_nothing_and_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    # Python's unpickler would call what was once registered.
    monkeypatch.setitem(vars(copyreg)["_extension_cache"], 1, os.system)
    data = attacks(marker)[name]
    tracemalloc.start()
    try:
        with pytest.raises(PlainPickleError):
            load_plain(data)
        with pytest.raises(DumpError, match="give files that torch wrote"):
            read_dump(data, Catalog())
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    assert not marker.exists()


def test_the_attack_works_on_python_s_own_unpickler(tmp_path: Path) -> None:
    """So that the tests above show something."""
    marker = tmp_path / "marker"
    pickle.loads(attacks(marker)["os.system"])
    assert marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x02N" + b"r\xff\xff\xff\xff" * 1000 + b".", id="an index of the memo that is huge"),
        pytest.param(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", id="nested lists"),
        pytest.param(b"\x80\x02]q\x00h\x00a.", id="a list that contains itself"),
        pytest.param(b"\x80\x02](]q\x00" + b"](h\x00h\x00eq\x00" * 200 + b"e.", id="lists that double"),
    ],
)
def test_a_container_bomb_uses_little_memory_and_is_no_dump(data: bytes) -> None:
    tracemalloc.start()
    try:
        load_plain(data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(DumpError):
        read_dump(data, Catalog())


def test_the_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.analysis.collectives.flight_recorder.plain_pickle.MAX_OPCODES", 1000)
    assert load_plain(pickle.dumps([None] * 900, 2)) == [None] * 900
    with pytest.raises(PlainPickleError, match="more than 1,000 values"):
        load_plain(pickle.dumps([None] * 1000, 2))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_value_or_the_one_error(data: bytes) -> None:
    try:
        load_plain(data)
    except PlainPickleError as error:
        assert str(error)
