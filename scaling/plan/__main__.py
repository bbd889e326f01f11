"""`python -m scaling.plan --model llama3-70b --chip v5p --chips 8960 --batch 4M`; `python -m scaling.plan guide`."""

import argparse
import json
import math
import re
import sys

from scaling.configs import MODELS, get
from scaling.console import command, integer, number
from scaling.cost.transformer import REMAT
from scaling.hardware import chip, chips
from scaling.plan import guide
from scaling.plan.evaluate import OVERLAPS, Job
from scaling.plan.report import Budget, as_dict, text
from scaling.plan.search import fits, plans
from scaling.sizes import shortened

BINARY = {"": 1, "k": 2**10, "M": 2**20}
MOST = 1e20  # of anything that is counted here
DECIMAL = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def count(text: str, units: dict = BINARY) -> float:
    """ "4M" tokens of a batch are 4 * 2^20, as they come in sequences of 2^n; of a data set "15T" is 15e12."""
    match = re.fullmatch(rf"([\d.,]+(?:e\d+)?)([{''.join(units)}]?)", text, re.ASCII)
    try:
        value = float(match[1].replace(",", "")) * units[match[2]] if match else math.inf
    except ValueError:
        value = math.inf
    if not 0 < value <= MOST:
        about = f"is no number from 1 to {MOST:g}: write 4M, 4194304 or 4e6"
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} {about}")
    return value


def whole(text: str) -> int:
    return int(count(text))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scaling.plan", description="The mesh to train a model on, and why (Parts 5 and 6)",
        epilog="For one machine, or no idea where to begin: python -m scaling.plan guide --help",
    )  # fmt: skip
    parser.add_argument("--model", required=True, help=f"{', '.join(MODELS)}; or a .toml or config.json file")
    parser.add_argument("--chip", required=True, help=f"{', '.join(chips())}; or a .toml file")
    parser.add_argument("--chips", required=True, type=whole)
    parser.add_argument("--batch", required=True, type=whole, help="tokens a step; k and M are powers of two: 4M")
    parser.add_argument("--seq", type=whole, default=4096, help="tokens a sequence (default 4096)")
    parser.add_argument("--tokens", type=lambda t: count(t, DECIMAL), default=15e12, help="to train on (default 15T)")
    parser.add_argument("--mfu", type=number(1e-6, 1), default=0.4, help="utilization to expect (default 0.4)")
    parser.add_argument("--price", type=number(), help="dollars per chip and hour (default: the book's, if it has one)")
    parser.add_argument(
        "--pods", type=integer(1), help="of a TPU, joined by the datacenter's network (default: as needed)"
    )
    parser.add_argument("--remat", choices=REMAT, help="checkpointing (default: as little as fits)")
    parser.add_argument("--overlap", choices=OVERLAPS, default="max", help="max: everything; sum: not the axes; none")
    parser.add_argument("--dtype", default="bf16", help="of matmuls and collectives (default bf16)")
    parser.add_argument("--optimizer-bytes", type=number(), default=8, help="a parameter (default 8: Adam's moments)")
    parser.add_argument("--top", type=integer(), default=6, help="how many other meshes to show (default 6)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["guide"]:
        return guide.main(arguments[1:])
    args = parser().parse_args(arguments)
    try:
        job = Job(
            get(args.model), args.batch, args.seq, args.dtype, optimizer_bytes=args.optimizer_bytes,
            overlap=args.overlap,
        )  # fmt: skip
        hardware = chip(args.chip)
        budget = Budget(args.tokens, args.mfu, args.price)
        found = plans(job, hardware, args.chips, args.pods, args.remat)
        if not found:
            raise ValueError(f"no mesh of {args.chips:,} {hardware.name} suits {job.config.name}")
        show = as_dict if args.json else text
        out = show(job, hardware, args.chips, found, budget, args.top)
        fit = fits(found[0], hardware)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(out, indent=1) if args.json else out)
    return int(not fit)


if __name__ == "__main__":
    sys.exit(command(main))
