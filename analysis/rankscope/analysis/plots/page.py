"""A self-contained HTML page: style and plots inline, no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.plots.svg import clean

_LONG_WORD = 40  # characters
_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'
_STYLE = """
:root { --paper: #ffffff; --ink: #1f2328; --muted: #59636e; --grid: #d8dee4; --mark: #fff3e0; --lead: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e6e9ec; --muted: #9aa4ae; --grid: #30363d; --mark: #3a2a14; --lead: #1d2127; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; }
main { max-width: 940px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 14px; }
h2, summary { font-size: 17px; font-weight: 600; margin: 34px 0 8px; }
summary { cursor: pointer; }
.lead { font-size: 18px; background: var(--lead); border-left: 4px solid #0072b2; padding: 12px 16px; margin: 0; }
p { margin: 8px 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.w { overflow-wrap: anywhere; min-width: 16em; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
tr.marked td { background: var(--mark); }
.choice { display: flex; flex-wrap: wrap; }
.choice > input { position: absolute; opacity: 0; }
.choice > label { border: 1px solid var(--grid); border-radius: 6px; padding: 3px 10px;
  margin: 0 6px 6px 0; cursor: pointer; font-size: 13.5px; }
.choice > input:checked + label { background: var(--lead); border-color: #0072b2; font-weight: 600; }
.choice > input:focus-visible + label { outline: 2px solid #0072b2; }
.choice > figure { display: none; order: 1; width: 100%; }
.choice > input:checked + label + figure { display: block; }
figure { margin: 14px 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
svg .paper { fill: var(--paper); } svg .ink { fill: var(--ink); } svg .muted { fill: var(--muted); }
svg .grid { stroke: var(--grid); } svg .base { stroke: var(--muted); }
footer { margin-top: 40px; color: var(--muted); font-size: 13px; }
"""


@dataclass(frozen=True)
class Table:
    """Cells are plain text and escaped here. Numeric columns are right-aligned. Words are broken only in columns that
    hold very long ones, such as names of kernels."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool] = ()
    marked: Sequence[int] = ()  # highlighted rows


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs of plain text, tables, and plots (SVG text made by this package). Of `choices`, named
    plots, the reader selects one; the first is shown until then."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[str] = ()
    choices: Sequence[tuple[str, str]] = ()
    open: bool = True  # False: collapsed, for a long appendix


def page(title: str, sections: Sequence[Section], *, lead: str = "", foot: str = "") -> str:
    """`lead` is the main sentence, in large type below the title."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Names come from untrusted files. If one is not escaped, it still can neither run nor fetch anything.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="color-scheme" content="light dark">',
        f"<title>{clean(title)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{clean(title)}</h1>",
    ]
    if lead:
        parts.append(f'<p class="lead">{clean(lead)}</p>')
    parts += [_section(section, number) for number, section in enumerate(sections)]
    if foot:
        parts.append(f"<footer>{clean(foot)}</footer>")
    parts.append("</main></body></html>\n")
    return "\n".join(parts)


def _section(section: Section, number: int) -> str:
    body = "\n".join(
        [f"<p>{clean(text)}</p>" for text in section.paragraphs]
        + [_table(table) for table in section.tables]
        + [_figure(plot) for plot in section.plots]
        + ([_choice(section.choices, f"choice-{number}")] if section.choices else [])
    )
    if section.open:
        return f"<section><h2>{clean(section.title)}</h2>\n{body}</section>"
    return f"<section><details><summary>{clean(section.title)}</summary>\n{body}</details></section>"


def _figure(plot: str) -> str:
    # An SVG inside HTML needs no namespace, and a page without any URL is easy to trust.
    return f"<figure>{plot.replace(_NAMESPACE, '', 1)}</figure>"


def _choice(choices: Sequence[tuple[str, str]], group: str) -> str:
    """Each plot follows its button, so that the style sheet can show the one that is checked."""
    parts = [
        f'<input type="radio" name="{group}" id="{group}-{index}"{"" if index else " checked"}>'
        f'<label for="{group}-{index}">{clean(name)}</label>\n{_figure(plot)}'
        for index, (name, plot) in enumerate(choices)
    ]
    return "\n".join(['<div class="choice">', *parts, "</div>"])


def _table(table: Table) -> str:
    numeric = [*table.numeric, *[False] * (len(table.columns) - len(table.numeric))]
    kinds = [' class="n"' if right else "" for right in numeric]
    for column, cells in enumerate(zip(*table.rows, strict=True)):
        if not numeric[column] and any(len(word) > _LONG_WORD for cell in cells for word in cell.split()):
            kinds[column] = ' class="w"'
    head = "".join(f"<th{kind}>{clean(text)}</th>" for kind, text in zip(kinds, table.columns, strict=True))
    marked = frozenset(table.marked)
    rows = "\n".join(
        ('<tr class="marked">' if index in marked else "<tr>")
        + "".join(f"<td{kind}>{clean(text)}</td>" for kind, text in zip(kinds, row, strict=True))
        + "</tr>"
        for index, row in enumerate(table.rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
