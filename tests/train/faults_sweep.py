"""Faults planted in real runs, and kills while saving. Not part of the suite:

    python tests/train/faults_sweep.py --count 20 --kills 50

Each run is a process of its own. A desynchronised element, a NaN and a slow rank (30 ms a step) must be found, each
at a random step, leaf and rank; runs in which nothing is planted must end in silence. A run that is killed at a random
moment must leave a checkpoint that loads, no older than the last save that was said to be finished.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from scaling import launch, tree
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.train import checkpoint, loop
from scaling.train.settings import Settings

WORDS = {"desync": "is replicated over", "nan": "not finite", "slow": "is slow", "clean": ""}
SIZES = {"X": 2, "Y": 1}


def planted(case: str, seed: int, settings: Settings, mesh) -> dict:
    """A run in which something goes wrong on one rank, at a step after the first."""
    draw = random.Random(seed)
    rank, at, real = draw.randrange(2), draw.randrange(3, 12), loop.make_step

    def make_step(*given):
        step = real(*given)

        def wrong(params, state, batch, donate=False):
            if mesh.rank == rank and case in ("desync", "nan") and int(state["step"]) == at:
                leaves = [x for where, x in tree.named_leaves(params).items() if case == "nan" or "norm" in where]
                flat = draw.choice(leaves).view(-1)
                i = draw.randrange(len(flat))
                flat[i] = torch.nextafter(flat[i], torch.tensor(9.0)) if case == "desync" else float("nan")
            if mesh.rank == rank and case == "slow":
                time.sleep(0.03)
            return step(params, state, batch, donate)

        return wrong

    loop.make_step = make_step
    return loop.run(mesh, settings)


def one(case: str, seed: int) -> int:
    """The process of one run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(3000)))
        settings = Settings(
            get("tiny"), folder, folder, 4, 64, steps=24, guard_every=10, eval_every=0, save_every=0, seed=seed
        )
        try:
            launch.run(lambda mesh: planted(case, seed, settings, mesh), SIZES)
        except launch.RankError as error:
            print(error, file=sys.stderr)
    return 0


def saving(mesh, folder: Path) -> None:
    """Saves for ever; rank 0 says when one is finished."""
    for step in range(1, 10**6):
        state = {"W": torch.full((1 << 18,), float(step)), "n": torch.tensor(step)}
        checkpoint.save(folder, state, {"W": "W[D_X]", "n": "n[]"}, mesh, step, keep=2)
        if mesh.rank == 0:
            print(step, flush=True)


def killed(draw: random.Random) -> str:
    """One kill at a random moment of saving; what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--save", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            said = int(process.stdout.readline())
            time.sleep(draw.uniform(0, 0.5))
            os.killpg(process.pid, signal.SIGKILL)
            said = max([said, *map(int, process.stdout.read().split())])
        state, step = checkpoint.load(folder, {"W": "W[D]", "n": "n[]"}, Mesh({"X": 1}))
        good = bool((state["W"] == step).all()) and state["n"] == step and len(state["W"]) == 1 << 19
        if not good or step < said:
            return f"step {step} after {said} was finished: {'whole' if good else 'damaged'}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="runs of each kind")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=WORDS)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one[0], int(args.one[1]))
    if args.save:
        launch.run(saving, {"X": 2}, args.save)
    wrong = 0
    for case, words in WORDS.items() if args.only is None else [(args.only, WORDS[args.only])]:
        right = 0
        for seed in range(args.count):
            command = [sys.executable, __file__, "--one", case, str(seed)]
            said = subprocess.run(command, capture_output=True, text=True).stderr.strip()
            right += words in said if words else not said
            if (words not in said) if words else said:
                print(f"{case} {seed}: {said[-300:] or 'nothing was said'}", flush=True)
        print(f"{case}: {right} of {args.count}", flush=True)
        wrong += args.count - right
    draw, lost = random.Random(0), 0
    for i in range(args.kills):
        if what := killed(draw):
            lost += 1
            print(f"kill {i}: {what}", flush=True)
    print(f"kills: {args.kills - lost} of {args.kills} left their last finished save")
    return 1 if wrong or lost else 0


if __name__ == "__main__":
    sys.exit(main())
