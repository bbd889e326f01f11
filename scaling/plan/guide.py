"""Choose the strategy to begin with on a few GPUs: one GPU, DDP, FSDP, checkpointing, tensor parallelism (Part 5).

    python -m scaling.plan guide --model llama3-8b --gpu h100 --gpus 8
    python -m scaling.plan guide --model my_config.json --memory 24GB --gpus 2

The ladder is climbed until the model fits: each rung splits more, and communicates more.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from scaling.common.arguments import shortened, whole
from scaling.common.console import Parser, chip_count, complaining, number, parse_count, significant, table, whole_count
from scaling.configs import get
from scaling.configs.sources import HELP
from scaling.hardware import CHIPS, Chip, Level, chip
from scaling.models.leaves import counted_without
from scaling.plan.candidates import plans, search
from scaling.plan.evaluate import Estimate
from scaling.plan.fitting import Frugal, frugal_ways, help_needed
from scaling.plan.job import AXES, Fixed, Job, run_bytes
from scaling.plan.report import folded, several, size, three_digits
from scaling.plan.work import LayerWork


@dataclass(frozen=True)
class Rung:
    """A way to train: how many GPUs each axis gets, the checkpointing, and the stage of ZeRO."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    remat: str = "none"
    how: str = ""
    zero: int = 0


TYPES = {
    "dp": "In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]      chapters/05_dp.py",
    "fsdp": "In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]      chapters/05_fsdp.py",
    "tensor": "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]      chapters/05_fsdp_tp.py",
    "expert": "tokens go to their experts and come back: AllToAll      chapters/05_moe.py",
    "pp": "stages of layers, one after the other      chapters/05_pp.py",
}


def ladder(gpus: int, node: int, model: LayerWork) -> Iterator[Rung]:
    """Yield the rungs for `gpus` GPUs in nodes of `node` with fast links.

    Within a node experts are divided if the model has them, and else heads and features.
    """
    yield Rung("one GPU", (), how="no communication")
    if gpus == 1:
        yield Rung("one GPU + checkpointing", (), "block", "no communication")
        return
    yield Rung("DDP", (("data", gpus),), how=TYPES["dp"])
    yield Rung("FSDP", (("fsdp", gpus),), how=TYPES["fsdp"], zero=3)
    yield Rung("FSDP + checkpointing", (("fsdp", gpus),), "block", TYPES["fsdp"], 3)
    axis, name, parts = ("expert", "EP", model.experts_count) if model.copies else ("tensor", "TP", model.heads)
    inner = [Y for Y in (2, 4, 8) if gpus % Y == 0 and node >= Y and parts % Y == 0]
    for Y in inner:
        sizes = (("fsdp", gpus // Y), (axis, Y))
        yield Rung(
            f"FSDP + checkpointing + {name} {Y}", sizes, "block", TYPES[axis], 3 if gpus > Y or model.copies else 1
        )
    Y = max(inner, default=1)
    for P in (2, 4, 8, 16):
        if gpus > node and gpus % (P * Y) == 0 and model.L >= P:
            sizes = (("pipe", P), ("data", gpus // (P * Y)), (axis, Y))
            yield Rung(f"{P} stages + {name} {Y} + ZeRO-1", sizes, "block", TYPES["pp"], 1)


@dataclass(frozen=True)
class Climbed:
    """A rung with its estimate."""

    rung: Rung
    found: Estimate


def climb(job: Job, gpu: Chip, gpus: int) -> list[Climbed]:
    """Return every rung, each with the microbatches that make it fastest, or smallest if it does not fit."""
    whole(gpus=gpus)
    steps = []
    for rung in ladder(gpus, gpu.node_gpus, job.work):
        sizes = dict.fromkeys(AXES, 1) | dict(rung.sizes)
        chips = gpus if rung.sizes else 1
        if found := search(job, gpu, chips, Fixed(tuple(sizes.items()), rung.remat, zero=rung.zero)).found:
            steps.append(Climbed(rung, found[0]))
    if not steps:
        raise ValueError(
            f"{job.sequences:,} sequences are too few for {gpus} GPUs; fix: give --sequences {gpus} or more"
        )
    return steps


def choose_rung(steps: list[Climbed]) -> Climbed | None:
    """Return the lowest rung that fits, uses all GPUs and is at most 10% slower than the fastest; None if none fits."""
    most = max(step.found.chips for step in steps)
    able = [step for step in steps if step.found.fits and step.found.chips == most]
    fastest = min((step.found.forecast for step in able), default=0.0)
    return next((step for step in able if step.found.forecast <= 1.1 * fastest), None)


def frugal_rungs(job: Job, gpu: Chip, gpus: int) -> list[tuple[Frugal, Climbed]]:
    """Return the ways to train in less memory that fit, each with its rung."""
    tried = [(way, choose_rung(climb(way.job, gpu, gpus))) for way in frugal_ways(job)]
    return [(way, chosen) for way, chosen in tried if chosen]


def advice(job: Job, gpu: Chip, gpus: int, timed: bool = True) -> tuple[str, bool]:
    """Return the ladder as a table with the choice, or with what would help; and whether anything fits."""
    steps = climb(job, gpu, gpus)
    free, params = steps[0].found.room, job.work.params
    rows = []
    for step in steps:
        own, layout = step.found.held, step.found.layout
        states = own.params + own.grads + own.optimizer
        row = [
            step.rung.name,
            layout.chips,
            layout.microbatches,
            *(size(float(x)) for x in (states, own.total - states, own.total)),
        ]
        rows.append([*row, "yes" if step.found.fits else "no", *([three_digits(step.found.forecast)] if timed else [])])
    head = ["", "GPUs", "microbatches", "params, grads,\noptimizer", "activations,\nworking", "a GPU holds", "fits"]
    state = job.param_bytes + job.grad_bytes + job.optimizer_bytes
    lines = [
        f"{job.config.name} ({significant(params)} params, {state:g} bytes each) on {gpus:,} x {gpu.name} of "
        f"{size(gpu.hbm_bytes)},",
        f"of which {job.headroom:.0%} count; {several(job.sequences, 'sequence')} of {job.seq:,} a step",
        *counted_without(job.config),
        "",
        table(rows, head + ["step, s"] * timed),
        "",
    ]
    if chosen := choose_rung(steps):
        lines += [f"Take: {chosen.rung.name}", f"      {chosen.rung.how}"]
        if chosen.rung.sizes and steps[0].found.fits and not steps[0].rung.sizes:
            lines += ["The model fits one GPU: more of them make it faster, not possible."]
        if timed and chosen.found.cost.bound != "compute":
            lines += ["It is bound by communication: a larger batch, or faster links, would help."]
        return folded(lines), True
    best = min(steps, key=lambda step: float(step.found.held.total))
    if frugal := frugal_rungs(job, gpu, gpus):
        way, chosen = frugal[0]
        over = size(float(best.found.held.total) - free)
        lines += [
            f"Take: {way.name}, {chosen.rung.name}",
            f"      all params with Adam do not fit: {best.rung.name} is {over} too large",
        ]
        for way, rung in frugal:
            held = size(float(rung.found.held.total))
            lines.append(f"  {way.name}: {held} a GPU ({rung.rung.name}); {way.says}")
        return folded(lines), True
    over = size(float(best.found.held.total) - free)
    lines += [f"Nothing fits: {best.rung.name} is {over} too large for the {size(free)}.", "What would help:"]
    lines += [f"  {helps}" for helps in help_needed(plans(job, gpu, gpus))["helps"]]
    return folded([*lines, f"  a model of at most {significant(free * gpus / state)} params"]), False


def quantity(text: str) -> float:
    """Read a number of bytes: "24GB" and "32e9" are decimal, "24GiB" is binary."""
    unit = 1024 if text.endswith("iB") else 1000
    units = {name: unit**i for i, name in enumerate(("", "k", "M", "G", "T"))}
    try:
        return parse_count(re.sub(r"\s+(?=[kMGTB])|i?B$", "", text, flags=re.ASCII), units)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no number of bytes; fix: write it as 24GB") from error


def _parser() -> Parser:
    """Return the parser of the guide's arguments."""
    parser = Parser(prog="python -m scaling.plan guide", description=__doc__)
    parser.add_argument("--model", required=True, help=HELP)
    parser.add_argument("--gpus", "--chips", type=chip_count, default=1, help="number of GPUs (default 1)")
    parser.add_argument("--gpu", "--chip", help=f"{CHIPS}; or give its --memory instead")
    parser.add_argument("--memory", type=quantity, help="memory of one GPU, such as 24GB")
    parser.add_argument(
        "--sequences", type=whole_count, help="sequences per step, over all GPUs (default 32, or one for each GPU)"
    )
    parser.add_argument("--seq", type=whole_count, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument(
        "--precision", choices=("bf16", "mixed"), default="bf16",
        help="bf16: params in bf16, gradients and AdamW with masters in fp32, as in scaling.train, 18 bytes a param; "
        "mixed: all in fp32, 16 bytes",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer-bytes",
        type=number(),
        help="bytes of optimizer state per param (default: 12 in bf16 and 8 in mixed; 8-bit Adam has 2)",
    )
    return parser


@complaining(ValueError, code=2)
def main(arguments: list[str]) -> int:
    """Run the guide; return the exit status."""
    args = _parser().parse_args(arguments)
    if not args.gpu and not args.memory:
        raise ValueError("which GPU?\n  fix: give its name, as in --gpu rtx4090, or its memory, as in --memory 24GB")
    if args.memory and args.memory < 1e9:
        raise ValueError(f"--memory {args.memory:g} is less than 1 GB\n  fix: write the unit, as in --memory 24GB")
    if args.gpu and args.memory:
        raise ValueError("--gpu says how much memory there is, so does --memory\n  fix: leave one of the two out")
    if args.gpu:
        gpu = chip(args.gpu)
        if gpu.kind != "gpu":
            plan = f"python -m scaling.plan --model {args.model} --chip {gpu.name} --chips {args.gpus}"
            raise ValueError(f"the guide knows GPUs, and {gpu.name} has a torus of links\n  fix: ask {plan}")
    else:
        levels = (Level("node", max(args.gpus, 2), 25e9),)  # not timed
        gpu = Chip("GPU", "gpu", peaks=(("bf16", 1e14),), hbm_bytes=args.memory, levels=levels)
    param, grad, state = run_bytes("bf16" if args.precision == "bf16" else "fp32")
    sequences = args.sequences or max(32, args.gpus)
    job = Job(
        get(args.model), sequences * args.seq, args.seq, param_bytes=param, grad_bytes=grad,
        optimizer_bytes=state if args.optimizer_bytes is None else args.optimizer_bytes,
    )  # fmt: skip
    text, fits = advice(job, gpu, args.gpus, timed=bool(args.gpu))
    print(text)
    return int(not fits)
