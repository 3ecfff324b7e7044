"""The look of a report: one HTML page that needs nothing else, for light and dark screens, large and small ones.

What comes from files is escaped here, at the one place where text becomes HTML.
"""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

from linformers.experiments.figures import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c1e21; --soft: #5f6368; --line: #d9dce1; --panel: #f5f6f8; --mark: #0060a0; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181c; --ink: #e4e6ea; --soft: #a0a5ad; --line: #363a42; --panel: #1f2228; --mark: #6cb6f0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 0.5rem; }
p, nav { max-width: 45rem; } .soft, figcaption { color: var(--soft); font-size: 0.9rem; }
a { color: var(--mark); } code, pre, td.text { font-family: ui-monospace, Consolas, Menlo, monospace; font-size: 0.85rem; }
.wide { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--line); }
th.text, td.text { text-align: left; } td.text { vertical-align: top; white-space: pre-wrap; min-width: 16rem; }
.numbers { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1rem 0; padding: 0; list-style: none; }
.numbers li { background: var(--panel); border-radius: 0.5rem; padding: 0.5rem 0.9rem; }
.numbers b { display: block; font-size: 1.25rem; } .numbers span { color: var(--soft); font-size: 0.85rem; }
figure { margin: 1rem 0; } figure svg { display: block; width: 100%; min-width: 34rem; height: auto; }
details { margin: 0.75rem 0; background: var(--panel); border-radius: 0.5rem; padding: 0.5rem 0.9rem; } summary { cursor: pointer; }
dl { columns: 15rem; column-gap: 2rem; font-size: 0.9rem; margin: 0.5rem 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid var(--line); break-inside: avoid; }
dt { color: var(--soft); } dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
pre { background: var(--panel); border-radius: 0.5rem; padding: 0.6rem 0.9rem; white-space: pre-wrap; margin: 0.5rem 0; }
@media (max-width: 40rem) { body { padding: 0.75rem; } th, td { padding: 0.25rem 0.45rem; } }
"""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>$title</title>
<style>$style</style>
</head>
<body>
$body
</body>
</html>
""")


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page; the parts are HTML."""
    return PAGE.substitute(title=escape(title), style=STYLE, body="\n".join(part for part in parts if part))


def heading(level: int, text: str, anchor: str = "") -> str:
    """A heading, which can be linked to."""
    place = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{place}>{escape(text)}</h{level}>"


def paragraph(text: str, soft: bool = False) -> str:
    """A paragraph."""
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{escape(text)}</p>"


def preformatted(text: str) -> str:
    """Text with its own line breaks."""
    return f"<pre>{escape(text)}</pre>"


def contents(entries: Sequence[tuple[str, str]]) -> str:
    """Links to the headings: anchors and their texts."""
    links = " · ".join(f'<a href="#{escape(anchor)}">{escape(text)}</a>' for anchor, text in entries)
    return f"<nav>{links}</nav>" if len(entries) > 1 else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """A table that can be moved sideways where the screen is small; columns in ``texts`` hold running text."""
    kinds = [' class="text"' if i in texts else "" for i in range(len(heads))]
    top = "".join(f"<th{kind}>{escape(head)}</th>" for kind, head in zip(kinds, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def numbers(values: Sequence[tuple[str, str]]) -> str:
    """A few large numbers, each with what it is."""
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in values)
    return f'<ul class="numbers">{items}</ul>' if values else ""


def picture(figure: "Figure", name: str, caption: str) -> str:
    """A figure that takes the colours of the page; ``name`` is unique in it."""
    shown = svg(figure, name).replace("<svg", f'<svg aria-label="{escape(caption)}"', 1)
    return f'<figure><div class="wide">{shown}</div><figcaption>{escape(caption)}</figcaption></figure>'


def folded(summary: str, inside: str) -> str:
    """Something that opens when it is touched; ``inside`` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def settings(values: Mapping[str, Any]) -> str:
    """Names and values in as many columns as there is room for, folded away."""
    rows = [(name.replace("_", " "), shown(value)) for name, value in values.items() if value is not None]
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return folded(f"configuration ({len(rows)} settings)", f"<dl>{items}</dl>")


def shown(value: Any) -> str:
    """A value of a file as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)
