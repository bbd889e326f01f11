"""Runs saved on each of five meshes, resumed on each and on one device. Slower than its test in the suite:

    python tests/train/reshard_sweep.py

Params, moments, step, data position and seed that each rank begins with are compared, bit by bit, with what torch's
own reader of checkpoints finds; the sequences of the next 50 steps with those of a run that was never stopped; and what
each rank reads with what it holds. The layers do not divide evenly by the stages.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from runs import write_text
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from scaling import launch, tree
from scaling.common.console import Parser
from scaling.configs import Config
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import arranged_layers, slots_of
from scaling.train import dcp
from scaling.train.batches import inputs
from scaling.train.loop import begun, run, state_specs
from scaling.train.settings import Settings, optimizer_of

MODEL = Config("reshard", 3, 64, 128, 4, 2, 16, 256)
MESHES = [{"X": 4}, {"X": 2, "Y": 2}, {"P": 2, "Y": 2}, {"Z": 2, "X": 2}, {"C": 2, "Y": 2}]
STEPS, AHEAD = 3, 50


class Counted:
    """A block of which every element that is taken is counted."""

    def __init__(self, block: torch.Tensor, taken: list[int]):
        self.block, self.taken = block, taken

    def __getitem__(self, at):
        found = self.block[at]
        self.taken.append(found.nbytes)
        return found


def read_calls() -> int:
    """Bytes that this process has read from files by calls; what is mapped into memory is not among them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def trained(mesh, settings: Settings) -> None:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        run(mesh, settings)


def resumed(mesh, settings: Settings, whole: dict) -> tuple[list[str], tuple[int, int, int], list]:
    """(what differs, bytes taken of blocks, read by calls, and held; the sequences to come)"""
    taken, real = [], dcp.ShardReader.__call__
    dcp.ShardReader.__call__ = lambda self, *block: Counted(real(self, *block), taken)
    optimizer, types = optimizer_of(settings), transformer.specs(settings.model, mesh)
    begun_with = read_calls()
    try:
        state, step = begun(settings, mesh, optimizer, types)
    finally:
        dcp.ShardReader.__call__ = real
    calls = read_calls() - begun_with
    slots, specs = slots_of(settings.model, mesh, None), state_specs(optimizer, types)
    padded = [arranged_layers(W, slots) if "layers" in where else W for where, W in tree.named_leaves(whole).items()]
    wanted = tree.shard(tree.unflatten(whole, padded), specs, mesh)
    data = state.pop("data")
    names, pairs = tree.named_leaves(wanted), zip(tree.leaves(state), tree.leaves(wanted), strict=True)
    wrong = [where for where, (a, b) in zip(names, pairs, strict=True) if not torch.equal(a, b) or a.dtype != b.dtype]
    wrong += [] if (step, data) == (STEPS, {"sequences": STEPS * settings.batch, "seed": 7}) else ["step, data"]
    train, _ = inputs(settings)
    coming = [train.chosen(data["sequences"] + i * settings.batch) for i in range(AHEAD)]
    return wrong, (sum(taken), calls, tree.nbytes(state)), coming


def resharded(start, folder: Path, model: Config, meshes: list[dict]) -> Iterator[tuple[dict, dict, set, float, int]]:
    """(source, target, what differs, bytes read over those held, bytes of headers and the index) of each pair of
    meshes; `start(fn, mesh, *args)` gives what each rank returns."""
    text = write_text(folder)
    for source in meshes:
        (out := folder / "-".join(f"{axis}{size}" for axis, size in source.items())).mkdir()
        given = {"batch": 8, "seq": 32, "steps": STEPS, "seed": 7, "eval_every": 0, "eval_batches": 1, "save_every": 0}
        settings = Settings(model, text, str(out), microbatches=2, resume=True, **given)
        start(trained, source, settings)
        dcp_to_torch_save(out / f"step-{STEPS:06d}", folder / "whole.pt")
        whole = torch.load(folder / "whole.pt")
        order = [inputs(settings)[0].chosen(i * settings.batch) for i in range(STEPS, STEPS + AHEAD)]
        for target in [*meshes, {"X": 1}]:
            results = start(resumed, target, settings, whole)
            wrong = {where for differing, _, _ in results for where in differing}
            wrong |= {"sequences"} if any(coming != order for *_, coming in results) else set()
            ratio = max(taken / held for _, (taken, _, held), _ in results)
            yield source, target, wrong, ratio, max(calls for _, (_, calls, _), _ in results)


def main() -> int:
    bad, most, number = 0, 0.0, 0
    for source, target, wrong, ratio, calls in resharded(
        launch.run, Path(tempfile.mkdtemp(prefix="reshard-")), MODEL, MESHES
    ):
        bad, most, number = bad + bool(wrong), max(most, ratio), number + 1
        print(f"{source!s:>18} -> {target!s:<18} {'; '.join(sorted(wrong)) or 'bitwise'}; read {ratio:.3f} of its "
              f"shards' bytes, and {calls:,} of headers and the index", flush=True)  # fmt: skip
    print(f"{number - bad} of {number} bitwise; a rank reads at most {most:.3f} of its own bytes")
    return 0 if not bad and most <= 1.05 else 1


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
