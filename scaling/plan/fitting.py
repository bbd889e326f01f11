"""Help if nothing fits: what would make the job fit, each way checked by planning again."""

import math
from dataclasses import replace

from scaling.plan.candidates import Found, answer
from scaling.plan.frugal import frugal_ways
from scaling.plan.job import ANY


def size(nbytes: float | None) -> str:
    """Return bytes in words, such as 1.5 GB."""
    nbytes = nbytes or 0.0
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def misses(found: Found, memory: str) -> list[str]:
    """Return why nothing fits, by how much, and what would help; `memory` is the line about the smallest's memory."""
    closest, need = found[0], help_needed(found)
    return [
        f"Nothing fits: of {len(found):,} meshes the smallest, {closest.name}",
        f"  ({closest.layout.meaning}; {closest.layout.recipe}),",
        f"holds {size(need['held'])} a chip of {size(need['room'])}: {size(need['missing'])} too many.",
        memory,
        "What would help:",
        *(f"  {tried}" for tried in need["helps"]),
    ]


def help_needed(found: Found) -> dict:
    """Return by how much the smallest layout misses, and what would help, each checked by planning again."""
    asked, job, tried = replace(found.question, fixed=ANY), found.question.job, []
    free, smallest = found[0].room, float(found[0].held.total)

    def works(label: str, **changed) -> bool:
        try:
            again = answer(replace(asked, **changed))
        except ValueError:
            return False
        if again.fitting:
            tried.append(f"{label}: {again[0].name} holds {size(float(again[0].held.total))}")
            return True
        return False

    more = [asked.chips << i for i in range(1, 12)]
    any(works(f"{n:,} chips", chips=n) for n in more)
    ways = [(f"{way.name} ({way.says})", way.on(asked.chip)) for way in frugal_ways(job)]
    fit = [works(name, job=less) for name, less in ways]
    if not any(fit):
        name, less = ways[-1]
        any(works(f"{name} on {n:,} chips", chips=n, job=less) for n in more)
    if job.grad_bytes > 2:
        works("gradients in bf16", job=replace(job, grad_bytes=2))
    smaller = (b for b in (job.batch >> i for i in range(1, 16)) if b >= job.seq)
    any(works(f"a batch of {b:,} tokens", job=replace(job, batch=b)) for b in smaller)
    state = job.work.params * (job.param_bytes + job.grad_bytes + job.optimizer_bytes)
    tried.append(
        f"params, gradients and optimizer state are {size(state)}: with nothing else, "
        f"{math.ceil(state / free):,} chips of {size(free)}"
    )
    return {"held": smallest, "room": free, "missing": smallest - free, "helps": tried}
