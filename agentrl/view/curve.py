"""A reward curve: as text for a terminal, as SVG and as PNG on disk. Values that are None or not finite are gaps."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from agentrl.errors import MissingDependency

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Values = Sequence[float | None]


# --- numbers ---------------------------------------------------------------------------
def smooth(values: Values, window: int | None = None) -> list[float]:
    """Each value's mean over the `window` values around it, NaN where there are none. Default: a tenth of all.

    >>> smooth([0.0, 3.0, None, 6.0], window=3)
    [1.5, 1.5, 4.5, 6.0]
    """
    half = (window or max(1, len(values) // 10)) // 2
    out = []
    for center in range(len(values)):
        around = [x for x in values[max(0, center - half) : center + half + 1] if _finite(x)]
        out.append(sum(around) / len(around) if around else math.nan)  # type: ignore[arg-type]
    return out


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that enclose [low, high].

    >>> ticks(0.03, 0.97)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        pad = max(abs(low) * 0.1, 0.5)
        low, high = low - pad, high + pad
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda size: abs(math.log(size / rough)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _label(value: float) -> str:
    return f"{value:g}"


# --- text ------------------------------------------------------------------------------
_UNICODE = {"up": "╯╭", "down": "╮╰", "flat": "─", "wall": "│", "dot": "·", "tick": "┤", "corner": "└", "floor": "─"}
_ASCII = {"up": "++", "down": "++", "flat": "-", "wall": "|", "dot": ".", "tick": "|", "corner": "+", "floor": "-"}


def curve_text(values: Values, *, width: int = 72, height: int = 12, title: str = "", ascii: bool = False) -> str:
    """The curve in `width` columns and `height` rows and axes: the smoothed line, and dots for the values themselves.

    >>> print(curve_text([0, 1, 2, 3], width=12, height=4, title="reward", ascii=True))
    reward
    3 |       +-
      |     +-+
      |  +--+
    0 |--+
      +---------
       1       4
    """
    marks = _ASCII if ascii else _UNICODE
    known = [float(x) for x in values if x is not None and math.isfinite(x)]
    if not known:
        return f"{title}\n(no values yet)".lstrip("\n")
    scale = [min(known), max(known)] if len(known) < 8 else ticks(min(known), max(known))
    low, high = (scale[0], scale[-1]) if scale[-1] > scale[0] else (scale[0] - 0.5, scale[0] + 0.5)
    labels = [_label(high), _label(low)]
    margin = max(map(len, labels)) + 1
    columns, height = max(4, width - margin - 1), max(2, height)

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (height - 1))

    grid = [[" "] * columns for _ in range(height)]
    for index, value in enumerate(values):
        if value is not None and math.isfinite(value):
            grid[row_of(value)][_column(index, len(values), columns)] = marks["dot"]
    _draw_line(grid, [None if math.isnan(x) else row_of(x) for x in _resample(smooth(values), columns)], marks)
    lines = [title] if title else []
    for number, row in enumerate(grid):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        lines.append(f"{label:>{margin - 1}} {marks['tick']}{''.join(row)}".rstrip())
    lines.append(" " * margin + marks["corner"] + marks["floor"] * columns)
    lines.append(" " * (margin + 1) + "1" + f"{len(values):>{columns - 1}}")
    return "\n".join(lines)


def _resample(values: list[float], columns: int) -> list[float]:
    """`columns` values: means where several values share a column, straight lines where values are further apart."""
    if len(values) < 2:
        return values * columns
    buckets: list[list[float]] = [[] for _ in range(columns)]
    for index, value in enumerate(values):
        if not math.isnan(value):
            buckets[_column(index, len(values), columns)].append(value)
    out = []
    for column, bucket in enumerate(buckets):
        place = column * (len(values) - 1) / (columns - 1)
        left = min(int(place), len(values) - 2)
        between = values[left] + (place - left) * (values[left + 1] - values[left])  # NaN beside a gap
        out.append(sum(bucket) / len(bucket) if bucket else between)
    return out


def _column(index: int, count: int, columns: int) -> int:
    return round(index * (columns - 1) / max(1, count - 1))


def _draw_line(grid: list[list[str]], rows: list[int | None], marks: dict[str, str]) -> None:
    previous: int | None = None
    for column, row in enumerate(rows):
        if row is not None:
            if previous is None or previous == row:
                grid[row][column] = marks["flat"]
            else:
                # The line leaves the previous row by its turn's first mark and enters this row by the second.
                leave, enter = marks["up"] if row < previous else marks["down"]
                grid[previous][column], grid[row][column] = leave, enter
                for between in range(min(row, previous) + 1, max(row, previous)):
                    grid[between][column] = marks["wall"]
        previous = row


# --- pictures --------------------------------------------------------------------------
_SIZE = (720, 400)
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 52
_LINE, _DOTS, _GRID, _INK = "#1f6feb", "#9ec1f7", "#e3e6ea", "#24292f"

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things stand in a picture of _SIZE pixels."""

    dots: list[Point]
    lines: list[list[Point]]  # the smoothed line, in pieces between gaps
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def _layout(values: Values) -> _Layout:
    known = [float(x) for x in values if x is not None and math.isfinite(x)] or [0.0, 1.0]
    scale = ticks(min(known), max(known))
    low, high = scale[0], scale[-1]
    width, height = _SIZE[0] - _LEFT - _RIGHT, _SIZE[1] - _TOP - _BOTTOM

    def x_of(index: float) -> float:
        return _LEFT + width * (index / (len(values) - 1) if len(values) > 1 else 0.5)

    def y_of(value: float) -> float:
        return _TOP + height * (high - value) / (high - low)

    pieces: list[list[Point]] = [[]]
    for index, value in enumerate(smooth(values)):
        if math.isnan(value):
            pieces.append([])
        else:
            pieces[-1].append((x_of(index), y_of(value)))
    dots = [(x_of(i), y_of(x)) for i, x in enumerate(values) if x is not None and math.isfinite(x)]
    numbers = (
        sorted({1, len(values)} | {round(t) for t in ticks(1, len(values)) if 1 < t < len(values)}) if values else []
    )
    if len(numbers) > 2 and numbers[-1] - numbers[-2] < (numbers[-2] - numbers[-3]) / 2:
        del numbers[-2]  # its label would touch the last one's
    return _Layout(
        dots,
        [piece for piece in pieces if piece],
        [(x_of(n - 1), str(n)) for n in numbers],
        [(y_of(t), _label(t)) for t in scale],
    )


def write_svg(
    path: str | os.PathLike[str], values: Values, *, title: str = "", ylabel: str = "reward", xlabel: str = "batch"
) -> None:
    """An SVG picture of the curve is at `path`: dots for the values, a line for their moving mean, axes."""
    layout, (width, height) = _layout(values), _SIZE
    right, bottom = width - _RIGHT, height - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for y, label in layout.y_ticks:
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for x, label in layout.x_ticks:
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{_INK}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{label}</text>')
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="{_INK}"/>')
    parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{_DOTS}"/>' for x, y in layout.dots)
    for piece in layout.lines:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="2.5"/>')
    middle = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle[0]:.0f}" y="{height - 12}" text-anchor="middle">{escape(xlabel)}</text>')
    turn = f'transform="rotate(-90 16 {middle[1]:.0f})"'
    parts.append(f'<text x="16" y="{middle[1]:.0f}" text-anchor="middle" {turn}>{escape(ylabel)}</text></svg>')
    Path(path).write_text("\n".join(parts) + "\n", encoding="utf-8")


def write_png(
    path: str | os.PathLike[str], values: Values, *, title: str = "", ylabel: str = "reward", xlabel: str = "batch"
) -> None:
    """A PNG picture of the curve is at `path`: the same as `write_svg`, drawn at twice the size."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise MissingDependency("pillow", "plot", "Writing a PNG") from error
    scale = 2
    layout, (width, height) = _layout(values), _SIZE
    right, bottom = width - _RIGHT, height - _BOTTOM
    image = Image.new("RGB", (width * scale, height * scale), "white")
    draw = ImageDraw.Draw(image)
    font, bold = ImageFont.load_default(12 * scale), ImageFont.load_default(15 * scale)
    for y, label in layout.y_ticks:
        _stroke(draw, [(_LEFT, y), (right, y)], _GRID, 1, scale)
        draw.text(((_LEFT - 8) * scale, y * scale), label, fill=_INK, font=font, anchor="rm")
    for x, label in layout.x_ticks:
        _stroke(draw, [(x, bottom), (x, bottom + 5)], _INK, 1, scale)
        draw.text((x * scale, (bottom + 8) * scale), label, fill=_INK, font=font, anchor="mt")
    _stroke(draw, [(_LEFT, _TOP), (_LEFT, bottom), (right, bottom)], _INK, 1, scale)
    for x, y in layout.dots:
        draw.ellipse([(x - 2) * scale, (y - 2) * scale, (x + 2) * scale, (y + 2) * scale], fill=_DOTS)
    for piece in layout.lines:
        _stroke(draw, piece, _LINE, 2.5, scale)
    middle = (_LEFT + right) / 2, (_TOP + bottom) / 2
    draw.text((_LEFT * scale, 26 * scale), title, fill=_INK, font=bold, anchor="ls")
    draw.text((middle[0] * scale, (height - 10) * scale), xlabel, fill=_INK, font=font, anchor="ms")
    side = Image.new("RGB", ((bottom - _TOP) * scale, 18 * scale), "white")
    ImageDraw.Draw(side).text((side.width / 2, side.height / 2), ylabel, fill=_INK, font=font, anchor="mm")
    image.paste(side.rotate(90, expand=True), (4 * scale, _TOP * scale))
    image.save(path, format="PNG")


def _stroke(draw: ImageDraw, points: list[Point], color: str, width: float, scale: int) -> None:
    draw.line([(x * scale, y * scale) for x, y in points], fill=color, width=round(width * scale), joint="curve")
