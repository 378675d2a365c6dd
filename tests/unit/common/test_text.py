"""Whatever a container, a user or another program wrote becomes one bounded, printable line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankscope.common.text import one_line, printable, printable_name


@given(st.text(st.characters(), max_size=300), st.integers(10, 100))
def test_any_text_becomes_a_bounded_printable_line(text: str, characters: int) -> None:
    for cleaned in (printable(text, characters), one_line(text, characters), printable_name(text, characters)):
        assert cleaned.isprintable() and len(cleaned) <= characters
    assert printable(text).isprintable() and len(printable(text)) == len(text)


def test_white_space_becomes_a_space_and_control_characters_are_replaced() -> None:
    assert printable("a\tb\nc") == "a b c"
    assert printable("\x1b[31mred\x00") == "�[31mred�"
    assert printable("right\u202eleft\ud800") == "right�left�"
    assert printable("Größe – µs") == "Größe – µs"


def test_a_cut_is_visible() -> None:
    assert printable("abcdef", 4) == "abc…"
    assert printable("abcd", 4) == "abcd"


def test_a_message_of_several_lines_becomes_one() -> None:
    assert one_line("first\n  second\r\n", 80) == "first second"


def test_long_names_stay_distinct() -> None:
    one, other = printable_name("x" * 100 + "1", 40), printable_name("x" * 100 + "2", 40)
    assert one != other and one.startswith("x" * 31 + "~")
