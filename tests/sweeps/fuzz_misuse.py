"""Random calls, right and wrong, held against what their types mean: no wrong number without an error.

    python tests/sweeps/fuzz_misuse.py [--cases 10000] [--seed 0] [--mesh X=2,Y=2]

Each case draws a collective or a product, a line that is legal or not, operands of any shape, dtype, device and memory
layout, buffers that fit or not or overlap, options, and a mode: under a transform of torch.func, autograd, a tensor
mode, autocast. All ranks draw the same case. It ends well if the call raises a ShardingError or a ValueError, or if

- the result is what this rank holds by the type (computed here from what all ranks contribute), in the operand's dtype;
- the operands, and the memory around a buffer, are as they were; the result shares no memory with an operand;
- derivatives are the transpose: <w, f(x)> = <f'(w), x>, summed over the ranks.

What a transform raises is loud as well, and counted by itself. Exits with 1 if a number is wrong, or if a call that is
right was refused. A test of the suite runs some hundred cases.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from misuse.collectives import collective
from misuse.draw import Draw
from misuse.products import product
from misuse.tried import report, tried
from misuse.updates import trees, update

from scaling.common.console import Parser

CASES = [collective] * 12 + [product] * 5 + [update] * 2 + [trees]


def run(mesh, cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of this rank's cases, which are the same on every rank."""

    def case(draw: Draw, number: int) -> str:
        make = draw.choice(CASES)
        return f"{make.__name__}: {make(draw, mesh, number)}"

    return tried(case, cases, str(seed))


def main() -> None:
    from scaling import launch
    from scaling.spec.sizes import parse_sizes

    parser = Parser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="X=2,Y=2")
    args = parser.parse_args()
    results = launch.run(run, parse_sizes(args.mesh, "--mesh", "a mesh"), args.cases, args.seed)
    outcomes, failures = results[0][0], sorted({text for _, found in results for text in found})
    report(outcomes, failures, f"{args.cases} cases on {args.mesh}")


if __name__ == "__main__":
    main()
