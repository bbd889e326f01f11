"""Where to begin with the GPUs one has: one GPU, DDP, FSDP, FSDP + checkpointing, + tensor parallelism (Part 5).

    python -m scaling.plan guide --model llama3-8b --gpu h100 --gpus 8
    python -m scaling.plan guide --model my_config.json --memory 24GB --gpus 2

The ladder is climbed until the model fits: each rung splits more, and communicates more.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tabulate import tabulate

from scaling.configs import MODELS, get
from scaling.console import integer, number
from scaling.cost import transformer as tm
from scaling.cost.units import significant
from scaling.hardware import Chip, Level, chip
from scaling.plan.evaluate import Job, Plan
from scaling.plan.network import Network
from scaling.plan.report import size
from scaling.plan.search import attempts, fits
from scaling.sizes import shortened

USABLE = 0.9  # of a GPU's memory: the rest goes to the driver, the communication buffers and fragments


@dataclass(frozen=True)
class Rung:
    """One way to train: how many GPUs each axis gets, the checkpointing, whether DDP's whole optimizer is kept."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    remat: str = "none"
    how: str = ""
    zero1: bool = True


TYPES = {
    "dp": "In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]      chapters/05_dp.py",
    "fsdp": "In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]      chapters/05_fsdp.py",
    "fsdp_tp": "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]      chapters/05_fsdp_tp.py",
}


def ladder(gpus: int, node: int, heads: int) -> Iterator[Rung]:
    """The rungs for so many GPUs, `node` of them joined by fast links, and a model of so many heads."""
    yield Rung("one GPU", (), how="no communication")
    if gpus == 1:
        yield Rung("one GPU + checkpointing", (), "block", "no communication")
        return
    yield Rung("DDP", (("data", gpus),), how=TYPES["dp"], zero1=False)
    yield Rung("FSDP", (("fsdp", gpus),), how=TYPES["fsdp"])
    yield Rung("FSDP + checkpointing", (("fsdp", gpus),), "block", TYPES["fsdp"])
    for Y in (2, 4, 8):
        if gpus % Y == 0 and node >= Y and heads % Y == 0:
            sizes = (("fsdp", gpus // Y), ("tensor", Y))
            yield Rung(f"FSDP + checkpointing + TP {Y}", sizes, "block", TYPES["fsdp_tp"])


@dataclass(frozen=True)
class Step:
    """A rung with its plan; `fits` within the usable memory."""

    rung: Rung
    plan: Plan
    fits: bool


def climb(job: Job, gpu: Chip, gpus: int) -> list[Step]:
    """Every rung, each with as many microbatches as it takes to fit (down to a sequence per GPU and microbatch)."""
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus = {gpus!r}: must be a whole number of at least 1")
    usable = replace(gpu, hbm_bytes=USABLE * gpu.need("hbm_bytes"))
    steps = []
    for rung in ladder(gpus, gpu.node_gpus, job.config.N):
        network = Network(usable, {"pod": 1, "pipe": 1, "data": 1, "fsdp": 1, "tensor": 1} | dict(rung.sizes))
        if tried := list(attempts(replace(job, zero1=rung.zero1), network, (rung.remat,))):
            steps.append(Step(rung, tried[-1], fits(tried[-1], usable)))
    return steps


def choose(steps: list[Step]) -> Step | None:
    """Of the rungs that fit and use all GPUs the fastest, and of equals the lowest; None if nothing fits."""
    most = max(step.plan.chips for step in steps)
    able = [step for step in steps if step.fits and step.plan.chips == most]
    return min(able, key=lambda step: round(step.plan.seconds, 4), default=None)


def advice(job: Job, gpu: Chip, gpus: int, timed: bool = True) -> str:
    """The ladder as a table, the choice, and if nothing fits by how much and what would help."""
    steps = climb(job, gpu, gpus)
    room, params = USABLE * gpu.hbm_bytes, tm.num_params(job.config)
    rows = [
        (
            s.rung.name, s.plan.chips, s.plan.microbatches, size(s.plan.memory.total - s.plan.memory.activations),
            size(s.plan.memory.activations + s.plan.working), size(s.plan.held), "yes" if s.fits else "no",
        )
        + ((f"{s.plan.seconds:.3g}", f"{s.plan.worst:.3g}") if timed else ())
        for s in steps
    ]  # fmt: skip
    head = ["", "GPUs", "microbatches", "params, grads, optimizer", "activations, working", "a GPU holds", "fits"]
    head += ["step, s", "no overlap"] if timed else []
    state = job.param_bytes + job.grad_bytes + job.optimizer_bytes
    lines = [
        f"{job.config.name} ({significant(params)} params, {state:g} bytes each) on {gpus} x {gpu.name} of "
        f"{size(gpu.hbm_bytes)}, of which {USABLE:.0%} count; {job.batch // job.seq} sequences of {job.seq:,} a step",
        "",
        tabulate(rows, head, "simple", disable_numparse=True),
        "",
    ]
    if chosen := choose(steps):
        lines += [f"Take: {chosen.rung.name}", f"      {chosen.rung.how}"]
        if chosen.rung.sizes and steps[0].fits:
            lines += ["The model fits one GPU: more of them make it faster, not possible."]
        if timed and chosen.plan.cost.bound != "compute":
            lines += ["It is bound by communication: a larger batch, or faster links, would help."]
        return "\n".join(lines)
    best = min(steps, key=lambda s: s.plan.held)
    lines += [
        f"Nothing fits: {best.rung.name} is {size(best.plan.held - room)} too large for the {size(room)} there are.",
        f"What would help: {-(-int(params * state) // int(room))} or more such GPUs (for params, gradients and "
        f"optimizer alone); shorter sequences; an optimizer of 2 bytes a parameter (8-bit Adam) instead of "
        f"{job.optimizer_bytes:g}; a model of at most {size(room * gpus / state).replace(' GB', 'e9')} params.",
    ]
    return "\n".join(lines)


def quantity(text: str) -> float:
    """ "24GB", "312T", "32e9": a number with a decimal unit."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kMGT]?)(?:i?B|FLOPs|B/s|FLOPs/s)?", text, re.ASCII)
    try:
        value = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e30:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r}: write a number with a unit, such as 24GB or 165T")
    return value


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scaling.plan guide", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help=f"{', '.join(MODELS)}; or a .toml or config.json file")
    parser.add_argument("--gpus", type=integer(1), default=1, help="how many (default 1)")
    parser.add_argument("--gpu", help="a100, h100, h200, b200, ...; or a .toml file; or else say its --memory")
    parser.add_argument("--memory", type=quantity, help="of a GPU, such as 24GB")
    parser.add_argument("--flops", type=quantity, help="of a GPU in bf16, such as 165T (for the times)")
    parser.add_argument("--link", type=quantity, default=25e9, help="one-way, per GPU, in B/s (default 25G: PCIe 4)")
    parser.add_argument("--sequences", type=integer(1), default=32, help="a step, over all GPUs (default 32)")
    parser.add_argument("--seq", type=integer(1), default=2048, help="tokens a sequence (default 2048)")
    parser.add_argument(
        "--precision", choices=("bf16", "mixed"), default="bf16",
        help="bf16: params and gradients in bf16, Adam in fp32, 12 bytes a parameter; mixed: all in fp32, 16 bytes",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer-bytes", type=number(), default=8, help="a parameter (default 8: Adam; 8-bit Adam 2)"
    )
    args = parser.parse_args(arguments)
    try:
        if bool(args.gpu) == bool(args.memory):
            raise ValueError("say either --gpu or --memory")
        if args.gpu:
            gpu = chip(args.gpu)
            if gpu.kind != "gpu":
                raise ValueError(f"{gpu.name} is a {gpu.kind}: for TPUs see python -m scaling.plan --help")
        else:
            levels = (Level("node", max(args.gpus, 2), args.link),)
            gpu = Chip("GPU", "gpu", peaks=(("bf16", args.flops or 1e14),), hbm_bytes=args.memory, levels=levels)
        each = 2 if args.precision == "bf16" else 4
        job = Job(
            get(args.model), args.sequences * args.seq, args.seq, param_bytes=each, grad_bytes=each,
            optimizer_bytes=args.optimizer_bytes,
        )  # fmt: skip
        print(advice(job, gpu, args.gpus, timed=bool(args.gpu or args.flops)))
        return int(choose(climb(job, gpu, args.gpus)) is None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
