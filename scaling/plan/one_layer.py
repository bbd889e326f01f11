"""One layer of a layout in time: what its passes compute and send, and which communication they hide.

The times are forecasts, for one microbatch in the middle of a step, with equal layers before and after. If a layer
waits for a collective, the share that the chip hides runs behind the matmul whose operand it gathers, or whose result
it scatters. Collectives of weights run behind all of a layer, and the next layer waits for its own weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaling.plan.evaluate import Estimate, layer_between, layer_products, matmul_passes, reached_rates
from scaling.plan.job import AXES
from scaling.plan.ledger import copied
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
    """Simulate BEFORE copies of a layer, so that the last is like all later ones; return it, timed from its start."""
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


def layer_passes(found: Estimate) -> tuple[Pass, Pass]:
    """Return a layer's forward and backward pass."""
    forward, backward = _Layer(found).passes()
    return play("forward", forward), play("backward", backward)


class _Layer:
    """The operations of a layer in their order, with seconds as in `evaluate.forecast`."""

    def __init__(self, found: Estimate):
        job = found.job
        w, l, c, chip = job.work, found.layout, found.compute, found.network.chip
        rate, layers = chip.efficiency, float(c.layers)
        self.work, self.layout = w, l
        _, kernel, bandwidth = reached_rates(job, chip)
        linear = float(layer_products(job, chip, c, l)) / layers
        self.linear = matmul_passes(job, linear, float(c.read) / layers / bandwidth)
        self.scores = float(c.dots) / layers / kernel
        self.between = float(layer_between(job, chip, c, l)) / layers
        kv = w.kv * (float(copied(w, l)) - 1)
        self.attention = (w.projections + kv) / (w.dense + kv + w.routed)  # the share of attention's matrices
        self.into = (w.heads + 2 * w.kv_heads) / (2 * (w.heads + w.kv_heads))  # the share of Q, K and V in it
        self.sent, self.hidden, self.slower = {}, {}, [0.0, 0.0]
        for entry in found.entries:
            seconds, hides = float(entry.over.forecast(entry.nbytes, rate)), float(entry.hides(chip, l))
            what = entry.lane if entry.forward else f"gradients of {entry.lane}"
            self.sent.setdefault(what, seconds)  # of weights, the layers' come first, then the vocabulary's
            self.hidden[entry.lane] = hides
            if entry.kind in ("critical", "ahead"):
                busy = rate.cores * seconds * (hides if entry.kind == "critical" else 1) / layers / l.microbatches
                for way, count in enumerate(entry.ways):
                    self.slower[way] += float(count) * busy

    def passes(self) -> tuple[list[Operation], list[Operation]]:
        """Return the operations (forward, backward).

        Collectives that overlap take cores, so computing is slower by as much.
        """
        found = list(self.forward()), list(self.backward())
        for i, ops in enumerate(found):
            computing = sum(op.seconds for op in ops if op.lane == "compute")
            factor = 1 + self.slower[i] / computing
            ops[:] = [Operation("compute", op.name, op.seconds * factor) if op.lane == "compute" else op for op in ops]
        return found

    def wait(self, axis: str, name: str) -> Iterator[Operation]:
        """Yield a collective that the layer waits for, if the axis has one."""
        if axis in self.sent:
            yield Operation(axis, name, self.sent[axis], hidden=self.hidden[axis])

    def weights(self, what: str, ahead: bool) -> Iterator[Operation]:
        """Yield the collectives of weights, or of their gradients."""
        for lane, mark in (("weights", "W"), ("experts", "W of experts")):
            if lane in self.sent:
                seconds = self.sent[lane if ahead else f"gradients of {lane}"]
                yield Operation("fsdp", what.format(mark), seconds, waits=False, ahead=ahead)

    def compute(self, name: str, matmuls: float, passes: float) -> Iterator[Operation]:
        """Yield a matmul with the operations around it."""
        yield Operation("compute", name, matmuls + passes * self.between)

    def forward(self, mark: str = "") -> Iterator[Operation]:
        """Yield the operations of the forward pass; `mark` names the recomputed ones."""
        w, linear = self.work, self.linear[0]
        half = 0.5 if w.projections else 1.0  # of the passes through memory, an MLP's
        if not mark:
            yield from self.weights("AG {} of the next layer", ahead=True)
        if w.projections:
            yield from self.wait("tensor", "AG In" + mark)
            yield from self.compute("QKV" + mark, linear * self.attention * self.into, 0.25)
            yield from self.wait("context", "AG K, V" + mark)
            yield Operation("compute", "scores" + mark, self.scores)
            yield from self.compute("O" + mark, linear * self.attention * (1 - self.into), 0.25)
            yield from self.wait("tensor", "RS Out" + mark)
        mlp = linear * (1 - self.attention)
        yield from self.wait("expert", "dispatch" + mark)
        yield from self.wait("tensor", "AG In" + mark)
        yield from self.compute("up" + mark, mlp * w.up, half / 2)
        yield from self.compute("down" + mark, mlp * (1 - w.up), half / 2)
        yield from self.wait("tensor", "RS Out" + mark)
        yield from self.wait("expert", "combine" + mark)

    def backward(self) -> Iterator[Operation]:
        """Yield the operations of the backward pass."""
        w, l, linear = self.work, self.layout, self.linear[1]
        half = 0.5 if w.projections else 1.0
        mlp, attention = linear * (1 - self.attention), linear * self.attention
        regathers = l.remat == "matmuls"
        scattered = list(self.weights("RS d{}", ahead=False)) if l.reduce == "each" or l.microbatches == 1 else []
        yield from self.weights("AG {} of the next layer", ahead=True)
        if l.remat == "block":
            yield from self.forward("'")
        yield from self.wait("expert", "dispatch dOut")
        yield from self.wait("tensor", "AG dOut")
        yield from self.compute("down", mlp * (1 - w.up), half)
        yield from self.wait("tensor", "AG In") if regathers else ()
        yield from self.compute("up", mlp * w.up, half)
        yield from self.wait("tensor", "RS dIn")
        yield from self.wait("expert", "combine dIn")
        if w.projections:
            yield from self.wait("tensor", "AG dOut")
            yield from self.compute("O", attention * (1 - self.into), 0.5)
            yield from self.wait("context", "AG K, V")
            yield Operation("compute", "scores", (3 if l.remat in ("attention", "matmuls") else 2) * self.scores)
            yield from self.wait("context", "RS dK, dV")
            yield from self.wait("tensor", "AG In") if regathers else ()
            yield from self.compute("QKV", attention * self.into, 0.5)
            yield from self.wait("tensor", "RS dIn")
        yield from scattered


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
