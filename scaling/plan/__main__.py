"""Plan a training run: `python -m scaling.plan --model llama3-70b --chip v5p --chips 8960 --batch 4M`.

The other commands are `guide`, `posttrain`, `published` and `serve`.
"""

import argparse
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from scaling.common.arguments import shortened
from scaling.common.console import (
    DECIMAL,
    Parser,
    chip_count,
    command,
    complain,
    complaining,
    fold_command,
    integer,
    number,
    output,
    parse_count,
    whole_count,
)  # fmt: skip
from scaling.configs import get
from scaling.configs.sources import HELP
from scaling.cost.memory import ROOM
from scaling.hardware import CHIPS, chip
from scaling.plan import explain, failures, one_layer
from scaling.plan.candidates import plans
from scaling.plan.job import (
    AXES,
    DTYPES,
    FRAMEWORKS,
    IN_BF16,
    OVERLAPS,
    POLICIES,
    REDUCES,
    SCHEDULES,
    SHARDS,
    Fixed,
    Job,
    run_bytes,
)
from scaling.plan.report import Budget, as_dict, folded, text, whole_runs

BATCH = 2**22  # tokens of a step if none are given, as in Part 6
HELD = "a parameter", "its gradient", "its state with masters"
COMMANDS = {
    "guide": "scaling.plan.guide", "posttrain": "scaling.plan.posttrain", "published": "scaling.plan.published",
    "serve": "scaling.plan.serve.command",
}  # fmt: skip
EXAMPLES = """Examples:

    python -m scaling.plan --model llama3-70b --chip v5p --chips 8960 --batch 4M
    python -m scaling.plan --model llama3-8b --chip h100:hbm2e --chips 64 --batch 1M --seq 8192 --explain
    python -m scaling.plan --model mixtral-8x7b --chip gb200 --chips 72 --batch 2M --dtype fp8 --mesh expert=8
    python -m scaling.plan --model llama3-8b --chip mine.toml --chips 4 --batch 256k --optimizer-bytes 2
    python -m scaling.plan --model llama3-405b --chip h100 --chips 16384 --batch 16M --json

"""


def mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Read `tensor=8,pipe=16`."""
    found: list[tuple[str, int]] = []
    for part in text.split(","):
        axis, _, n = part.partition("=")
        if axis.strip() not in AXES or not re.fullmatch(r"0*[1-9]\d{0,8}", n.strip(), re.ASCII):
            raise argparse.ArgumentTypeError(
                f"{shortened(part)!r} is not an axis with its size; fix: write tensor=8, say; the axes are "
                f"{', '.join(AXES)}"
            )
        if axis.strip() in dict(found):
            raise argparse.ArgumentTypeError(f"{axis.strip()} is given twice; fix: give each axis one size")
        found.append((axis.strip(), int(n)))
    return tuple(found)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m scaling.plan",
        description="Choose the mesh to train a model on, and say why (Parts 5, 6 and 12)",
        epilog=EXAMPLES + "For one machine, or no idea where to begin: python -m scaling.plan guide --help\n\n"
        "Published runs beside the planner: python -m scaling.plan published\n\n"
        "To serve a model: python -m scaling.plan serve --help\n\n"
        "To divide chips between writing and training on answers: python -m scaling.plan posttrain --help\n\n"
        "Exit status: 0, a plan was found; 1, nothing fits or no mesh suits; 2, an argument is wrong.",
    )  # fmt: skip
    parser.add_argument("--model", required=True, help=HELP)
    parser.add_argument("--chip", "--gpu", required=True, help=CHIPS)
    parser.add_argument("--chips", "--gpus", required=True, type=chip_count, help="number of chips")
    parser.add_argument(
        "--batch", type=whole_count, help="tokens per step; k, M and G are powers of two (default: sequences of 4M)"
    )
    parser.add_argument("--seq", type=whole_count, default=4096, help="tokens per sequence (default 4096)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the layers' matmuls (default bf16)")
    for name, what, held in zip(("param", "grad", "optimizer"), HELD, IN_BF16, strict=True):
        usual = f"(default: what a run keeps, {held:g} in bf16)"
        parser.add_argument(f"--{name}-bytes", type=number(0, 1000), help=f"bytes of {what} {usual}")
    parser.add_argument(
        "--headroom", type=number(1e-6, 1), default=ROOM, help=f"fraction of the memory to plan with (default {ROOM})"
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, default="this",
        help="whose memory to count: torchtitan and megatron hold whole logits, and more (default this code's)",
    )  # fmt: skip
    parser.add_argument(
        "--overlap",
        choices=OVERLAPS,
        default="max",
        help="what may overlap in the bound: max, everything; sum, all but communication over different axes; "
        "none, nothing (default max)",
    )
    parser.add_argument("--mesh", type=mesh, default=(), help="fix axes, as in tensor=8,pipe=16; the others stay open")
    parser.add_argument(
        "--pods", type=integer(1), help="number of TPU pods, joined by the datacenter network (default: as needed)"
    )
    parser.add_argument(
        "--zero", type=int, choices=(1, 3), help="ZeRO stage: 1, params whole; 3, sharded (default: either)"
    )
    parser.add_argument("--remat", choices=POLICIES, help="activation checkpointing (default: the fastest that fits)")
    parser.add_argument("--microbatches", type=integer(1), help="number of microbatches (default: the fastest)")
    parser.add_argument(
        "--reduce", choices=REDUCES, help="with ZeRO-3, when gradients are scattered: after each microbatch, or once"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, help="schedule of the pipeline (default: the fastest)")
    parser.add_argument(
        "--tokens",
        type=lambda t: parse_count(t, DECIMAL),
        default=15e12,
        help="tokens to train on; k, M, B or G, T are powers of ten (default 15T)",
    )
    parser.add_argument(
        "--mfu", type=number(1e-6, 1), default=0.4, help="model FLOPs utilization to compare with (default 0.4)"
    )
    parser.add_argument("--price", type=number(), help="dollars per chip-hour (default: the book's, if it has one)")
    parser.add_argument(
        "--top", type=integer(), default=4, help="how many other combinations of axes to show (default 4)"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also show one layer on a time axis, the alternatives, and what would change the answer; with --run the "
        "lines of the run's own step and what each costs",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="plan what scaling.train runs, which shards over X alone, and print the command, with what its own step "
        "moves and holds",
    )
    parser.add_argument("--failures", action="store_true", help="also say what failures cost, and how often to save")
    parser.add_argument(
        "--mtbf", type=number(1, 1e9), default=failures.MTBF,
        help=f"hours between failures of one chip and its share of a host (default {failures.MTBF:,.0f}: Llama 3's)",
    )  # fmt: skip
    parser.add_argument(
        "--restart", type=number(0, 1e5), default=10, help="minutes from a failure until it computes (default 10)"
    )
    parser.add_argument(
        "--save", type=number(1e-3, 1e6), help="seconds for which a save stops the run (default: by the state's bytes)"
    )
    parser.add_argument("--svg", type=output, metavar="FILE", help="draw one layer on a time axis into this file")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


@complaining(ValueError, ImportError, OSError, code=2)
def main(arguments: list[str] | None = None) -> int:
    """Plan a training run, or run one of the other commands; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-"):
        if arguments[0] not in COMMANDS:
            raise ValueError(
                f"there is no command {shortened(arguments[0])!r}\n  fix: choose one of {', '.join(COMMANDS)}, or "
                "begin with an option such as --model to plan a training run"
            )
        return import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    args = _parser().parse_args(arguments)
    given = args.param_bytes, args.grad_bytes, args.optimizer_bytes
    param, grad, state = (kept if n is None else n for n, kept in zip(given, run_bytes(args.dtype), strict=True))
    batch = args.batch or max(1, BATCH // args.seq) * args.seq
    job = Job(
        get(args.model), batch, args.seq, args.dtype, param, grad, state, args.overlap, args.headroom,
        ("fsdp",) if args.run else SHARDS, args.framework,
    )  # fmt: skip
    fixed = Fixed(args.mesh, args.remat, args.microbatches, args.schedule, None, args.zero, args.pods, args.reduce)
    hardware = chip(args.chip)
    hardware.flops(job.dtype)
    try:
        found = plans(job, hardware, args.chips, fixed)
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr) if args.json else complain(f"no plan: {error}")
        return 1
    best, done = found[0], found[0].fits
    budget = Budget(args.tokens, args.mfu, args.price)
    parts: dict[str, Any] = {}
    if args.explain and done:
        parts["explained"] = explain.as_dict(found, budget) if args.json else explain.text(found, budget)
    if args.failures and done:
        state = (job.param_bytes + job.optimizer_bytes) * job.work.params / args.chips
        broken = failures.of_job(args.chips, args.save or failures.save_seconds(state), args.mtbf, 60 * args.restart)
        days = whole_runs(best, budget)["forecast"]["days"]
        lost = failures.as_dict(broken, days) if args.json else folded(failures.failure_lines(broken, days))
        parts["failures"] = lost
    if args.run and done:
        from scaling.plan.own_run import own_run  # it counts the run's own step, which takes torch

        said = own_run(job, hardware, args.chips, best.layout, args.model, args.explain, fixed)
        shown = (fold_command(line) if line.lstrip().startswith("python ") else folded([line]) for line in said)
        parts["run"] = said if args.json else "\n".join(shown)
    if args.svg and done:
        title = f"One layer of {job.config.name} on {args.chips:,} {hardware.name}: {best.name}"
        Path(args.svg).write_text(one_layer.svg_of(one_layer.layer_passes(best), title), encoding="utf-8")
    if args.json:
        print(json.dumps(as_dict(found, budget, args.top) | parts, indent=1))
    else:
        print("\n\n".join([text(found, budget, args.top), *parts.values()]))
    return int(not done)


if __name__ == "__main__":
    sys.exit(command(main))
