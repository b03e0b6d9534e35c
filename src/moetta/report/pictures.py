"""Figures as parts of the page, with names, descriptions and the page's colours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape

from matplotlib.figure import Figure

from moetta.figures import FAINT, GRID, INK, PALETTE, on_dark, on_light, render
from moetta.figures.theme import difference
from moetta.results import BASELINE, Group

ALIKE = 20  # colours that differ by less are taken for one
LEADERS = 5  # groups drawn in colour besides the source model; more would hide each other
# Colours that the page replaces, so that figures follow its light or dark theme.
THEMED = {INK: "currentColor", GRID: "var(--grid)", FAINT: "var(--faint)"}


@dataclass(frozen=True)
class Style:
    """How a group is drawn: its colour on light and on dark pages, its marker and dash."""

    color: str
    dark: str
    marker: str
    dash: str = "-"


QUIET = Style(FAINT, FAINT, "")


@dataclass(frozen=True)
class Picture:
    """A finished figure.

    Attributes:
        name: Its file name without extension.
        title: The heading above it.
        caption: What it shows, in one or two sentences.
        alt: The same for readers who cannot see it, with the important numbers.
        figure: What is drawn.
        colors: What its colours become on a dark page.
        other: Another view of the same, shown on demand.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    colors: Mapping[str, str] = field(default_factory=dict)
    other: Picture | None = None

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG."""
        return render(self.figure, "svg")


def leaders(groups: Sequence[Group], most: int = LEADERS + 1) -> list[Group]:
    """The groups to draw in colour, best first.

    These are the best one, the source model, the best methods as they are, then the best variants.
    """
    if len(groups) <= most:
        return list(groups)
    ranked = sorted(
        groups[1:], key=lambda g: (g.method != BASELINE, g.variant is not None, g.protocol)
    )
    kept = [groups[0], *ranked][:most]
    return [group for group in groups if group in kept]


def styles(groups: Collection[Group]) -> dict[str, Style]:
    """A style per label: the one on the method's card if there is one, else from the palette."""
    found: dict[str, Style] = {}
    for group in groups:
        style = None if group.variant or group.protocol else _own_style(group)
        if style is not None and _stands_out(style.color, found):
            found[group.label] = style
    free = [Style(c, on_dark(c), marker) for c, marker in PALETTE if _stands_out(c, found)]
    for group in groups:
        if group.label not in found:
            found[group.label] = free.pop(0) if free else QUIET
    return found


def _stands_out(color: str, found: Mapping[str, Style]) -> bool:
    return all(difference(color, other.color) >= ALIKE for other in found.values())


def _own_style(group: Group) -> Style | None:
    """The style that the method's registration asks for; None if it asks for none."""
    drawn = group.first.drawn
    light = _color(drawn.get("light") or drawn.get("color"))
    if light is None:
        return None
    light = on_light(light)
    dark = _color(drawn.get("dark")) or light
    dash = str(drawn.get("dash") or "-")
    marker = str(drawn.get("marker") or "o")
    return Style(light, on_dark(dark), marker, dash if dash in ("-", "--", ":", "-.") else "-")


def _color(value: object) -> str | None:
    text = str(value).lower()
    return text if re.fullmatch("#[0-9a-f]{6}", text) else None


def themed(styles: Iterable[Style]) -> dict[str, str]:
    """What the colours of some styles become on a dark page."""
    return {style.color: style.dark for style in styles if style is not QUIET}


def picture_files(picture: Picture, forms: Sequence[str]) -> dict[str, bytes]:
    """The files of a picture and of its other view, by name."""
    found = {} if picture.other is None else picture_files(picture.other, forms)
    for form in forms:
        data = picture.svg if form == "svg" else render(picture.figure, form)
        found[f"{picture.name}.{form}"] = data
    return found


def inline_svg(picture: Picture) -> str:
    """The SVG as part of a page: unique identifiers, the page's colours, a title to read aloud."""
    text = picture.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    mark = re.sub(r"[^a-z0-9-]", "-", picture.name)
    text = re.sub(r'\bid="', f'id="{mark}--', text)
    text = re.sub(r"url\(#", f"url(#{mark}--", text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{mark}--', text)
    colors = {c: f"light-dark({c}, {dark})" for c, dark in picture.colors.items()} | THEMED
    text = re.sub("#[0-9a-f]{6}", lambda found: colors.get(found[0], found[0]), text)
    opening, rest = text.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', opening)
    return (
        f'<svg {view[0] if view else ""} role="img" aria-labelledby="{mark}--title">'
        f'<title id="{mark}--title">{escape(picture.alt, quote=False)}</title>{rest.strip()}'
    )
