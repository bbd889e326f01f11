"""The loop of `python -m scaling.train` against a plain one in PyTorch: time from one step to the next, all included.

    python tests/benchmarks/versus_loop.py                       # one rank, beside a loop as nanoGPT's
    python tests/benchmarks/versus_loop.py --ranks 4             # fully_shard in the plain loop

Ours is `scaling.train.loop.run` as the command runs it: data, step, clipping, guards, metrics.jsonl, progress. Theirs
is an nn.Module (`native.Model`), cross-entropy, clip_grad_norm_, fused AdamW in two groups, a rate by step,
batches from an array of uint16, and a print of the loss. Both have the same initial values, batches and schedule, and
their losses must agree at every step. Runs of both sides in turn; of each run the first two steps do not count.
"""

import contextlib
import math
import os
import statistics
import sys
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy
import torch
import torch.nn.functional as F
from native import Model, fully_sharded
from report import beside, machine, options, show

from scaling import launch
from scaling.collectives import all_reduce
from scaling.configs import Config, get
from scaling.models import transformer as model
from scaling.train import loop
from scaling.train.batches import inputs
from scaling.train.progress import Progress
from scaling.train.settings import Settings

SIZES = {
    "tiny": (get("tiny"), 8, 256),
    "short": (Config("short", 4, 512, 1408, 8, 4, 64, 256), 8, 64),  # few tokens a param: more to send than to compute
}
AGREE = 1e-3  # relative, of the losses
SKIPPED = 2


def ours(mesh, settings: Settings) -> list[tuple[float, float]]:
    """(time, loss) of the end of each step."""
    seen, say = [], Progress.say

    def heard(self, record):
        say(self, record)
        seen.append((perf_counter(), record["loss"]))

    Progress.say = heard
    try:
        loop.run(mesh, settings)
    finally:
        Progress.say = say
    return seen


def theirs(mesh, settings: Settings) -> list[tuple[float, float]]:
    """The same of the plain loop."""
    s, config, X = settings, settings.model, mesh.sizes["X"]
    net = Model(model.init(config, s.seed), config, s.seq)
    if X > 1:
        warnings.simplefilter("ignore")  # of torch's own code
        fully_sharded(net, net.blocks, mesh.device_mesh)
    decayed, rest = [], []
    for name, W in net.named_parameters():
        (decayed if W.dim() > 1 and not name.startswith("embed") else rest).append(W)
    groups = [{"params": decayed, "weight_decay": s.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.95), fused=True)
    data = numpy.frombuffer(Path(s.data).read_bytes(), numpy.uint8).astype(numpy.uint16)
    order, _ = inputs(s)
    rows, seen = slice(mesh.rank * s.batch // X, (mesh.rank + 1) * s.batch // X), []
    for step in range(s.steps):
        starts = [number * s.seq for number in order.chosen(step * s.batch)[rows]]
        windows = numpy.stack([data[start : start + s.seq + 1] for start in starts]).astype(numpy.int64)
        x, y = torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])
        gone = max(0, step - s.warmup) / max(1, s.steps - s.warmup)
        rate = s.lr * min(1, (step + 1) / s.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * gone)))
        for group in update.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), s.clip)
        update.step()
        update.zero_grad(set_to_none=True)
        mean = loss.detach() / X
        mean = (all_reduce("Loss[] {U_X} -> Loss[]", mean, mesh) if X > 1 else mean).item()
        print(f"step {step + 1}: loss {mean:.4f}")
        seen.append((perf_counter(), mean))
    return seen


def race(mesh, label: str, rounds: int, steps: int, folder: str) -> dict[str, list[float]]:
    """Of each round, seconds from step to step of both sides: their medians."""
    launch.keep_freed_memory()  # as the command does; both sides have it
    (config, batch, seq), found = SIZES[label], {"ours": [], "theirs": []}
    given = {"batch": batch, "seq": seq, "steps": steps, "warmup": 2, "eval_every": 0, "eval_batches": 1}
    for number in range(rounds):
        seen, out = {}, Path(folder, f"{label}-{number}")
        out.mkdir(exist_ok=True)
        settings = Settings(config, f"{folder}/text.txt", str(out), save_every=0, **given)
        for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                seen[side.__name__] = side(mesh, settings)
        for (_, a), (_, b) in zip(*seen.values(), strict=True):
            if abs(a - b) > AGREE * abs(b):
                raise ValueError(f"the losses of the two sides do not agree: {a} and {b}")
        for side, each in seen.items():
            found[side].append(statistics.median(b - a for (a, _), (b, _) in pairwise(each[SKIPPED - 1 :])))
    return found


if __name__ == "__main__":
    args, rows = options(__doc__, ranks=1, sizes=SIZES, rounds=7, steps=10).parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        sources = sorted(Path(loop.__file__).parents[1].rglob("*.py"))
        Path(folder, "text.txt").write_text("".join(path.read_text() for path in sources))
        for label in args.sizes:
            found = launch.run(race, {"X": args.ranks}, label, args.rounds, args.steps, folder)[0]
            rows.append([label, args.ranks, *beside(*found.values())])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}; {args.rounds} runs of {args.steps} steps of each side, 1 thread a rank.\n")
    show(rows, ["size", "ranks", "ms a step: ours", "theirs", "ratio"])
