"""A step as a count of typed lines, and the seconds that it takes on a chip: one roofline for all forecasts.

A `CountedStep` comes from a run of the step's own code on an abstract mesh (`scaling.trace.count`). It is linear in the
number of layers and of microbatches, so a few small runs determine the counts of a large one (`weighted_sum`). `price`
puts it on a chip: its FLOPs, its bytes through memory, and its collectives over each axis's links.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from scaling.cost import lanes
from scaling.hardware import Chip, Measured

WORK = ("products", "scaled", "reads", "attention", "plain", "curved")  # the kinds of work in a CountedStep


class LineKind(NamedTuple):
    """A kind of collective: its operation, its mesh axes and the dtype of its elements.

    If it is started `ahead` of the use of its result, it is not on the critical path.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    ahead: bool


class Calls(NamedTuple):
    """The totals of all calls of one kind in a step.

    `number` counts the calls. `amount` is their FLOPs or bytes (of collectives V), and `sent` the bytes a rank sends.
    """

    number: float = 0
    amount: float = 0
    sent: float = 0

    def and_more(self, amount: float, sent: float = 0, number: float = 1) -> "Calls":
        """Return these totals with further calls added."""
        return Calls(self.number + number, self.amount + amount, self.sent + sent)


NONE = Calls()


@dataclass(frozen=True)
class CountedStep:
    """The work and memory of a step on one rank.

    Attributes:
        products: FLOPs of matmuls.
        scaled: FLOPs of matmuls of 8-bit floats with scales, by a GPU's kernel.
        reads: Bytes of the operands and results of both.
        attention: FLOPs of attention's kernels and blocks.
        plain: Bytes that other operations read and write.
        curved: Bytes that operations with a transcendental function read and write.
        lines: The collectives.
        params: Bytes of the params.
        state: Bytes of the optimizer's state.
        peaks: The most bytes at once in addition to params and state, by the typed line that ran last.
    """

    products: Calls = NONE
    scaled: Calls = NONE
    reads: Calls = NONE
    attention: Calls = NONE
    plain: Calls = NONE
    curved: Calls = NONE
    lines: Mapping[LineKind, Calls] = field(default_factory=dict)
    params: float = 0
    state: float = 0
    peaks: Mapping[str, float] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.products.amount + self.scaled.amount + self.attention.amount

    @property
    def step(self) -> float:
        """The most bytes at once in addition to params and state."""
        return max(self.peaks.values(), default=0)

    @property
    def memory(self) -> float:
        """The most bytes at once."""
        return self.params + self.state + self.step

    @property
    def sent(self) -> float:
        """The bytes that a rank sends."""
        return sum(calls.sent for calls in self.lines.values())

    @property
    def collectives(self) -> float:
        """The number of collectives."""
        return sum(calls.number for calls in self.lines.values())

    def by_axes(self) -> dict[str, Calls]:
        """Return the collectives by the axes that they run over, such as "XY"."""
        found: dict[str, Calls] = {}
        for line, calls in self.lines.items():
            name = "".join(line.axes)
            found[name] = found.get(name, NONE).and_more(calls.amount, calls.sent, calls.number)
        return found


def weighted_sum(parts: Iterable[tuple[float | Fraction, CountedStep]]) -> CountedStep:
    """Return the sum of steps, each times its weight.

    Memory is linear only at a fixed line of a step. The line of the overall peak may change with the number of layers,
    so the peak of each line is summed separately.
    """
    parts = list(parts)

    def total(found: Iterable[tuple[Any, float]]) -> float:
        number = sum(times * one for times, one in found)
        return int(number) if number == int(number) else float(number)

    def calls(found: Iterable[tuple[Any, Calls]]) -> Calls:
        found = list(found)
        return Calls(*(total((times, one[i]) for times, one in found) for i in range(3)))

    lines = dict.fromkeys(line for _, step in parts for line in step.lines)
    every = {line: calls((times, step.lines.get(line, NONE)) for times, step in parts) for line in lines}
    work: dict[str, Any] = {name: calls((times, getattr(step, name)) for times, step in parts) for name in WORK}
    for name in ("params", "state"):
        work[name] = total((times, getattr(step, name)) for times, step in parts)
    common = [line for line in parts[0][1].peaks if all(line in step.peaks for _, step in parts)]
    peaks = {line: total((times, step.peaks[line]) for times, step in parts) for line in common}
    return CountedStep(**work, lines=every, peaks=peaks)


class PricedLine(NamedTuple):
    """The collectives of one kind in a step, and the seconds that they take."""

    kind: LineKind
    calls: Calls
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of the products, of the work between them, and of each kind of collective."""

    math: float
    between: float
    lines: tuple[PricedLine, ...] = ()

    @property
    def comms(self) -> dict[str, float]:
        """Seconds of the collectives by mesh axes."""
        found: dict[str, float] = {}
        for line in self.lines:
            axes = "".join(line.kind.axes)
            found[axes] = found.get(axes, 0.0) + line.seconds
        return found

    @property
    def ahead(self) -> float:
        """Seconds of the collectives that are not on the critical path."""
        return sum(line.seconds for line in self.lines if line.kind.ahead)

    @property
    def own(self) -> float:
        """Seconds that do not depend on other ranks."""
        return self.math + self.between

    @property
    def total(self) -> float:
        """Seconds without overlap, as on CPUs, where the core that computes also moves the bytes."""
        return self.own + sum(line.seconds for line in self.lines)

    @property
    def overlapped(self) -> float:
        """Seconds when collectives that are started ahead hide behind the rest."""
        waited = self.total - self.ahead
        return max(waited, self.ahead)


def price(
    step: CountedStep, sizes: Mapping[str, int], chip: Chip, dtype: str = "fp32", shape: Sequence[int] = ()
) -> Prediction:
    """Return the seconds of a step on a mesh.

    They come from the measurements in the chip file; without any, from the shares of its peaks that the chip reaches.

    Args:
        step: The counted step.
        sizes: The sizes of the mesh's axes, outermost first (unlike `lanes.mesh_lane`).
        chip: The chip.
        dtype: The dtype of matmuls.
        shape: The shape of the slice of a torus that the mesh lies on.

    Raises:
        ValueError: The chip lacks a number that this needs.
    """
    rate, n, inwards = chip.efficiency, math.prod(sizes.values()), dict(reversed(list(sizes.items())))
    lines: list[PricedLine] = []
    for kind, calls in step.lines.items():
        if kind.op == "Send" or not calls.number:  # its Recv is counted
            continue
        lane = lanes.mesh_lane(kind.op, kind.axes, inwards, chip, shape)
        if seconds := calls.number * float(lane.forecast(calls.amount / calls.number, rate)):
            lines.append(PricedLine(kind, calls, seconds))
    narrow = "fp8" if "fp8" in dict(chip.peaks) else dtype
    flops, of_scaled, memory = chip.flops(dtype), chip.flops(narrow), chip.need("hbm_bw")
    if not chip.measured:
        flops, of_scaled = flops * rate.of_matmul(dtype), of_scaled * rate.of_matmul(narrow)
        memory = memory * rate.memory
    product = measured_row(chip, "Product", n) or Measured("Product", n, 0.0, float("inf"))
    plain = measured_row(chip, "Pointwise", n) or Measured("Pointwise", n, 0.0, memory)
    curved = measured_row(chip, "Activation", n) or plain
    computing = step.products.amount / flops + step.attention.amount / (chip.flops(dtype) * rate.attention)
    computing += (
        step.scaled.amount / of_scaled + _seconds(product, step.reads) + step.attention.number * product.latency
    )
    between = _seconds(plain, step.plain) + _seconds(curved, step.curved)
    return Prediction(computing, between, tuple(lines))


def _seconds(measured: Measured, calls: Calls) -> float:
    return calls.number * measured.latency + calls.amount / measured.bandwidth


def measured_row(chip: Chip, op: str, ranks: int) -> Measured | None:
    """Return the measurement of an operation on this many ranks or the nearest number; None if it was not measured."""
    rows = [r for r in chip.measured if r.op == op]
    return min(rows, key=lambda r: (abs(r.ranks - ranks), r.ranks)) if rows else None


def others_idle(chip: Chip) -> Chip:
    """Return the chip with the times of collectives while other ranks are idle, if these were measured."""
    rows = tuple(replace(row, alone=False) for row in chip.measured if row.alone)
    return replace(chip, measured=(*rows, *chip.measured))


def pipelined(stages: Sequence[float], microbatches: int, alone: Sequence[float] = (), idle: float = 1.0) -> float:
    """Return the seconds of a pipelined step with these seconds per stage: in slot k stage z has microbatch k - z.

    `stages` are the seconds of each stage while all stages are active, `alone` the seconds while all others are idle,
    as when the pipeline fills and drains. Without `alone`, each rank is taken to have a processor to itself, so both
    are equal. Otherwise active ranks share the processors, and are as fast as alone until they outnumber them. `idle`
    is the share of the time for filling and draining that remains where a schedule does other work in it.
    """
    Z, M = len(stages), microbatches

    def slot(active: Sequence[int]) -> float:
        took = done = 0.0
        for i, z in enumerate(sorted(active, key=stages.__getitem__)):
            busy = len(active) - i  # stages with less to do have ended
            ratio = min(1.0, alone[z] / stages[z]) if alone else 1.0
            took, done = took + (stages[z] - done) * (ratio if busy == 1 < Z else max(ratio, busy / Z)), stages[z]
        return took

    busy = slot(range(Z))
    return busy + idle * (sum(slot([z for z in range(Z) if 0 <= k - z < M]) for k in range(M + Z - 1)) / M - busy)
