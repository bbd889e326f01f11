"""What the chapters of Part 5 share: options, the comparison with one device, the tables, and the verdict.

Only rank 0 prints. Every comparison has a limit; a chapter exits with 1 if one is exceeded.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from scaling import launch, tree
from scaling.check import check_file
from scaling.console import PROFILE, SEEDS, integer
from scaling.mesh import TIMEOUT
from scaling.profile.steps import profiled
from scaling.spec import ShardingError

EXACT, SINGLE = 1e-12, 2e-5  # relative differences allowed in float64 and float32


def options(doc: str, mesh: str, argv=None, **extra) -> argparse.Namespace:
    """The chapters' command line. `mesh` is the default one; `extra` adds options as name=(default, help)."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc.split("\n")[0], epilog=doc, formatter_class=as_written)
    parser.add_argument("--mesh", default=None, help=f"axes and sizes (default {mesh}, fitted to torchrun's ranks)")
    parser.add_argument("--device", default="cpu", help="cpu (gloo) or cuda (NCCL, a GPU for each rank)")
    parser.add_argument("--steps", type=integer(1, 10**7), default=100, help="training steps (default 100)")
    parser.add_argument("--batch", type=integer(1), default=256, help="rows of the global batch (default 256)")
    parser.add_argument("--seed", type=integer(0, SEEDS), default=0, help="seed of params and data (default 0)")
    parser.add_argument(
        "--text", default=None, help="file to learn (default: the sources of Python's standard library)"
    )
    parser.add_argument("--unchecked", action="store_true", help="do not compare the ranks before each collective")
    parser.add_argument("--profile", default="", metavar="PLACE", help=PROFILE)
    for name, (default, text) in extra.items():
        usual = "" if default == "" else f" (default {default})"
        parser.add_argument(
            f"--{name}", type=integer() if type(default) is int else type(default), default=default, help=text + usual
        )
    args = parser.parse_args(argv)
    if args.text is not None and not Path(args.text).is_file():
        parser.error(
            f"--text {args.text}: no such file; give one's path, or leave it out for Python's standard library"
        )
    if args.device not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: must be cpu, or cuda, where each rank takes a GPU of its own")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {args.device}: this machine has no GPU that torch can use; leave it out to run on the CPU"
        )
    try:
        usual = launch.parse_mesh(mesh)
        args.mesh = launch.parse_mesh(args.mesh) if args.mesh else launch.fit(usual)
    except ShardingError as error:
        parser.error(str(error))
    if absent := [axis for axis in usual if axis not in args.mesh]:
        given = ",".join(f"{axis}={size}" for axis, size in args.mesh.items())
        missing = ",".join(f"{axis}=1" for axis in absent)
        parser.error(f"--mesh {given}: lacks {', '.join(absent)}, as in {mesh}; add {missing} to do without")
    if args.batch % (devices := math.prod(args.mesh.values())):
        parser.error(
            f"--batch {args.batch}: does not divide over the {devices} devices of the mesh; try {32 * devices}"
        )
    return args


def run(main: Callable, args: argparse.Namespace) -> None:
    """Run `main(mesh, args) -> failures` on every rank, and exit with 1 if anything failed.

    Before any rank starts the chapter's own lines are checked, as by `python -m scaling.check`.
    """
    if findings := check_file(str(sys.modules["__main__"].__file__)):
        sys.exit("\n".join(map(str, findings)))
    timeout = max(TIMEOUT, args.steps)  # at the end the other ranks wait while rank 0 trains one device
    work = (profiled, args.mesh, main, args.profile, args) if args.profile else (main, args.mesh, args)
    failures = launch.start(*work, device=args.device, checked=not args.unchecked, timeout=timeout)
    sys.exit(1 if failures else 0)


class Report:
    """Prints from rank 0, beginning with the first line of the chapter's docstring, and keeps the verdict."""

    def __init__(self, mesh, doc: str = ""):
        self.mesh, self.failures, self.checks, self.began = mesh, [], 0, time.perf_counter()
        if doc:
            self.say(doc.splitlines()[0] + "\n")

    def say(self, text: str = "") -> None:
        if self.mesh.rank == 0:
            print(text, flush=True)

    def title(self, text: str) -> None:
        self.say(f"\n{text}\n{'-' * len(text)}")

    def table(self, rows, headers, **options) -> None:
        self.say(tabulate(rows, headers, "simple", disable_numparse=True, **options))

    def equal(self, rows) -> None:
        """A table of (what, got, wanted, limit): the largest difference, relative to the largest element of wanted."""
        lines = []
        for what, got, wanted, limit in rows:
            pairs = list(zip(tree.leaves(got), tree.leaves(wanted), strict=True))
            differences = [difference(a, b) for a, b in pairs]
            worst = max(differences)
            lines.append((what, f"{worst:.1e}", f"{limit:.0e}", self.judge(what, worst <= limit)))
        self.table(lines, ["compared with one device", "difference", "limit", "verdict"])

    def same(self, rows, headers) -> None:
        """A table of (what, formula, its value, what was counted): the two numbers must be one."""
        lines = [(w, f, f"{v:,.0f}", f"{c:,.0f}", self.judge(w, v == c)) for w, f, v, c in rows]
        self.table(lines, [*headers, "verdict"], colalign=("left", "left", "right", "right", "left"))

    def judge(self, what: str, ok: bool) -> str:
        self.checks += 1
        if not ok:
            self.failures.append(what)
        return "equal" if ok else "DIFFERENT"

    def done(self) -> list[str]:
        seconds = time.perf_counter() - self.began
        verdict = f"{len(self.failures)} FAILED: {', '.join(self.failures)}" if self.failures else "all hold"
        self.say(f"\nVerdict: {self.checks} comparisons, {verdict} ({seconds:.0f} s)")
        return self.failures


def difference(a, b) -> float:
    a, b = (torch.as_tensor(t, dtype=torch.float64).cpu() for t in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
