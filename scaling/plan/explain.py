"""The reasons for a layout: one layer in time, the alternatives, and what would change the answer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import wrap

from scaling.common.console import table
from scaling.hardware import Chip
from scaling.plan.candidates import Found, answer
from scaling.plan.evaluate import Estimate
from scaling.plan.job import AXES, Question
from scaling.plan.one_layer import as_dict as pass_dict
from scaling.plan.one_layer import layer_chart, layer_passes
from scaling.plan.report import AXIS_WORDS, LAYOUT, Budget, bottlenecks, cost_of_run, described_layout, folded, size

SHARES = (1.0, 0.5, 0.25)  # shares of the memory that a layout may use, in the Pareto table
WEIGHED = ("data", "fsdp", "pod")  # axes that move weights, whose bytes do not depend on the batch


@dataclass(frozen=True)
class ParetoPoint:
    """A layout that no other beats in time, memory, chips and dollars at once."""

    found: Estimate
    days: float
    dollars: float | None

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds of a step, bytes of a chip, chips, dollars."""
        return self.found.forecast, float(self.found.held.total), self.found.chips, self.dollars or 0.0


def pareto_of_chips(asked: Question, budget: Budget) -> list[ParetoPoint]:
    """Return the unbeaten layouts of half, as many and twice the chips, with all, half or a quarter of the memory."""
    choices, chips = [], asked.chips
    for n in filter(None, (2 * chips, chips, chips // 2)):
        for share in SHARES:
            less = replace(asked.job, headroom=asked.job.headroom * share)
            try:
                found = answer(replace(asked, job=less, chips=n))
            except ValueError:
                continue
            if found.fitting:
                spent = cost_of_run(found[0], found[0].forecast, budget)
                choices.append(ParetoPoint(found[0], spent["days"], spent["dollars"]))

    def beats(a: ParetoPoint, b: ParetoPoint) -> bool:
        return a.costs != b.costs and all(x <= y for x, y in zip(a.costs, b.costs, strict=True))

    kept = [one for one in choices if not any(beats(other, one) for other in choices)]
    return sorted({one.costs: one for one in kept}.values(), key=lambda one: (-one.found.chips, one.costs[0]))


@dataclass(frozen=True)
class Change:
    """The best layout after one part of the question is changed, or the reason that nothing fits then."""

    what: str
    found: Estimate | None
    why: str = ""

    @property
    def per_chip(self) -> float:
        """Tokens per second and chip, 0 if nothing was found."""
        return self.found.per_chip if self.found else 0.0


def changes(asked: Question) -> Iterator[Change]:
    """Yield the answers to the same question with one thing changed."""
    job, chip, chips = asked.job, asked.chip, asked.chips

    def ask(what: str, **changed) -> Change:
        try:
            found = answer(replace(asked, **changed))
        except ValueError as error:
            return Change(what, None, str(error))
        return Change(what, found[0]) if found.fitting else Change(what, None, "nothing fits")

    for word, factor in (("half the batch", 0.5), ("twice the batch", 2)):
        if (batch := int(job.batch * factor)) >= job.seq:
            yield ask(word, job=replace(job, batch=batch))
    if 1 < 4 * job.seq <= job.batch:
        yield ask("sequences of 4 times the length", job=replace(job, seq=4 * job.seq))
    yield ask("links half as fast", chip=links(chip, 0.5))
    yield ask("links twice as fast", chip=links(chip, 2))
    for word, factor in (("half the memory", 0.5), ("twice the memory", 2)):
        yield ask(word, chip=replace(chip, hbm_bytes=factor * chip.need("hbm_bytes")))
    for word, n in (("half the chips", chips // 2), ("twice the chips", 2 * chips)):
        if n:
            yield ask(word, chips=n)
    other = "bf16" if job.dtype == "fp8" else "fp8"
    if other in dict(chip.peaks):
        yield ask(f"matmuls in {other}", job=replace(job, dtype=other))


def links(chip: Chip, factor: float) -> Chip:
    """Return the chip with all its links `factor` times as fast."""
    fields = {name: value * factor for name in ("link_bw", "dcn_bw") if (value := getattr(chip, name))}
    levels = tuple(replace(level, link_bw=level.link_bw * factor) for level in chip.levels)
    measured = tuple(replace(row, bandwidth=row.bandwidth * factor) for row in chip.measured)
    return replace(chip, levels=levels, measured=measured, **fields)


def break_evens(found: Estimate) -> list[str]:
    """Return for each axis alone the sizes at which its collectives take as long as computing."""
    said = []
    for axis in AXES:
        if (share := max(dict(part.axes).get(axis, 0.0) / part.math for part in found.cost.parts)) == 0:
            continue
        limits = [f"links {share:.2g} times as fast"]
        if axis in WEIGHED:
            limits.append(f"batches of {size_of(share * found.job.batch)} tokens in as many microbatches")
        elif axis in ("tensor", "context"):
            limits.append(f"{AXIS_WORDS[axis]} {found.size(axis) / share:.3g} on the same links")
        word = "binds at" if share < 1 else "binds; it would not with"
        said.append(f"{AXIS_WORDS[axis]} {found.size(axis):,}, {share:.0%} of computing: {word} {', or '.join(limits)}")
    return said


def size_of(tokens: float) -> str:
    """Return a number of tokens in words, such as 4.19M."""
    return f"{tokens / 1e6:,.3g}M" if tokens >= 1e6 else f"{tokens / 1e3:,.3g}k"


def text(plans: Found, budget: Budget) -> str:
    """Return the whole explanation as text."""
    found = plans[0]
    lines = [
        "One layer in time, as forecast (dots: nothing runs; ': computed again)",
        layer_chart(layer_passes(found)),
    ]
    first, *rest = bottlenecks(found)
    lines += ["", f"Where a step's time goes: {first[0]} {first[1]:.0%}"]
    lines[-1] += "".join(f", {word} {share:.1%}" for word, share in rest)
    if evens := break_evens(found):
        lines += ["At the peaks:", *(f"  {line}" for line in evens)]
    rows = []
    for one in pareto_of_chips(plans.question, budget):
        each = one.found
        rows.append(
            (f"{each.chips:,}", described_layout(each), size(one.costs[1]), f"{each.forecast:.4g}", f"{one.days:,.3g}")
        )
        rows[-1] += (f"{one.dollars / 1e6:,.3g}M",) if one.dollars else ()
    head = ["chips", "layout", "a chip holds", "step, s", "days", *(["dollars"] if rows[0][5:] else [])]
    lines += ["", "What else could be had: nothing beats these in time, memory, chips and dollars at once"]
    lines += [table(rows, head)]
    rows = [("as asked", described_layout(found), f"{found.mfu:.0%}", f"{found.per_chip:,.0f}")]
    for change in changes(plans.question):
        if (new := change.found) is None:
            rows.append((change.what, "\n".join(wrap("none: " + change.why, LAYOUT)), "", ""))
            continue
        name = described_layout(new, "the same mesh" if new.layout.sizes == found.layout.sizes else new.name)
        rows.append((change.what, name, f"{new.mfu:.0%}", f"{change.per_chip:,.0f}"))
    lines += ["", "What would change the answer"]
    head = ["with", "the best layout", "MFU", "tokens/s a chip"]
    lines += [table(rows, head)]
    return folded(lines)


def as_dict(plans: Found, budget: Budget) -> dict:
    """Return the explanation as data, in seconds and bytes."""
    found = plans[0]
    out: dict = {"layer": [pass_dict(part) for part in layer_passes(found)]}
    out["shares"] = dict(bottlenecks(found))
    out["break_even"] = break_evens(found)
    out["pareto"] = [
        {"chips": one.found.chips, "name": one.found.name, "recipe": one.found.layout.recipe, "days": one.days,
         "bytes": one.costs[1], "seconds": one.costs[0], "dollars": one.dollars}
        for one in pareto_of_chips(plans.question, budget)
    ]  # fmt: skip
    out["changes"] = [
        {"with": c.what, "name": c.found and c.found.name, "recipe": c.found and c.found.layout.recipe,
         "seconds": c.found and c.found.forecast, "tokens_per_second_per_chip": c.per_chip, "why": c.why}
        for c in changes(plans.question)
    ]  # fmt: skip
    return out
