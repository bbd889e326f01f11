"""Line charts: in the terminal as text, or as PNG or SVG with matplotlib (the `plot` extra).

A chart is its series, `{"name": [(x, y), ...]}`, with axes that may be logarithmic.

    print(chart({"roof": [(1, 8e11), (240, 2e14), (1e4, 2e14)]}, xlabel="FLOPs/byte", ylabel="FLOPs/s"))
    save("roof.png", series, xlabel=..., ylabel=..., points={"matmul": [(100, 5e13)]})
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

GLYPHS = "*o+x#@%&=~"
Series = Mapping[str, Sequence[tuple[float, float]]]


def check(series: Series, log: bool) -> list[tuple[float, float]]:
    """All points of all series; ValueError if there are none, or if one cannot be drawn."""
    every = [point for points in series.values() for point in points]
    if not every:
        raise ValueError("nothing to draw: give at least one point")
    for x, y in every:
        if not (math.isfinite(x) and math.isfinite(y)) or (log and (x <= 0 or y <= 0)):
            raise ValueError(f"the point ({x}, {y}) cannot be drawn{' on logarithmic axes' if log else ''}")
    return every


def chart(
    series: Series, xlabel="", ylabel="", title="", width=72, height=18, log=True, points: Series | None = None
) -> str:
    """The chart as text. `series` are joined by lines; `points` stand alone. Later ones are drawn over earlier ones."""
    points = points or {}
    if len(series) + len(points) > len(GLYPHS):
        raise ValueError(f"{len(series) + len(points)} series: a text chart tells {len(GLYPHS)} apart")
    scale = math.log10 if log else float
    every = [(scale(x), scale(y)) for x, y in check({**series, **points}, log)]
    (x0, x1), (y0, y1) = (bounds([p[i] for p in every]) for i in (0, 1))
    rows = [[" "] * width for _ in range(height)]

    def put(x: float, y: float, glyph: str) -> None:
        column, row = (x - x0) / (x1 - x0) * (width - 1), (y - y0) / (y1 - y0) * (height - 1)
        rows[height - 1 - round(row)][round(column)] = glyph

    for glyph, line in zip(GLYPHS, series.values(), strict=False):
        line = sorted((scale(x), scale(y)) for x, y in line)
        for (xa, ya), (xb, yb) in zip(line, line[1:] or line, strict=False):
            steps = 2 * max(1, round((xb - xa) / (x1 - x0) * width), round(abs(yb - ya) / (y1 - y0) * height))
            for i in range(steps + 1):
                put(xa + (xb - xa) * i / steps, ya + (yb - ya) * i / steps, glyph)
    for glyph, alone in zip(GLYPHS[len(series) :], points.values(), strict=False):
        for x, y in alone:
            put(scale(x), scale(y), glyph)

    unscale = (lambda v: 10**v) if log else float
    ticks = {0: unscale(y1), height // 2: unscale((y0 + y1) / 2), height - 1: unscale(y0)}
    lines = [f"{format(ticks[i], '9.3g') if i in ticks else '':>9} |{''.join(row)}" for i, row in enumerate(rows)]
    left, middle, right = (f"{unscale(x):.3g}" for x in (x0, (x0 + x1) / 2, x1))
    axis = f"{left:<{width // 3}}{middle:^{width - 2 * (width // 3)}}{right:>{width // 3}}"
    legend = "   ".join(f"{glyph} {name}" for glyph, name in zip(GLYPHS, [*series, *points], strict=False))
    head = [title] if title else []
    head += [f"{ylabel} against {xlabel}"] if xlabel or ylabel else []
    return "\n".join([*head, *lines, " " * 10 + "+" + "-" * width, " " * 11 + axis, " " * 11 + legend])


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis, never of length zero."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def save(
    path: str | Path, series: Series, xlabel="", ylabel="", title="", log=True, points: Series | None = None
) -> Path:
    """Writes the chart to a file, PNG or SVG by its name; RuntimeError without matplotlib."""
    points = points or {}
    check({**series, **points}, log)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("pictures need matplotlib: pip install 'scaling[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, line in series.items():
        axes.plot(*zip(*sorted(line), strict=True), label=name)
    for name, alone in points.items():
        axes.plot(*zip(*alone, strict=True), "o", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, **({"xscale": "log", "yscale": "log"} if log else {}))
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return Path(path)
