"""One layer of a layout in time: what its passes compute and send, and which communication they hide.

The times are forecasts, for one microbatch in the middle of a step, with equal layers before and after. If a layer
waits for a collective, the share that the chip hides runs behind the matmul whose operand it gathers, or whose result
it scatters. Collectives of weights run behind all of a layer, and the next layer waits for its own weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaling.plan.evaluate import Estimate, layer_between, layer_products, matmul_passes, reached_rates
from scaling.plan.job import AXES
from scaling.plan.ledger import BACKWARD, FORWARD, REGATHERED, copied
from scaling.show import bars, svg
from scaling.show.bars import Bar

COLOURS = {
    "compute": "#5fc7b0", "tensor": "#f5a45d", "context": "#c58fe0", "expert": "#e07a8b", "fsdp": "#86aef0",
    "data": "#86cf7f",
}  # fmt: skip
BEFORE = 6  # layers until each is like the next


@dataclass(frozen=True)
class Operation:
    """One operation of a layer.

    Attributes:
        lane: The lane that it occupies.
        name: Its name in the chart.
        seconds: How long it takes.
        waits: Whether the next operation waits for it. Otherwise it runs behind the layer.
        hidden: The share of it that runs behind a matmul: the next one if it `feeds` that, else the one before.
        ahead: Whether the next layer needs it, if nothing in this layer waits for it.
    """

    lane: str
    name: str
    seconds: float
    waits: bool = True
    hidden: float = 0.0
    ahead: bool = False

    @property
    def feeds(self) -> bool:
        """Whether the next matmul needs the operation's result."""
        return self.name.startswith(("AG", "dispatch"))


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of a layer: the operations in it, and how long it takes."""

    name: str
    seconds: float
    bars: tuple[Bar, ...]

    @property
    def lanes(self) -> list[str]:
        """The lanes that are used, computing first."""
        return ["compute", *(axis for axis in AXES[::-1] if any(bar.row == axis for bar in self.bars))]

    @property
    def in_rows(self) -> list[Bar]:
        """The bars, lane by lane."""
        return sorted(self.bars, key=lambda bar: (self.lanes.index(bar.row), bar.start))

    @property
    def hidden(self) -> dict[str, float]:
        """The share of each axis's seconds in which the chip computes."""
        busy, found = [bar for bar in self.bars if bar.row == "compute"], {}
        for axis in self.lanes[1:]:
            mine = [bar for bar in self.bars if bar.row == axis]
            both = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in mine for b in busy)
            found[axis] = both / sum(bar.seconds for bar in mine)
        return found


def play(name: str, layer: list[Operation]) -> Pass:
    """Simulate a pass through BEFORE equal layers, and return the last of them with times from its own start.

    By then each layer takes as long as the one before.
    """
    ran, free, now, ready, fed, start = [], {}, 0.0, 0.0, 0.0, 0.0
    for _ in range(BEFORE):
        start = now = max(now, ready)
        for op in layer:
            early = 0.0 if op.feeds else op.hidden * op.seconds
            begin = max(free.get(op.lane, 0.0), now - early)
            end = free[op.lane] = begin + op.seconds
            ran.append(Bar(op.lane, op.name, begin, end, op.lane))
            if op.ahead:
                ready = end
            elif op.waits and op.feeds:
                now, fed = max(now, end - op.hidden * op.seconds), end
            elif op.waits:
                now = max(now, end, fed)
    now = max(now, ready)
    seen = (replace(bar, start=max(bar.start, start) - start, end=min(bar.end, now) - start) for bar in ran)
    return Pass(name, now - start, tuple(bar for bar in seen if bar.seconds > 1e-9 * (now - start)))


def layer_passes(found: Estimate) -> tuple[Pass, ...]:
    """Return a layer's forward and backward pass, with seconds as in `evaluate.forecast`.

    Collectives that overlap take cores, so computing is slower by as much.
    """
    job, l, c, chip = found.job, found.layout, found.compute, found.network.chip
    w, rate, layers = job.work, chip.efficiency, float(c.layers)
    _, kernel, bandwidth = reached_rates(job, chip)
    linear = float(layer_products(job, chip, c, l)) / layers
    matmuls = matmul_passes(job, linear, float(c.read) / layers / bandwidth)
    scores, between = float(c.dots) / layers / kernel, float(layer_between(job, chip, c, l)) / layers
    kv = w.kv * (float(copied(w, l)) - 1)
    attention = (w.projections + kv) / (w.dense + kv + w.routed)  # the share of attention's matrices
    into = (w.heads + 2 * w.kv_heads) / (2 * (w.heads + w.kv_heads))  # the share of Q, K and V in it
    shares = {"QKV": attention * into, "O": attention * (1 - into)}
    shares |= {"up": (1 - attention) * w.up, "down": (1 - attention) * (1 - w.up)}
    sent, hidden, slower = {}, {}, [0.0, 0.0]
    for entry in found.entries:
        seconds, hides = float(entry.over.forecast(entry.nbytes, rate)), float(entry.hides(chip, l))
        sent.setdefault((entry.lane, bool(entry.ways[0])), seconds)  # the layers' weights come before the vocabulary
        hidden[entry.lane] = hides
        if entry.kind in ("critical", "ahead"):
            busy = rate.cores * seconds * (hides if entry.kind == "critical" else 1) / layers / l.microbatches
            slower = [so_far + float(count) * busy for so_far, count in zip(slower, entry.ways, strict=True)]

    def computing(name: str, way: int) -> float:
        if name == "scores":
            return scores * (1 + way * (1 + (l.remat in ("attention", "matmuls"))))
        return matmuls[way] * shares[name] + (1 + way) / 4 * between

    def operations(way: int, mark: str = "") -> Iterator[Operation]:
        for line in (FORWARD, BACKWARD)[way]:
            axis, name = line.split(": ")
            if axis == "compute":
                yield Operation(axis, name + mark, computing(name, way))
            elif (axis, True) in sent and (line != REGATHERED or l.remat == "matmuls"):
                yield Operation(axis, name + mark, sent[axis, True], hidden=hidden[axis])

    def weights(text: str, gathered: bool) -> Iterator[Operation]:
        for lane, mark in (("weights", "W"), ("experts", "W of experts")):
            if (lane, gathered) in sent:
                yield Operation("fsdp", text.format(mark), sent[lane, gathered], waits=False, ahead=gathered)

    gathers = list(weights("AG {} of the next layer", True))
    again = operations(0, "'") if l.remat == "block" else ()
    scatters = weights("RS d{}", False) if l.reduce == "each" or l.microbatches == 1 else ()
    passes = []
    for name, ops, busy in zip(
        ("forward", "backward"),
        ([*gathers, *operations(0)], [*gathers, *again, *operations(1), *scatters]), slower, strict=True,
    ):  # fmt: skip
        factor = 1 + busy / sum(op.seconds for op in ops if op.lane == "compute")
        ops = [replace(op, seconds=op.seconds * factor) if op.lane == "compute" else op for op in ops]
        passes.append(play(name, ops))
    return tuple(passes)


def layer_chart(passes: tuple[Pass, ...]) -> str:
    """Return the passes as text: a row for each lane, time to the right, dots where nothing runs."""
    lines = []
    for part in passes:
        shares = ", ".join(f"{axis} {share:.0%}" for axis, share in part.hidden.items())
        drawn = [replace(bar, row=f"  {bar.row:7}", label=f"|{bar.label}") for bar in part.in_rows]
        lines += [
            f"{part.name}: {1e3 * part.seconds:.3g} ms a layer and microbatch",
            bars.text(drawn, 84, part.seconds),
        ]
        lines.append(f"  behind computing: {shares or 'nothing is sent'}")
    return "\n".join(lines)


def svg_of(passes: tuple[Pass, ...], title: str) -> str:
    """Return the passes as an SVG, in milliseconds."""
    lines = []
    for part in passes:
        drawn = [replace(bar, start=1e3 * bar.start, end=1e3 * bar.end) for bar in part.in_rows]
        lines.append((f"{title}: {part.name}, {1e3 * part.seconds:.3g} ms a layer and microbatch", drawn))
    return svg.time_lines(lines, COLOURS, "in ms")


def as_dict(part: Pass) -> dict:
    """Return a pass as data, in seconds."""
    drawn = [{"lane": b.row, "name": b.label, "start": b.start, "end": b.end} for b in part.bars]
    return {"pass": part.name, "seconds": part.seconds, "hidden": part.hidden, "bars": drawn}
