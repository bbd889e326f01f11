"""What the planner says: the best mesh and why, the closed forms beside it, days and dollars, or what would help."""

import math
from dataclasses import dataclass

from tabulate import tabulate

from scaling import cost
from scaling.cost import transformer as tm
from scaling.cost.units import significant
from scaling.hardware import Chip
from scaling.plan.evaluate import Job, Plan
from scaling.plan.search import fits, plans

WORDS = {"pod": "pods (data)", "pipe": "pipeline", "data": "data (ZeRO-1)", "fsdp": "FSDP", "tensor": "tensor"}


@dataclass(frozen=True)
class Budget:
    """Tokens to train on, and the utilization to expect; dollars per chip and hour, if known."""

    tokens: float = 15e12
    mfu: float = 0.4
    price: float | None = None


def size(nbytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def run(job: Job, chip: Chip, chips: int, seconds: float | None, budget: Budget) -> dict:
    """Days and dollars of the token budget: at the roofline's step time, or at the expected utilization if None."""
    if seconds is None:
        flops = tm.rule_of_thumb(job.config, budget.tokens)
        total = cost.seconds_at(flops, chips, chip.flops(job.dtype), budget.mfu)
    else:
        total = budget.tokens / job.batch * seconds
    price = budget.price or chip.price
    return {"days": total / 86400, "dollars": price * chips * total / 3600 if price else None}


def closed_form(job: Job, chip: Chip, chips: int, pods: int) -> dict:
    """Part 5's answers for two matrices a layer: thresholds in tokens per chip, X_opt, the regime; TPUs only."""
    if chip.kind != "tpu":
        return {}
    C, axes, F, n = chip.flops(job.dtype), chip.axes, job.config.F, chips // pods
    across = [chip.bandwidth("ici", axes=m) for m in (axes, max(1, axes - 1), 1)]
    fsdp = cost.data_threshold(C, across[0])
    if job.config.moe:
        fsdp *= cost.expert_inflation(job.config.E, job.config.k)
        return {"tokens_per_chip": job.batch / chips, "fsdp_threshold": fsdp}
    mixed = cost.mixed_threshold(F, C, across[1], across[2], "max" if job.overlap == "max" else "sum")
    best = cost.mixed_optimum(job.batch / pods, F, n, max(1, axes - 1), 1)
    per_chip = job.batch / chips
    regime = "FSDP" if per_chip > fsdp else "FSDP+TP" if per_chip > mixed else "none"
    found = {"tokens_per_chip": per_chip, "fsdp_threshold": fsdp, "mixed_threshold": mixed, "compute_bound": regime}
    found |= {"X_opt": best, "Y_opt": n / best, "tensor_limit": cost.tensor_limit(F, C, across[2])}
    if pods > 1:
        found |= {"tokens_per_pod": job.batch / pods, "pod_threshold": cost.pod_threshold(C, chip.need("dcn_bw"))}
    return found


def families(found: list[Plan], chip: Chip) -> list[Plan]:
    """The best plan of each combination of axes, in the order found."""
    first: dict[tuple, Plan] = {}
    for plan in found:
        key = tuple(axis for axis, n in plan.mesh if n > 1)
        first.setdefault(key, plan)
    return [plan for plan in first.values() if fits(plan, chip)]


def help_needed(job: Job, chip: Chip, chips: int, smallest: Plan) -> dict:
    """By how much the smallest plan misses, and what would help: each checked by planning again."""
    room, tried = chip.need("hbm_bytes"), []

    def works(label: str, job: Job = job, chips: int = chips) -> bool:
        try:
            again = plans(job, chip, chips)
        except ValueError:
            return False
        if again and fits(again[0], chip):
            tried.append(f"{label}: {again[0].name} holds {size(again[0].held)}")
            return True
        return False

    any(works(f"{n:,} chips", chips=n) for n in (chips << i for i in range(1, 12)))
    if job.optimizer_bytes > 2:
        works("8-bit optimizer states (2 bytes a parameter)", job=_with(job, optimizer_bytes=2))
    smaller = (b for b in (job.batch >> i for i in range(1, 16)) if b >= job.seq)
    any(works(f"a batch of {b:,} tokens", job=_with(job, batch=b)) for b in smaller)
    state = tm.num_params(job.config) * (job.param_bytes + job.grad_bytes + job.optimizer_bytes)
    tried.append(
        f"params, gradients and optimizer state are {size(state)}: with nothing else, "
        f"{math.ceil(state / room):,} chips of {size(room)}"
    )
    return {"held": smallest.held, "room": room, "missing": smallest.held - room, "helps": tried}


def _with(job: Job, **changes) -> Job:
    return Job(**(job.__dict__ | changes))


def as_dict(job: Job, chip: Chip, chips: int, found: list[Plan], budget: Budget, top: int) -> dict:
    """Everything that is printed, as data (`--json`). Seconds, bytes, FLOPs."""
    pods = found[0].size("pod")
    out = {
        "model": job.config.name, "params": tm.num_params(job.config), "chip": chip.name, "chips": chips,
        "batch": job.batch, "seq": job.seq, "dtype": job.dtype, "flops_per_step": job.flops(),
        "closed_form": closed_form(job, chip, chips, pods), "fits": fits(found[0], chip), "tried": len(found),
    }  # fmt: skip
    if not out["fits"]:
        return out | {"closest": plan_dict(found[0]), "help": help_needed(job, chip, chips, found[0])}
    best = found[0]
    out |= {"best": plan_dict(best), "at_roofline": run(job, chip, chips, best.seconds, budget)}
    out |= {"at_mfu": run(job, chip, chips, None, budget) | {"mfu": budget.mfu, "tokens": budget.tokens}}
    return out | {"others": [plan_dict(plan) for plan in families(found, chip)[1 : top + 1]]}


def plan_dict(plan: Plan) -> dict:
    memory = {name: getattr(plan.memory, name) for name in ("params", "grads", "optimizer", "activations")}
    return {
        "name": plan.name, "mesh": dict(plan.mesh), "torus_axes": dict(plan.torus), "checkpointing": plan.remat,
        "microbatches": plan.microbatches, "seconds": plan.seconds, "seconds_without_overlap": plan.worst,
        "math_seconds": plan.cost.math, "comms_seconds": dict(plan.cost.axes), "bytes": dict(plan.bytes),
        "bound": plan.cost.bound, "bubble": plan.bubble, "mfu_limit": plan.mfu,
        "memory": memory | {"working": plan.working, "total": plan.held}, "padded": list(plan.padded),
    }  # fmt: skip


def text(job: Job, chip: Chip, chips: int, found: list[Plan], budget: Budget, top: int) -> str:
    best, config = found[0], job.config
    head = (
        f"{config.name} ({significant(tm.num_params(config))} params) on {chips:,} {chip.name}, "
        f"{job.batch:,} tokens a step ({job.batch / job.seq:,.0f} sequences of {job.seq:,}), {job.dtype}"
    )
    if not fits(best, chip):
        need = help_needed(job, chip, chips, best)
        lines = [head, "", f"Nothing fits: of {len(found)} meshes the smallest, {best.name} ({recipe(best)}),"]
        lines += [f"holds {size(need['held'])} a chip of {size(need['room'])}: {size(need['missing'])} too many."]
        return "\n".join([*lines, memory_line(best), "What would help:", *(f"  {tried}" for tried in need["helps"])])
    ours = sum(fits(plan, chip) for plan in found)
    lines = [head, "", f"Best of {ours} meshes that fit: {best.name} ({recipe(best)})", why(best), ""]
    replicas, sequences = math.prod(best.size(a) for a in ("pod", "data", "fsdp")), job.batch / job.seq
    if replicas * best.microbatches > sequences:
        lines += [
            f"{replicas * best.microbatches:,} replicas share {sequences:,.0f} sequences: context parallelism, whose "
            "exchange of keys and values is not counted."
        ]
    if best.padded:
        lines += [f"Sizes that do not divide, counted as if shards were cut flat: {'; '.join(best.padded)}."]
    lines += [
        f"Step {best.cost.lower / (1 - best.bubble):.4g} s if all communication overlaps, {best.worst:.4g} s if none "
        f"does (ranked by overlap {job.overlap!r}); "
        f"bound by {bound(best)}; MFU at most {best.mfu:.0%}.",
        memory_line(best) + f" of {size(chip.hbm_bytes)}",
    ]
    if form := closed_form(job, chip, chips, best.size("pod")):
        lines += ["", "Closed form (Part 5, two matrices a layer):"]
    if "X_opt" in form:
        verdict = {"FSDP": "FSDP alone is compute-bound", "FSDP+TP": "FSDP+TP is compute-bound, FSDP alone is not"}
        lines += [
            f"  {form['tokens_per_chip']:,.0f} tokens a chip; FSDP needs {form['fsdp_threshold']:,.0f}, "
            f"FSDP+TP {form['mixed_threshold']:,.0f}: {verdict.get(form['compute_bound'], 'neither is compute-bound')}",
            f"  X_opt = {form['X_opt']:,.0f} (FSDP), {form['Y_opt']:.1f} (TP); TP on one torus axis up to "
            f"{form['tensor_limit']:.1f}",
        ]
    elif form:
        lines += [
            f"  {form['tokens_per_chip']:,.0f} tokens a chip; FSDP needs {form['fsdp_threshold']:,.0f}, which is E/k = "
            f"{config.E / config.k:g} times a dense model's.",
            "  Experts are gathered like other weights: expert parallelism is not among the axes.",
        ]
    if "tokens_per_pod" in form:
        lines += [f"  {form['tokens_per_pod']:,.0f} tokens a pod; DCN needs {form['pod_threshold']:,.0f}"]
    lines += ["", f"Training on {significant(budget.tokens)} tokens:"]
    for label, seconds in (("at the roofline", best.seconds), (f"at {budget.mfu:.0%} MFU", None)):
        spent = run(job, chip, chips, seconds, budget)
        dollars = f", ${spent['dollars']:,.0f}" if spent["dollars"] else ""
        lines += [f"  {label}: {spent['days']:,.1f} days{dollars}"]
    others = families(found, chip)[1 : top + 1]
    if others:
        lines += ["", "The best of the other combinations of axes:", comparison(others)]
    return "\n".join(lines)


def recipe(plan: Plan) -> str:
    saved = {"none": "nothing recomputed", "matmuls": "big matmuls saved", "block": "block checkpointing"}[plan.remat]
    return saved + (f", {plan.microbatches} microbatches" if plan.microbatches > 1 else "")


def bound(plan: Plan) -> str:
    return plan.cost.bound if plan.cost.bound == "compute" else f"{WORDS[plan.cost.bound]}'s communication"


def memory_line(plan: Plan) -> str:
    parts = [f"{name} {size(getattr(plan.memory, name))}" for name in ("params", "grads", "optimizer", "activations")]
    return f"Memory a chip: {', '.join(parts)}, working {size(plan.working)}; {size(plan.held)} in all"


def why(plan: Plan) -> str:
    rows, torus, times, moved = [], dict(plan.torus), dict(plan.cost.axes), dict(plan.bytes)
    for axis, n in plan.mesh:
        if n > 1:
            share = f"{times[axis] / plan.cost.math:.0%}"
            rows.append((WORDS[axis], f"{n:,}", torus.get(axis, ""), size(moved[axis]), f"{times[axis]:.4f}", share))
    rows.append(("compute", "", "", "", f"{plan.cost.math:.4f}", "100%"))
    head = ["axis", "size", "torus axes", "bytes a chip and step", "seconds a step", "of compute"]
    align = ("left", "right", "right", "right", "right", "right")
    return tabulate(rows, head, "simple", colalign=align, disable_numparse=True)


def comparison(others: list[Plan]) -> str:
    rows = [
        (p.name, recipe(p), f"{p.seconds:.4f}", f"{p.worst:.4f}", f"{p.mfu:.0%}", p.cost.bound, size(p.held))
        for p in others
    ]
    head = ["mesh", "", "step, s", "no overlap", "MFU <=", "bound by", "memory"]
    return tabulate(rows, head, "simple", disable_numparse=True)
