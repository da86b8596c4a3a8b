"""Building blocks of SVG: elements with escaped texts and attributes, scales with round ticks, and a frame."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_STYLES = 8  # series that the page's style sheet tells apart by colour; after these, lines are dashed
_MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.6L4.4 3.4H-4.4z",
    "M0-5L5 0L0 5L-5 0z",
    "M0 4.6L4.4-3.4H-4.4z",
)
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


def element(name: str, /, *children: str, **attributes: object) -> str:
    """Render an element. Children are markup; attributes are escaped (`class_` is class, `a_b` a-b)."""
    stated = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_written(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{stated}>{''.join(children)}</{name}>"


def text(words: str, **attributes: object) -> str:
    """Render a label."""
    return element("text", escape(words), **attributes)


def _written(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Format a coordinate, to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def shown(value: float) -> str:
    """Format a quantity for people: three digits, no exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(2 - math.floor(math.log10(abs(value))), 0)}f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to positions along an axis, 0 to 1."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return a value's position, clamped to the ends."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round values within the scale."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            candidates = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            candidates = [(first + exponent) * step for exponent in range(12)]
        slack = 1e-9 * self.high
        return [tick for tick in candidates if self.low - slack <= tick <= self.high + slack]


def from_zero(values: Sequence[float]) -> Scale:
    """Build a linear scale from 0 that covers these values."""
    highest = max(values, default=0.0)
    return Scale(0.0, highest * 1.05 if highest > 0 else 1.0)


def logarithmic(values: Sequence[float]) -> Scale:
    """Build a logarithmic scale that covers these values above 0."""
    above = [value for value in values if value > 0]
    if not above:
        return Scale(0.1, 1.0, is_log=True)
    low, high = min(above), max(above)
    return Scale(low * 0.9, max(high * 1.1, low * 2), is_log=True)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


@dataclass(frozen=True, slots=True)
class PlotFrame:
    """The inside of a plot, with its two axes."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str
    width: int = 380  # of the whole picture
    height: int = 270
    left: int = 52
    bottom: int = 44
    top: int = 32

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point."""
        right = self.width - 14
        lowest = self.height - self.bottom
        return (
            self.left + (right - self.left) * self.x.place(x),
            lowest - (lowest - self.top) * self.y.place(y),
        )

    def axes(self, *, y_is_share: bool = False) -> str:
        """Render grid, ticks and names of the axes."""
        lowest, parts = self.height - self.bottom, []
        for tick in self.y.ticks():
            left, level = self.at(self.x.low, tick)
            right, _ = self.at(self.x.high, tick)
            words = f"{tick:.0%}" if y_is_share else shown(tick)
            parts.append(element("line", x1=left, x2=right, y1=level, y2=level, class_="grid"))
            parts.append(text(words, x=left - 6, y=level + 4, text_anchor="end"))
        for tick in self.x.ticks():
            place, _ = self.at(tick, self.y.low)
            parts.append(element("line", x1=place, x2=place, y1=lowest, y2=lowest + 4, class_="axis"))
            parts.append(text(shown(tick), x=place, y=lowest + 17, text_anchor="middle"))
        parts.append(element("line", x1=self.left, x2=self.width - 14, y1=lowest, y2=lowest, class_="axis"))
        middle = (self.left + self.width - 14) / 2
        parts.append(text(self.x_label, x=middle, y=self.height - 8, text_anchor="middle", class_="name"))
        parts.append(text(self.y_label, x=4, y=14, class_="name"))
        return "".join(parts)

    def picture(self, label: str, *content: str) -> str:
        """Render the whole plot. `label`: a description for screen readers."""
        return picture(self.width, self.height, label, *content)


def picture(width: float, height: float, label: str, *content: str) -> str:
    """Render a picture that scales to the width of its container."""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", *content, viewBox=box, role="img", aria_label=label)


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points, as the `d` of a path."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def dash(style: int) -> str:
    """Return the dash pattern of the n-th series."""
    return _DASHES[style // MAX_STYLES % len(_DASHES)]


def mark(style: int, x: float, y: float, words: str = "") -> str:
    """Render the mark of the n-th series. `words`: its tooltip."""
    title = element("title", escape(words)) if words else ""
    transform = f"translate({number(x)} {number(y)})"
    return element("path", title, d=_MARKS[style % len(_MARKS)], transform=transform, class_="mark")


def swatch(style: int) -> str:
    """Render the n-th series of a legend."""
    line = element("line", x1=0, x2=26, y1=7, y2=7, class_="curve", stroke_dasharray=dash(style))
    return element(
        "svg", line, mark(style, 13, 7), width=26, height=14, class_=f"s{style % MAX_STYLES}", aria_hidden="true"
    )
