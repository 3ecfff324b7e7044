"""A report as one self-contained HTML page, for light and dark themes and all screen sizes.

A page is a list of elements, which hold plain text. The template ``templates/page.html`` turns them into HTML and escapes everything but
the drawings, which :func:`linformers.experiments.figures.svg` makes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from linformers.experiments.figures import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Heading:
    """A heading, which can be linked to."""

    kind: ClassVar = "heading"
    level: int
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; a soft one is drawn in a weaker colour."""

    kind: ClassVar = "paragraph"
    text: str
    soft: bool = False


@dataclass(frozen=True)
class Contents:
    """Links to headings: anchors and their texts."""

    kind: ClassVar = "contents"
    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table; columns in ``texts`` hold running text.

    On a small screen a stacked table becomes a box for each row; any other scrolls sideways.
    """

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()
    stacked: bool = True


@dataclass(frozen=True)
class Numbers:
    """A few large numbers: names and values."""

    kind: ClassVar = "numbers"
    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Facts:
    """Names and values, one pair per line."""

    kind: ClassVar = "facts"
    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Picture:
    """A drawing that takes the colours of the page; see :func:`picture`."""

    kind: ClassVar = "picture"
    drawing: str
    caption: str


@dataclass(frozen=True)
class Settings:
    """Names and values in as many columns as there is room for."""

    kind: ClassVar = "settings"
    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Folded:
    """Elements that are shown when the summary is clicked."""

    kind: ClassVar = "folded"
    summary: str
    inside: "Sequence[Element]"


Element = Heading | Paragraph | Contents | Table | Numbers | Facts | Picture | Settings | Folded


def render(title: str, elements: Sequence[Element]) -> str:
    """The HTML of a page."""
    environment = Environment(
        loader=PackageLoader("linformers.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(title=title, elements=elements)
    return text.encode("utf-8", "replace").decode()  # a file name may contain bytes that are not UTF-8


def picture(figure: "Figure", name: str, caption: str) -> Picture:
    """A figure as an element; ``name`` is unique in the page."""
    return Picture(svg(figure, name, caption), caption)


def settings(values: Mapping[str, Any]) -> Folded:
    """Names and values, folded."""
    rows = [(name.replace("_", " "), shown(value)) for name, value in values.items() if value is not None]
    return Folded(f"configuration ({len(rows)} settings)", [Settings(rows)])


def shown(value: Any) -> str:
    """A value of a file as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)
