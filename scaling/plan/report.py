"""The planner's report: the best layout and why, the closed forms, days and dollars, or what would help."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import wrap

from scaling.common.console import fold, significant, table
from scaling.models.leaves import counted_without, uncomputed
from scaling.plan import closed_form
from scaling.plan.candidates import Found
from scaling.plan.classes import class_of, error_line, is_unusual, unsure, usual_error
from scaling.plan.evaluate import Estimate
from scaling.plan.fitting import help_needed, misses, size
from scaling.plan.job import AXES, Layout, Question
from scaling.plan.ledger import weight_ways

AXIS_WORDS = {
    "pod": "pods (data)", "pipe": "pipeline", "data": "data", "fsdp": "FSDP", "context": "context", "expert": "expert",
    "tensor": "tensor",
}  # fmt: skip
WIDTH, LAYOUT = 100, 46  # the columns of a printed line, and of a layout in it


@dataclass(frozen=True)
class Budget:
    """Tokens to train on, and the utilization to expect; dollars per chip and hour, if known."""

    tokens: float = 15e12
    mfu: float = 0.4
    price: float | None = None


def cost_of_run(found: Estimate, seconds: float, budget: Budget) -> dict:
    """Return the days and dollars that the token budget takes at `seconds` per step."""
    total = budget.tokens / found.job.batch * seconds
    price = budget.price or found.network.chip.price
    return {"days": total / 86400, "dollars": price * found.chips * total / 3600 if price else None}


def whole_runs(best: Estimate, budget: Budget) -> dict[str, dict]:
    """Return the run at the bound, at the forecast and at the expected utilization, with the same FLOPs each."""
    at = {"bound": best.bound, "forecast": best.forecast, "mfu": best.useful / budget.mfu}
    return {name: cost_of_run(best, seconds, budget) | {"seconds": seconds} for name, seconds in at.items()}


def families(found: Found) -> Iterator[Estimate]:
    """Yield the best layout of each combination of axes that fits, in order."""
    seen = set()
    for i, layout in found.layouts():
        key = (tuple(axis for axis in AXES if layout.sizes[axis] > 1), layout.zero)
        if i >= found.fitting:
            return
        if key not in seen:
            seen.add(key)
            yield found[i]


def bound_by(found: Estimate) -> str:
    """Return what limits the bound: "compute", or the axis whose collectives do."""
    return AXIS_WORDS.get(found.cost.bound, "compute")


def _notes(found: Estimate) -> list[str]:
    """Return the notes that the report prints on this layout."""
    job, l, w, said = found.job, found.layout, found.job.work, []
    if l.tensor > 1:
        said.append("activations between the blocks are split over TP too (D_Y): each block gathers and scatters them")
    if l.tensor > w.kv_heads:
        said.append(
            f"each of the {w.kv_heads} KV heads is on {l.tensor // w.kv_heads} tensor ranks: copies are counted"
        )
    if l.context > 1:
        said.append(f"a sequence is cut into {l.context} parts; keys and values are exchanged in each layer")
    if l.pipe > 1 and w.L % l.pipe:
        said.append(
            f"{w.L} layers on {l.pipe} stages: the fullest one has {found.compute.layers:.3g} and sets the pace"
        )
    replicas = l.pod * l.data * l.fsdp * l.expert * l.microbatches
    if job.sequences % replicas:
        percent = math.floor(1000 * job.sequences / (math.ceil(job.sequences / replicas) * replicas)) / 10
        said.append(f"{job.sequences:,} sequences over {replicas:,} do not divide: replicas are {percent:.3g}% busy")
    ways = weight_ways(job, l, "weights")[0] if l.zero == 3 else 1
    if w.D % ways:
        said.append(f"weights are cut flat: D = {w.D:,} does not divide by {ways:,}")
    if found.network.chip.kind == "gpu" and l.tensor > found.network.chip.node_gpus:
        said.append(f"TP spans {l.tensor // found.network.chip.node_gpus} nodes")
    return said


def less_sure(found: Found) -> list[str]:
    """Return as notes that no published run is laid out so, and a faster layout with why it is not chosen."""
    job, chip = found.question.job, found.question.chip
    rare = ["no published run is laid out so"] if is_unusual(job, chip, found[0].layout) else []
    if not (other := found.faster):
        return rare
    gain = found[0].forecast / other.forecast - 1
    why = f"the chosen one asks less of the network and of its users, and such forecasts are off by {gain:.0%} and more"
    if is_unusual(job, chip, other.layout):
        why = f"no published run is laid out so, and it would have to be faster by {unsure(job, chip):.0%} to be sure"
    faster = f"{other.name} ({other.layout.recipe}) is forecast {gain:.0%} faster; {why}"
    return [*rare, faster] if gain > 0.005 else rare


def axis_table(found: Estimate) -> str:
    """Return a table of the axes: their network, their bytes, and their share of computing, forward and backward."""
    forward, backward = found.cost.parts
    lanes = {entry.axis: entry.over for entry in found.entries}
    rows = []
    for axis in AXES:
        n = found.size(axis)
        if n == 1 and axis not in lanes:
            continue
        share = [f"{dict(part.axes).get(axis, 0.0) / part.math:.0%}" for part in (forward, backward)]
        seconds = sum(dict(part.axes).get(axis, 0.0) for part in (forward, backward))
        moved = found.bytes.get(axis)
        where = lanes[axis].where if axis in lanes else ""
        rows.append((AXIS_WORDS[axis], f"{n:,}", where, size(moved) if moved else "", f"{seconds:.4f}", *share))
    rows.append(("compute", "", "", "", f"{found.cost.math:.4f}", f"{forward.math:.3g} s", f"{backward.math:.3g} s"))
    head = ["axis", "size", "runs over", "bytes a chip", "s a step", "of forward", "of backward"]
    return table(rows, head, right=[False, True, False, True, True, True, True])


def memory_dict(found: Estimate) -> dict[str, float]:
    """Return a chip's bytes by kind, and in all."""
    held = {name: float(value) for name, value in vars(found.held).items() if name != "shares"}
    return held | {"total": float(found.held.total)}


def memory_line(found: Estimate) -> str:
    """Return a chip's memory by kind, as a line."""
    held = memory_dict(found)
    least = {"apart": 0.01 * held["total"], "reserved": 0.0}
    words = {"apart": "never at once", "total": "in all"}
    parts = [f"{words.get(name, name)} {size(value)}" for name, value in held.items() if value > least.get(name, -1.0)]
    return f"Memory a chip: {', '.join(parts)}"


def bottlenecks(found: Estimate) -> list[tuple[str, float]]:
    """Return (what, share of the forecast step), the longest first."""
    words = {
        "matmuls": "matmuls", "attention": "attention", "memory": "memory", "recomputed": "recomputing",
        "critical": "waiting for collectives", "weights": "weights not hidden", "bubble": "bubble",
        "once": "reducing gradients", "update": "optimizer",
    }  # fmt: skip
    parts = [(words[name], float(value) / found.forecast) for name, value in vars(found.parts).items()]
    return sorted((part for part in parts if part[1] >= 0.0005), key=lambda part: -part[1])


def described_layout(found: Estimate, name: str = "") -> str:
    """Return the lines that name a layout and its recipe."""
    lines = [*wrap(name or found.name, LAYOUT), *(f"  {line}" for line in wrap(found.layout.recipe, LAYOUT - 2))]
    return "\n".join(lines)


def comparison(found: list[Estimate]) -> str:
    """Return a table of several layouts."""
    rows = []
    for e in found:
        times = f"{e.forecast:.4g}", f"{e.bound:.4g}", f"{e.mfu:.0%}"
        rows.append((described_layout(e), *times, bound_by(e), size(float(e.held.total))))
    head = ["layout", "forecast s", "bound s", "MFU", "bound by", "a chip holds"]
    return table(rows, head, right=[False, True, True, True, False, True])


def head_line(asked: Question) -> str:
    """Return the question as a line."""
    job, chip, chips = asked.job, asked.chip, asked.chips
    return (
        f"{job.config.name} ({significant(job.work.params)} params) on {chips:,} {chip.name}, {job.batch:,} tokens a "
        f"step ({job.batch / job.seq:,.0f} x {job.seq:,}), {job.dtype}"
    )


def text(found: Found, budget: Budget, top: int = 6) -> str:
    """Return the report, at most 100 columns wide."""
    best, asked = found[0], found.question
    job, chip = asked.job, asked.chip
    lines = [head_line(asked), *counted_without(job.config), ""]
    if not best.fits:
        return folded([*lines, *misses(found, memory_line(found[0]))])
    lines += [
        f"Best of {found.fitting:,} meshes that fit: {best.name}"
        if found.fitting > 1
        else f"One mesh fits: {best.name}",
        f"  {best.layout.meaning(best.job.shards)}",
        f"  {best.layout.recipe}",
        axis_table(best),
        "",
    ]
    lines += [
        f"Bound:    {best.bound:.4g} s a step, MFU at most {best.mfu_limit:.0%}, set by {bound_by(best)}"
        f"{' collectives' * (best.cost.bound != 'compute')}; {best.worst:.4g} s if nothing overlapped",
        f"Forecast: {best.forecast:.4g} s a step, MFU {best.mfu:.0%}, {best.per_chip:,.0f} tokens/s a chip",
        f"          {', '.join(f'{word} {share:.0%}' for word, share in bottlenecks(best) if share >= 0.005)}",
        f"          {error_line(job, chip)}",
        memory_line(best) + f", of {size(best.room)} ({job.headroom:.0%} of {size(chip.hbm_bytes)})",
    ]
    lines += [f"Note: {note}." for note in [*_notes(best), *less_sure(found)]]
    lines += ["", *closed_form.form_lines(closed_form.closed_form(asked, best.size("pod")), job.config)]
    lines += ["", f"Training on {significant(budget.tokens)} tokens (FLOPs of matmuls and of causal attention):"]
    for name, words in (("bound", "at the bound"), ("forecast", "as forecast"), ("mfu", f"at {budget.mfu:.0%} MFU")):
        spent = whole_runs(best, budget)[name]
        dollars = f", ${spent['dollars']:,.0f}" if spent["dollars"] else ""
        lines.append(f"  {words}: {spent['days']:,.1f} days{dollars}")
    others = list(families(found))[1 : top + 1]
    if others:
        lines += ["", "The best of the other combinations of axes:", comparison(others)]
    return folded(lines)


def several(count: int, noun: str) -> str:
    """Return a number and its noun, such as "1 token" or "1,024 tokens"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def three_digits(number: float) -> str:
    """Return a number in three digits or more, without an exponent from 1,000 on."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def folded(lines: Iterable[str]) -> str:
    """Return lines of at most 100 columns; longer ones continue below."""
    return fold("\n".join(lines), WIDTH)


# --- As data


def as_dict(found: Found, budget: Budget, top: int = 6) -> dict:
    """Return everything that is printed as data (`--json`), in seconds, bytes and FLOPs."""
    best, asked = found[0], found.question
    job = asked.job
    out = {
        "model": job.config.name, "params": job.work.params,
        "uncomputed": uncomputed(job.config),
        "chip": asked.chip.name, "chips": asked.chips,
        "batch": job.batch, "seq": job.seq, "dtype": job.dtype,
        "class": class_of(job, asked.chip), "class_error": usual_error(job, asked.chip),
        "flops_per_step": job.flops(), "headroom": job.headroom,
        "closed_form": closed_form.closed_form(asked, best.size("pod")), "fits": best.fits,
        "meshes": len(found), "meshes_that_fit": found.fitting,
    }  # fmt: skip
    if not out["fits"]:
        return out | {"closest": plan_dict(best), "help": help_needed(found)}
    spent = whole_runs(best, budget)
    out |= {"best": plan_dict(best), "at_bound": spent["bound"], "at_forecast": spent["forecast"]}
    out |= {"at_mfu": spent["mfu"] | {"mfu": budget.mfu, "tokens": budget.tokens}}
    return out | {"others": [plan_dict(other) for other in list(families(found))[1 : top + 1]]}


def plan_dict(found: Estimate) -> dict:
    """Return one estimate as data."""
    forward, backward = found.cost.parts
    l: Layout = found.layout
    return {
        "name": found.name, "meaning": l.meaning(found.job.shards), "mesh": l.sizes, "zero": l.zero,
        "checkpointing": l.remat, "microbatches": l.microbatches,
        "schedule": l.schedule if l.pipe > 1 else None, "chunks": l.chunks, "reduce": l.reduce,
        "bound_seconds": found.bound, "forecast_seconds": found.forecast, "seconds_without_overlap": found.worst,
        "forecast": {name: float(value) for name, value in vars(found.parts).items()},
        "forward": {"math": forward.math, "collectives": dict(forward.axes)},
        "backward": {"math": backward.math, "collectives": dict(backward.axes)},
        "bytes": found.bytes, "bound": found.cost.bound, "bubble": float(found.bubble),
        "mfu_limit": float(found.mfu_limit), "mfu": float(found.mfu),
        "tokens_per_second_per_chip": found.per_chip,
        "lanes": {
            name: {"over": lane.where, "ranks": lane.ranks, "bytes_per_second": 1 / lane.per_byte}
            for name, lane in found.network.lanes.items() if lane.ranks > 1
        },
        "memory": memory_dict(found),
        "notes": _notes(found),
    }  # fmt: skip
