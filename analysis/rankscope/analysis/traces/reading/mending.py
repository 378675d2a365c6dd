"""Mends text that JSON does not allow but profilers have written: control characters, NaN, stray backslashes."""

from __future__ import annotations

import re

import numpy as np

from rankscope.analysis.traces.reading.refusing import Repairs
from rankscope.analysis.traces.reading.scanning import lay_out

CONTROL = "control character inside a text replaced by a space"
ENCODING = "piece of text that is not UTF-8 replaced by U+FFFD"
SURROGATE = "half of a surrogate pair replaced by U+FFFD"
ESCAPE = "backslash that escapes nothing taken as a backslash"
NOT_A_NUMBER = "NaN or Infinity taken as not measured"
TOO_LARGE = "number too large to hold taken as not measured"

_TO_SPACE = bytes(letter if letter >= 0x20 else 0x20 for letter in range(256))
_PAIR_OR_HALF = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_BACKSLASH = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')
# Both begin at what precedes a value: a search from every letter, or from every digit of a long number, takes ages.
_WORD = re.compile(rb"[:,\[]\s*([-+]?(?:[Nn]a[Nn](?:\([a-z0-9]*\))?|[Ii]nf(?:inity)?|NAN|INF))(?![A-Za-z0-9])")
_LONG_NUMBER = re.compile(
    rb"[:,\[]\s*(-?[0-9]{300,}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|-?[0-9.]+[eE]\+?[0-9]{3,})(?![0-9.])"
)


def mend(text: bytes, repairs: Repairs, *, offset: int) -> bytes:
    """The text with all of that mended, noted in `repairs`; the same text where there was nothing to mend."""
    text = _mend_controls(text, repairs, offset)
    text = _mend_encoding(text, repairs, offset)
    if b"\\" in text:
        text = _mend_escapes(text, repairs, offset)
    text = _mend_values(text, _WORD, NOT_A_NUMBER, repairs, offset)
    return _mend_values(text, _LONG_NUMBER, TOO_LARGE, repairs, offset)


def _mend_controls(text: bytes, repairs: Repairs, offset: int) -> bytes:
    # Outside of texts a control character is white space, so that all may become spaces.
    places = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) < 0x20)
    if not len(places):
        return text
    places = places[lay_out(text).within_texts(places)]
    if not len(places):
        return text
    repairs.note(CONTROL, len(places), byte=offset + int(places[0]))
    return text.translate(_TO_SPACE)


def _mend_encoding(text: bytes, repairs: Repairs, offset: int) -> bytes:
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError as error:
        decoded = text.decode(errors="replace")
        repairs.note(ENCODING, max(decoded.count("\ufffd"), 1), byte=offset + error.start)
        return decoded.encode()
    return text


def _mend_escapes(text: bytes, repairs: Repairs, offset: int) -> bytes:
    def whole(match: re.Match[bytes]) -> bytes:
        found = match[0]
        if len(found) != 6:
            return found
        repairs.note(SURROGATE, byte=offset + match.start())
        return rb"\ufffd"

    def escaped(match: re.Match[bytes]) -> bytes:
        if len(match[0]) > 1:
            return match[0]
        repairs.note(ESCAPE, byte=offset + match.start())
        return rb"\\"

    return _BACKSLASH.sub(escaped, _PAIR_OR_HALF.sub(whole, text))


def _mend_values(text: bytes, pattern: re.Pattern[bytes], words: str, repairs: Repairs, offset: int) -> bytes:
    matches = list(pattern.finditer(text))
    if not matches:
        return text
    inside = lay_out(text).within_texts(np.array([match.start(1) for match in matches]))
    found = [match for match, within in zip(matches, inside.tolist(), strict=True) if not within]
    if found:
        repairs.note(words, len(found), byte=offset + found[0].start(1))
    pieces, done = [], 0
    for match in found:
        pieces += [text[done : match.start(1)], b"null"]
        done = match.end()
    return b"".join([*pieces, text[done:]])
