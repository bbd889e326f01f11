"""Draw line charts, as text in the terminal, or as PNG or SVG with matplotlib (the `plot` extra).

A chart has series, `{"name": [(x, y), ...]}`, on axes that may be logarithmic. `marks` are thresholds, drawn as lines
across the chart: `("x", 240, "C/W = 240")` is vertical, `("y", 1, "")` horizontal.

    print(chart({"roof": [(1, 8e11), (240, 2e14), (1e4, 2e14)]}, xlabel="FLOPs/byte", ylabel="FLOPs/s"))
    figure(series, xlabel=..., ylabel=..., points={"matmul": [(100, 5e13)]}, marks=[("x", 240, "C/W")]).savefig("a.png")
"""

import math
from collections.abc import Mapping, Sequence

GLYPHS = "*o+x#@%&=~"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#8b5a2b")  # Okabe, Ito
Series = Mapping[str, Sequence[tuple[float, float]]]
PointLabels = Sequence[tuple[str, float, str]]
MARGIN = 10  # columns at the left of a text chart


def _check(series: Series, log: tuple[bool, bool]) -> list[tuple[float, float]]:
    """Return all points of all series; ValueError if there are none, or if one cannot be drawn."""
    every = [point for points in series.values() for point in points]
    if not every:
        raise ValueError("nothing to draw\n  fix: give at least one point")
    for x, y in every:
        if not (math.isfinite(x) and math.isfinite(y)) or (log[0] and x <= 0) or (log[1] and y <= 0):
            raise ValueError(
                f"the point ({x}, {y}) cannot be drawn{' on logarithmic axes' if any(log) else ''}"
                "\n  fix: draw finite numbers, above 0 on a logarithmic axis"
            )
    return every


def logarithmic(log: bool | str) -> tuple[bool, bool]:
    """Return whether x and y are logarithmic axes, by `log`: `True`, `False`, "x" or "y"."""
    return (log, log) if isinstance(log, bool) else ("x" in log, "y" in log)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis, whose length is never zero."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Return round values between the ends of an axis, decades if logarithmic, else 1, 2 or 5 times a power of 10.

    If there are many decades, only every second, third, ... one is returned; if there are fewer than two, 2 and 5 times
    the decades are returned too.
    """
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last - first < 1:
            every = [m * 10.0**e for e in range(first - 1, last + 2) for m in (1, 2, 5)]
            return [tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        step = -(-(last - first + 1) // most)
        return [10.0**e for e in range(first, last + 1) if e % step == 0]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_label(value: float) -> str:
    """Format a tick: 0.01, 1, 500, 2000, 1e4, 2e14."""
    if value == 0 or 1e-3 < abs(value) < 9999:
        return f"{value:.10g}"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def chart(
    series: Series, xlabel: str = "", ylabel: str = "", title: str = "", width: int = 72, height: int = 18,
    log: bool | str = True, points: Series | None = None, marks: PointLabels = (),
) -> str:  # fmt: skip
    """Draw the chart as text of `width` columns, with a margin of 11.

    The values of each of `series` are joined by lines; those of `points` are not. Later series are drawn over earlier
    ones, and all of them over the `marks`. `log` names the logarithmic axes: True (both), False, "x" or "y".
    """
    points, logs = points or {}, logarithmic(log)
    if len(series) + len(points) > len(GLYPHS):
        raise ValueError(
            f"{len(series) + len(points)} series: a text chart tells {len(GLYPHS)} apart"
            "\n  fix: draw fewer at a time, or use --plot"
        )
    sx, sy = (math.log10 if axis else float for axis in logs)
    every = _check({**series, **points}, logs)
    x0, x1 = bounds([sx(x) for x, _ in every])
    y0, y1 = bounds([sy(y) for _, y in every])
    rows = [[" "] * width for _ in range(height)]

    def column(x: float) -> int:
        return round((x - x0) / (x1 - x0) * (width - 1))

    def row(y: float) -> int:
        return height - 1 - round((y - y0) / (y1 - y0) * (height - 1))

    named = []  # the marks' entries in the legend
    for axis, value, text in marks:
        inside = x0 <= sx(value) <= x1 if axis == "x" else y0 <= sy(value) <= y1
        named += [f"{':' if axis == 'x' else '-'} {text}{'' if inside else ' (off the chart)'}"] if text else []
        if not inside:
            continue
        if axis == "x":
            for line in rows:
                line[column(sx(value))] = ":"
        else:
            rows[row(sy(value))][:] = ["-" if cell == " " else cell for cell in rows[row(sy(value))]]
    for glyph, line in zip(GLYPHS, series.values(), strict=False):
        line = sorted((sx(x), sy(y)) for x, y in line)
        for (xa, ya), (xb, yb) in zip(line, line[1:] or line, strict=False):
            steps = 2 * max(1, column(xb) - column(xa), abs(row(yb) - row(ya)))
            for i in range(steps + 1):
                rows[row(ya + (yb - ya) * i / steps)][column(xa + (xb - xa) * i / steps)] = glyph
    for glyph, alone in zip(GLYPHS[len(series) :], points.values(), strict=False):
        for x, y in alone:
            rows[row(sy(y))][column(sx(x))] = glyph

    xs, ys = [[10**v if axis else v for v in ends] for axis, ends in zip(logs, ((x0, x1), (y0, y1)), strict=True)]
    left = {row(sy(tick)): tick_label(tick) for tick in ticks(ys[0], ys[1], logs[1], height // 2)}
    lines = [f"{left.get(i, ''):>{MARGIN - 1}} |{''.join(line)}".rstrip() for i, line in enumerate(rows)]
    below, labels = ["-"] * width, [" "] * (width + MARGIN + 1)
    for tick in ticks(xs[0], xs[1], logs[0], width // 8):
        centre, text = column(sx(tick)), tick_label(tick)
        start = max(0, min(width + MARGIN + 1 - len(text), centre + MARGIN + 1 - len(text) // 2))
        if not "".join(labels[max(0, start - 1) : start + len(text) + 1]).strip():
            below[centre] = "+"
            labels[start : start + len(text)] = text
    head = [title] if title else []
    head += [f"{ylabel} against {xlabel}"] if xlabel or ylabel else []
    legend = [f"{glyph} {name}" for glyph, name in zip(GLYPHS, [*series, *points], strict=False)]
    text = [*head, *lines, " " * MARGIN + "+" + "".join(below), "".join(labels).rstrip()]
    return "\n".join(text + flowed(legend + named, " " * (MARGIN + 1), width + MARGIN + 1))


def flowed(entries: Sequence[str], indent: str, columns: int) -> list[str]:
    """Return the entries of a legend next to each other, on as many lines as they need."""
    lines = [indent]
    for entry in entries:
        gap = "   " if lines[-1].strip() else ""
        if gap and len(lines[-1]) + len(gap) + len(entry) > columns:
            lines.append(indent)
            gap = ""
        lines[-1] += gap + entry
    return lines


def blank(width: float, height: float):
    """Return a matplotlib Figure without a window, of this size in inches; ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib\n  fix: pip install 'scaling-book-torch[plot]'") from error
    picture = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(picture)
    return picture


def figure(
    series: Series, xlabel: str = "", ylabel: str = "", title: str = "", log: bool | str = True,
    points: Series | None = None, marks: PointLabels = (),
):  # fmt: skip
    """Return the chart as a matplotlib Figure; ImportError without matplotlib."""
    points, logs = points or {}, logarithmic(log)
    every = _check({**series, **points}, logs)
    picture = blank(8, 5)
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes = picture.subplots()
    for i, (name, line) in enumerate(series.items()):
        axes.plot(*zip(*sorted(line), strict=True), label=name, color=COLOURS[i % len(COLOURS)], linewidth=2)
    for i, (name, alone) in enumerate(points.items(), len(series)):
        axes.plot(*zip(*alone, strict=True), "o", label=name, color=COLOURS[i % len(COLOURS)], zorder=3)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontsize=11)
    for n, (axis, scale) in enumerate(((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale))):
        if logs[n]:
            scale("log")
            low, high = bounds([point[n] for point in every])
            decades = math.log10(high / low) if low > 0 else 0
            low, high = (low, high) if decades else (low / 2, high * 2)
            (axes.set_xlim if n == 0 else axes.set_ylim)(low / 10 ** (decades / 40), high * 10 ** (decades / 25))
            axis.set_major_locator(FixedLocator(ticks(low, high, True, 9)))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))
    rules = [
        (axes.axvline if axis == "x" else axes.axhline)(value, color="#777777", linestyle="--", linewidth=1, zorder=0)
        for axis, value, _ in marks
    ]
    longest = max(map(len, [*series, *points]))
    picture.legend(loc="outside lower left", ncols=max(1, 96 // (longest + 8)), frameon=False, fontsize=9)
    picture.draw_without_rendering()
    for rule, mark in zip(rules, marks, strict=True):
        name_mark(axes, rule, *mark)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def name_mark(axes, rule, axis: str, value: float, text: str) -> None:
    """Write a mark's name along its line, at the first position where it meets no curve, point or other name."""
    lines = [line.get_transform().transform_path(line.get_path()) for line in axes.lines if line is not rule]
    taken = [line.interpolated(99).vertices for line in lines]
    names = [other.get_window_extent() for other in axes.texts]
    if axis == "x":
        across, turn = axes.get_xaxis_transform(), {"rotation": 90, "va": "bottom"}
        places = [((value, height), {"ha": side}) for height in (0.02, 0.35, 0.65) for side in ("right", "left")]
    else:
        across, turn = axes.get_yaxis_transform(), {"ha": "right"}
        places = [((end, value), {"va": side}) for end in (0.99, 0.6, 0.3) for side in ("bottom", "top")]
    for place, side in [*places, places[0]]:
        aside = {"right": (-2, 0), "left": (2, 0), "bottom": (0, 1), "top": (0, -1)}[next(iter(side.values()))]
        label = axes.annotate(
            text, place, aside, color="#555555", fontsize=9, xycoords=across, textcoords="offset points", **turn, **side
        )
        extent = label.get_window_extent()
        inside = axis == "y" or extent.y1 <= axes.get_window_extent().y1
        if inside and not extent.count_overlaps(names) and not any(extent.count_contains(points) for points in taken):
            return
        label.remove()
    axes.add_artist(label)  # no position is free, so the name is at the first one
