"""The reasons for a layout: one layer in time, the alternatives, and what would change the answer."""

from collections.abc import Iterator
from dataclasses import replace
from textwrap import wrap
from typing import NamedTuple

from scaling.common.console import significant, table
from scaling.hardware import Chip
from scaling.plan.candidates import Found, answer
from scaling.plan.evaluate import Estimate
from scaling.plan.job import AXES, Question
from scaling.plan.one_layer import as_dict as pass_dict
from scaling.plan.one_layer import layer_chart, layer_passes
from scaling.plan.report import (
    AXIS_WORDS,
    LAYOUT,
    Budget,
    bottlenecks,
    cost_of_run,
    described_layout,
    folded,
    size,
    three_digits,
)

SHARES = (1.0, 0.5, 0.25)  # shares of the memory that a layout may use, in the Pareto table
WEIGHED = ("data", "fsdp", "pod")  # axes that move weights, whose bytes do not depend on the batch


def plan_costs(found: Estimate, budget: Budget) -> tuple[float, float, int, float]:
    """Return the seconds of a step, the bytes of a chip, the chips, and the dollars of the run, 0 without a price."""
    dollars = cost_of_run(found, found.forecast, budget)["dollars"]
    return found.forecast, float(found.held.total), found.chips, dollars or 0.0


def pareto_of_chips(asked: Question, budget: Budget) -> list[Estimate]:
    """Return the layouts that no other beats in all its `plan_costs`, the most chips first.

    They are of half, as many and twice the chips, with all, half or a quarter of the memory.
    """
    choices, chips = {}, asked.chips
    for n in filter(None, (2 * chips, chips, chips // 2)):
        for share in SHARES:
            less = replace(asked.job, headroom=asked.job.headroom * share)
            try:
                found = answer(replace(asked, job=less, chips=n))
            except ValueError:
                continue
            if found.fitting:
                choices.setdefault(plan_costs(found[0], budget), found[0])

    def is_beaten(one: tuple) -> bool:
        return any(other != one and all(x <= y for x, y in zip(other, one, strict=True)) for other in choices)

    return [choices[one] for one in sorted(choices, key=lambda one: (-one[2], one[0])) if not is_beaten(one)]


class Change(NamedTuple):
    """The best layout after one part of the question is changed, or the reason that nothing fits then."""

    what: str
    found: Estimate | None
    why: str = ""


def changes(asked: Question) -> Iterator[Change]:
    """Yield the answers to the same question with one thing changed."""
    job, chip, chips = asked.job, asked.chip, asked.chips

    def ask(what: str, **changed) -> Change:
        try:
            found = answer(replace(asked, **changed))
        except ValueError as error:
            return Change(what, None, str(error))
        return Change(what, found[0]) if found.fitting else Change(what, None, "nothing fits")

    for word, factor in (("half", 0.5), ("twice", 2)):
        if (batch := int(job.batch * factor)) >= job.seq:
            yield ask(f"{word} the batch", job=replace(job, batch=batch))
        if n := int(chips * factor):
            yield ask(f"{word} the chips", chips=n)
        yield ask(f"{word} the memory", chip=replace(chip, hbm_bytes=factor * chip.need("hbm_bytes")))
        yield ask(f"links {word} as fast", chip=links(chip, factor))
    if 1 < 4 * job.seq <= job.batch:
        yield ask("sequences of 4 times the length", job=replace(job, seq=4 * job.seq))
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
            limits.append(f"batches of {significant(share * found.job.batch)} tokens in as many microbatches")
        elif axis in ("tensor", "context"):
            limits.append(f"{AXIS_WORDS[axis]} {found.size(axis) / share:.3g} on the same links")
        word = "binds at" if share < 1 else "binds; it would not with"
        said.append(f"{AXIS_WORDS[axis]} {found.size(axis):,}, {share:.0%} of computing: {word} {', or '.join(limits)}")
    return said


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
        spent = cost_of_run(one, one.forecast, budget)
        words = described_layout(one), size(float(one.held.total)), f"{one.forecast:.4g}", three_digits(spent["days"])
        rows.append((f"{one.chips:,}", *words, *([significant(spent["dollars"])] if spent["dollars"] else [])))
    head = ["chips", "layout", "a chip holds", "step, s", "days", *(["dollars"] if rows[0][5:] else [])]
    lines += ["", "What else could be had: nothing beats these in time, memory, chips and dollars at once"]
    lines += [table(rows, head)]
    rows = [("as asked", described_layout(found), f"{found.mfu:.0%}", f"{found.per_chip:,.0f}")]
    for what, new, why in changes(plans.question):
        name, reached = "\n".join(wrap(f"none: {why}", LAYOUT)), ("", "")
        if new is not None:
            name = described_layout(new, "the same mesh" if new.layout.sizes == found.layout.sizes else new.name)
            reached = f"{new.mfu:.0%}", f"{new.per_chip:,.0f}"
        rows.append((what, name, *reached))
    lines += ["", "What would change the answer"]
    lines += [table(rows, ["with", "the best layout", "MFU", "tokens/s a chip"])]
    return folded(lines)


def as_dict(plans: Found, budget: Budget) -> dict:
    """Return the explanation as data, in seconds and bytes."""
    found = plans[0]

    def described(one: Estimate | None) -> dict:
        return {
            "name": one and one.name, "recipe": one and one.layout.recipe, "seconds": one and one.forecast,
            "bytes": one and float(one.held.total), "tokens_per_second_per_chip": one.per_chip if one else 0.0,
        }  # fmt: skip

    return {
        "layer": [pass_dict(part) for part in layer_passes(found)], "shares": dict(bottlenecks(found)),
        "break_even": break_evens(found),
        "pareto": [
            {"chips": one.chips} | described(one) | cost_of_run(one, one.forecast, budget)
            for one in pareto_of_chips(plans.question, budget)
        ],
        "changes": [{"with": what, "why": why} | described(one) for what, one, why in changes(plans.question)],
    }  # fmt: skip
