"""Help if nothing fits: what would make the job fit, each way checked by planning again.

A model that does not fit can be trained with a smaller optimizer, in a host's memory, or by adapters that are added to
frozen weights. LoRA (arXiv:2106.09685) trains two thin matrices of rank `RANK` for each weight, which stays frozen in
bf16; QLoRA (arXiv:2305.14314) keeps the frozen weights of the layers in 4 bits with their scales, 4.127 bits each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaling.configs import Config
from scaling.models.leaves import leaves_of
from scaling.models.lora import MATRICES, Lora, factors, sizes_of
from scaling.plan.candidates import Found, answer
from scaling.plan.job import ANY, Job
from scaling.spec import parse

RANK = 16  # the rank of the adapters
NF4 = 4.127 / 8  # bytes of a weight with its scales, which are quantized too
ADAPTED = 16  # bytes of an adapter's param: fp32 with its gradient and Adam's moments


@dataclass(frozen=True)
class Frugal:
    """A way to train in less memory, and the job that remains on the chips."""

    name: str
    job: Job
    says: str


def adapter_params(config: Config) -> int:
    """Return the params of LoRA's adapters for the matrices of attention and of dense MLPs; experts have none."""
    leaves, sizes = leaves_of(config), sizes_of(config, Lora(RANK))
    matrices = [
        leaf for stack in ("dense", "layers") for name, leaf in leaves.get(stack, {}).items() if name in MATRICES
    ]
    dims = [parse(leaf.trained).dim_names for leaf in matrices]
    pairs = [factors(leaf.trained, str(leaf.start)) for leaf, own in zip(matrices, dims, strict=True) if "E" not in own]
    return sum(math.prod(sizes[dim] for dim in parse(text).dim_names) for pair in pairs for text in pair.values())


def frugal_ways(job: Job) -> Iterator[Frugal]:
    """Yield the ways that need less memory than the job itself, first the ways that train all params.

    The bytes of LoRA's adapters are counted as the optimizer's, because both are split in the same way.
    """
    params = job.work.params
    if job.optimizer_bytes > 2:
        yield Frugal(
            "8-bit Adam", replace(job, optimizer_bytes=2), "its two moments take a byte each, and there are no masters"
        )
    if job.optimizer_bytes:
        host = job.optimizer_bytes * params / 1e9
        says = f"its state, {host:,.0f} GB in all, waits in the hosts' memory and is updated there"
        yield Frugal("Adam on the host", replace(job, optimizer_bytes=0), says)
    says = "layers' inputs wait in the hosts' memory until the backward pass"
    yield Frugal("activations on the host", replace(job, offload=True), says)
    adapters = adapter_params(job.config)
    frozen = replace(job, grad_bytes=0, optimizer_bytes=ADAPTED * adapters / params)
    own = f"{adapters / 1e6:,.0f}e6 params of adapters of rank {RANK} are trained, all others frozen"
    yield Frugal("LoRA", replace(frozen, param_bytes=2), f"{own} in bf16")
    ends = max(job.work.ends) if job.work.tied else sum(job.work.ends)
    each = (NF4 * (params - ends) + 2 * ends) / params
    yield Frugal("QLoRA", replace(frozen, param_bytes=each), f"{own} in 4 bits")


def size(nbytes: float | None) -> str:
    """Return bytes in words, such as 1.5 GB."""
    nbytes = nbytes or 0.0
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes / 1e3:.3g} kB" if nbytes >= 1e3 else f"{nbytes:,.0f} bytes" if nbytes else "0 GB"


def misses(found: Found, memory: str) -> list[str]:
    """Return why nothing fits, by how much, and what would help; `memory` is the line about the smallest's memory."""
    closest, need = found[0], help_needed(found)
    return [
        f"Nothing fits: of {len(found):,} mesh{'es' * (len(found) > 1)} the smallest, {closest.name}",
        f"  ({closest.layout.meaning(closest.job.shards)}; {closest.layout.recipe}),",
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
    ways = [(f"{way.name} ({way.says})", way.job) for way in frugal_ways(job)]
    fit = [works(name, job=less) for name, less in ways]
    if not any(fit):
        name, less = ways[-1]
        least = size(float(answer(replace(asked, job=less))[0].held.total))
        any(works(f"{name} needs {least} a chip; on {n:,} chips", chips=n, job=less) for n in more)
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
