"""Faults planted in real runs. Not part of the suite:

    python tests/train/faults_sweep.py --count 20 --out faults.jsonl
    python tests/train/faults_sweep.py --count 0 --overhead 60

A desynchronised element, a NaN, a bad batch that makes the loss jump and a slow rank (30 ms a step) must be found, each
at a random step, leaf and rank; runs in which nothing is planted must end in silence. What is in --out already is not
run again. `overhead`: of so many steps of 100 ms or more, the share that is spent inside the guards.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from runs import records, write_text

from scaling import launch, tree
from scaling.common.console import Parser
from scaling.configs import get
from scaling.train import guards, loop
from scaling.train.settings import Settings

WORDS = {
    "desync": "is replicated over",
    "nan": "not finite",
    "spike": "the loss jumped",
    "slow": "is slow",
    "clean": "",
}
SIZES = {"X": 2, "Y": 1}
SMALL = get("tiny").with_(L=2, D=32, F=64, N=2, K=2, H=16)
GUARDS = [  # what is timed
    (guards, "check_replicas"),
    (guards, "check_finite"),
    (guards.Losses, "jump"),
    (guards.Pace, "add"),
    (guards.Pace, "slow"),
    (guards, "still"),
]


def planted(mesh, case: str, seed: int, settings: Settings) -> None:
    """A run in which something goes wrong: on one rank, or for all of them with a batch, at a step after the first."""
    draw = random.Random(seed)
    rank, at, late, real = draw.randrange(2), draw.randrange(3, 12), draw.randrange(20, 28), loop.make_step

    def make_step(*given):
        step = real(*given)

        def wrong(params, state, batch, donate=False):
            if mesh.rank == rank and case in ("desync", "nan") and int(state["step"]) == at:
                leaves = [x for where, x in tree.named_leaves(params).items() if case == "nan" or "norm" in where]
                flat = draw.choice(leaves).view(-1)
                i = draw.randrange(len(flat))
                flat[i] += 1e-3 if case == "desync" else float("nan")  # a last bit could be rounded away
            if mesh.rank == rank and case == "slow":
                time.sleep(0.03)
            if case == "spike" and int(state["step"]) == late:
                batch = (batch[0], torch.full_like(batch[1], 255), batch[2])
            return step(params, state, batch, donate)

        return wrong

    loop.make_step = make_step
    loop.run(mesh, settings)


def written(folder: str, **options) -> Settings:
    """A run's settings, with a text to train on."""
    given = {
        "steps": 32,
        "lr": 5e-3,
        "warmup": 5,
        "guard_every": 10,
        "eval_every": 0,
        "eval_batches": 1,
        "save_every": 0,
    }
    given = {"model": SMALL} | given | options
    return Settings(data=write_text(Path(folder), 3000), out=folder, batch=4, **given)


def said(case: str, seed: int) -> str:
    """What a run writes to its standard error, and the error that ends it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as heard:
        outside = [os.dup(1), os.dup(2)]
        sys.stdout.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(heard.fileno(), 2)
        try:
            launch.run(planted, SIZES, case, seed, written(folder, seq=64))
            error = ""
        except launch.RankError as raised:
            error = str(raised)
        finally:
            for number, kept in enumerate(outside, 1):
                os.dup2(kept, number)
                os.close(kept)
        heard.seek(0)
        return heard.read().decode() + error


def timed(mesh, settings: Settings) -> tuple[float, float]:
    """(seconds inside the guards, seconds of all steps) of a run on this rank."""
    inside = [0.0]

    def clock(f):
        def call(*given):
            began = time.perf_counter()
            try:
                return f(*given)
            finally:
                inside[0] += time.perf_counter() - began

        return call

    for place, name in GUARDS:
        setattr(place, name, clock(getattr(place, name)))
    loop.run(mesh, settings)
    return inside[0], sum(each["seconds"] for each in records(Path(settings.out)))


def overhead(steps: int) -> None:
    """On one rank, where nobody waits: what the guards themselves take."""
    big = get("tiny").with_(L=4, D=256, F=1024, N=4, K=4, H=64)
    with tempfile.TemporaryDirectory() as folder:
        settings = written(folder, model=big, steps=steps, guard_every=50, seq=256)
        inside, outside = launch.run(timed, {"X": 1}, settings)[0]
    print(f"{steps} steps of {outside / steps * 1e3:.0f} ms: {inside / outside:.2%} of them inside the guards")


def main() -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="runs of each kind")
    parser.add_argument("--only", choices=WORDS)
    parser.add_argument("--overhead", type=int, default=0, help="steps to time the guards in (default none)")
    parser.add_argument("--out", type=Path, help="a file of JSON lines: what is there is not run again")
    args = parser.parse_args()
    wrong, found = (
        0,
        [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.is_file() else [],
    )
    for case in [args.only] if args.only else WORDS:
        right = 0
        for seed in range(args.count):
            row = next((row for row in found if (row["case"], row["seed"]) == (case, seed)), None)
            if row is None:
                row = {"case": case, "seed": seed, "said": said(case, seed)}
                if args.out:
                    with open(args.out, "a") as file:
                        file.write(json.dumps(row) + "\n")
            good = WORDS[case] in row["said"] if WORDS[case] else not row["said"]
            right += good
            if not good:
                print(f"{case} {seed}: {row['said'][-300:] or 'nothing was said'}", flush=True)
        print(f"{case}: {right} of {args.count}", flush=True)
        wrong += args.count - right
    if args.overhead:
        overhead(args.overhead)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
