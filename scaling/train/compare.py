"""Compare what runs have written: `python -m scaling.train compare A B`, and `python -m scaling.train verify RUN`.

`compare` finds the first step, and the first leaf, at which two runs differ. It compares the options that affect a
step, the loss and gradient norm of each step, each leaf's gradient norm where both runs had --norms, and the leaves of
the checkpoints that both runs have.

`verify` compares each file of a run's checkpoints with its checksum. Loading a step checks that each file that a rank
reads belongs to the step, and compares the checksums of blocks that it reads whole. Two kinds of damage are not found
there: on another mesh ranks may read parts of blocks, which no checksum covers, and a disk can lose data that nobody
reads for months.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from scaling.common.console import Parser, complaining
from scaling.configs.sources import MODEL
from scaling.models.text import NAME
from scaling.train import checkpoint, dcp
from scaling.train.durable import step_name, step_numbers
from scaling.train.origin import config_of_run, options_of
from scaling.train.progress import read_records
from scaling.train.shard_file import NO_SUMS, ShardReader

# Options that do not affect a step:
BESIDE = ("out", "save_every", "keep", "eval_every", "eval_batches", "guard_every", "resume", "chip", "keep_weights")
BESIDE += ("compile", "norms", "profile", "sample", "tensorboard", NAME)


def _common_records(a: Path, b: Path, name: str) -> Iterator[tuple[dict, dict]]:
    """Yield both runs' records of each step that both have in a JSON-lines file; the last record of a step counts."""
    ours, theirs = (
        {record["step"]: record for _, record in (read_records(path) if path.exists() else ()) if record}
        for path in (a / name, b / name)
    )
    yield from ((ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys()))


def values_differ(a: float | None, b: float | None, tolerance: float) -> bool:
    """Return whether two values differ by more than the relative tolerance; None is the norm of a skipped step."""
    return a != b and (a is None or b is None or not abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _options_of(run: Path) -> dict:
    """Return a run's options, with the model's sizes in place of its name if the run keeps a copy of the model."""
    options = options_of(run)
    if options.get("model") == MODEL:
        options["model"] = str(config_of_run(run).with_(name="", source=""))
    return options


def differences(a: Path, b: Path, tolerance: float) -> Iterator[str]:
    """Yield each option that differs, and the first difference in losses, gradient norms and checkpoints.

    Raises:
        ValueError: A folder is not that of a run.
    """
    ours, theirs = _options_of(a), _options_of(b)
    for name in sorted({*ours} | {*theirs}):
        if name not in BESIDE and ours.get(name) != theirs.get(name):
            yield f"option {name}: {ours.get(name, 'none')} and {theirs.get(name, 'none')}"
    for one, other in _common_records(a, b, "metrics.jsonl"):
        if found := [key for key in ("loss", "grad_norm") if values_differ(one.get(key), other.get(key), tolerance)]:
            yield f"step {one['step']}: {found[0]} {one.get(found[0])!r} and {other.get(found[0])!r}"
            break
    for one, other in _common_records(a, b, "norms.jsonl"):
        x, y = one.get("norms", {}), other.get("norms", {})
        if found := [leaf for leaf in x if leaf in y and values_differ(x[leaf], y[leaf], tolerance)]:
            yield f"step {one['step']}: the gradient of {found[0]}: norms {x[found[0]]!r} and {y[found[0]]!r}"
            break
    for step in sorted({*checkpoint.complete_steps(a)} & {*checkpoint.complete_steps(b)}):
        if found := differing_leaf(a, b, step, tolerance):
            yield f"checkpoint of step {step}: {found}"
            break


def differing_leaf(a: Path, b: Path, step: int, tolerance: float) -> str:
    """Return how the first differing leaf of a checkpoint differs, params before moments; "" if none does."""
    paths = [folder / step_name(step) for folder in (a, b)]
    ours, theirs = map(dcp.saved_leaves, paths)
    for name in sorted(ours, key=lambda name: (not name.startswith("params."), name)):
        if name not in theirs:
            return f"{name} is in {a} alone"
        one, other = (
            dcp.whole_leaf(path, name, saved[name]) for path, saved in zip(paths, (ours, theirs), strict=True)
        )
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
        same = (one == other) | (one.isnan() & other.isnan())
        one, other = one.double(), other.double()
        far, finite = (one - other).abs(), one.isfinite() & other.isfinite()
        wrong = ~same & ~(finite & (far <= tolerance * torch.maximum(one.abs(), other.abs())))
        if wrong.any():
            most = far[wrong].nan_to_num(nan=torch.inf).max().item()
            return f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, by up to {most:.3g}"
    return ""


def damaged_files(folder: Path, step: int) -> list[str]:
    """Return a line for each damaged file of a step.

    Raises:
        FileNotFoundError: There is no such step.
    """
    if step not in step_numbers(folder):
        raise FileNotFoundError(f"{folder / step_name(step)}: there is no such step\n  fix: name one that is there")
    path = folder / step_name(step)
    try:
        sums = checkpoint.index(folder, step).get("files", NO_SUMS)
        leaves = dcp.saved_leaves(path, sums)
    except (ValueError, FileNotFoundError) as error:
        return [str(error).splitlines()[0]]
    found, read = [], ShardReader(path, verified=True, sums=sums)
    for name, saved in leaves.items():
        for block in saved.blocks:
            try:
                read(name, saved, block, True)
            except ValueError as error:
                found.append(str(error).splitlines()[0])
    return [*dict.fromkeys(found)]  # a file that is missing is so for each of its leaves


@complaining(ValueError, OSError, code=2)
def main(argv=None) -> int:
    """Run the command compare; return 1 if anything but an option differs, else 0."""
    what = "find the first step, and the first leaf, at which two runs differ"
    parser = Parser(prog="python -m scaling.train compare", description=what)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="the two runs' folders (their --out)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative tolerance (default 0: equal to the bit)")
    args = parser.parse_args(argv)
    first, second = args.runs
    found = [*differences(first, second, args.tolerance)]
    print("\n".join(found) or "no difference")
    return 1 if any(not text.startswith("option") for text in found) else 0


@complaining(OSError, code=2)
def verify_run(argv=None) -> int:
    """Run the command verify; return 1 if a checkpoint is damaged."""
    what = "compare each file of a run's checkpoints with its checksum"
    parser = Parser(prog="python -m scaling.train verify", description=what)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=int, help="this checkpoint alone (default: all)")
    args = parser.parse_args(argv)
    if not (steps := step_numbers(args.run) if args.step is None else [args.step]):
        checkpoint.latest(args.run)  # raises
    found = {step: damaged_files(args.run, step) for step in steps}
    for step, lines in found.items():
        print(f"step {step}: " + ("\n  ".join(["damaged", *lines]) if lines else "whole"))
    return int(any(found.values()))
