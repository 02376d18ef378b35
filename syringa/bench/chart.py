"""Render a chart of output tokens per second as a self-contained SVG."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from syringa.bench.report import Figure, Spread, Summary, format_number

_COLORS = ("#7d4fa3", "#3f7fb5", "#c9822b", "#5b8c5a", "#8a8a8a")
_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 90, 60
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


def write_chart(path: Path, summary: Summary, title: str, subtitle: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_chart(summary, title, subtitle), encoding="utf-8")


def render_chart(summary: Summary, title: str, subtitle: str = "") -> str:
    """Render grouped bars: one group per stream count, one bar per server with its value and range."""
    figures = [figure for figure in summary.figures if figure.key.startswith("tokens_per_second")]
    top, step = axis_scale(max((value.high for figure in figures for value in figure.values.values()), default=1.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fdfcfa"/>',
        _text(_LEFT, 30, title, size=18, weight=600),
        _text(_LEFT, 50, subtitle, size=12, color="#666"),
        *_legend(summary),
        *_axis(top, step),
    ]
    for index, figure in enumerate(figures):
        parts += _group(summary.servers, figure, index, len(figures), top)
    middle = _TOP + _PLOT_HEIGHT / 2
    axis_title = _text(18, middle, "output tokens per second", size=12, color="#666", anchor="middle")
    parts.append(f'<g transform="rotate(-90 18 {middle:.1f})">{axis_title}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(summary: Summary) -> list[str]:
    parts: list[str] = []
    x = float(_LEFT)
    for index, server in enumerate(summary.servers):
        label = f"{server} ({summary.precisions[server]})" if summary.precisions[server] else server
        parts.append(f'<rect x="{x:.1f}" y="62" width="11" height="11" rx="2" fill="{_color(index)}"/>')
        parts.append(_text(x + 16, 72, label, size=12))
        x += 36 + 6.3 * len(label)
    return parts


def _axis(top: float, step: float) -> list[str]:
    parts: list[str] = []
    for index in range(round(top / step) + 1):
        value = index * step
        y = _y(value, top)
        color = "#999" if index == 0 else "#e4e0da"
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:,.0f}", size=11, color="#666", anchor="end"))
    return parts


def _group(servers: list[str], figure: Figure, index: int, groups: int, top: float) -> list[str]:
    group_width = _PLOT_WIDTH / groups
    bar = min(56.0, group_width * 0.8 / len(servers))
    start = _LEFT + group_width * (index + 0.5) - bar * len(servers) / 2
    parts: list[str] = []
    for position, server in enumerate(servers):
        if value := figure.values.get(server):
            parts += _bar(start + position * bar, bar, value, top, _color(position), f"{server}, {figure.title}")
    label = _text(_LEFT + group_width * (index + 0.5), _HEIGHT - _BOTTOM + 24, figure.title, size=13, anchor="middle")
    return [*parts, label]


def _bar(x: float, width: float, value: Spread, top: float, color: str, description: str) -> list[str]:
    y, bottom = _y(value.median, top), _y(0, top)
    center = x + width / 2
    label = f"{format_number(value.median)} tok/s"
    parts = [
        f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{bottom - y:.1f}" rx="2" fill="{color}">'
        f"<title>{escape(description)}: {label}</title></rect>"
    ]
    if value.count > 1:
        low, high = _y(value.low, top), _y(value.high, top)
        whisker = f"M{center:.1f} {low:.1f}V{high:.1f}M{center - 4:.1f} {high:.1f}h8M{center - 4:.1f} {low:.1f}h8"
        parts.append(f'<path d="{whisker}" stroke="#333" stroke-opacity="0.6" fill="none"/>')
    above = _y(value.high, top) - 5
    return [*parts, _text(center, above, format_number(value.median), size=11, anchor="middle")]


def _text(
    x: float, y: float, text: str, *, size: int, color: str = "#222", anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def axis_scale(highest: float) -> tuple[float, float]:
    """Return the end of the axis and the distance of its lines: 1, 2 or 5 times a power of ten."""
    magnitude = 10.0 ** math.floor(math.log10(max(highest, 1e-9)))
    step = next(magnitude * part for part in (0.2, 0.5, 1.0, 2.0) if highest / (magnitude * part) <= 7)
    return step * (math.floor(highest / step) + 1), step


def _y(value: float, top: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - value / top)


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
