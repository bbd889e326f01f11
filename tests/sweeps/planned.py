"""Is the planner's mesh among the fastest? Each job on every mesh of four ranks, forecast from machine.toml, then run.

    python -m scaling.measure --ranks 4 --no-check --out machine.toml
    python tests/sweeps/planned.py --chip machine.toml --out planned.jsonl

The meshes of a job take turns, step by step, so that whatever else the machine does meets all alike; of a mesh's steps
the lower quartile counts. A job that --out has is not run again. Times decide nothing: the exit status is 0.
"""

from pathlib import Path

from rows import Rows

from scaling.common.console import Parser
from scaling.configs import get
from scaling.hardware import load_chip
from scaling.measure.layouts import check_steps, median_error, tau
from scaling.spec.sizes import format_sizes
from scaling.train.settings import Settings

TINY = get("tiny")


def job(L, D, F, N, K, batch, seq, microbatches=1, remat="none", V=256):
    config = TINY.with_(L=L, D=D, F=F, N=N, K=K, H=D // N, V=V)
    return Settings(config, "", "", batch=batch, seq=seq, microbatches=microbatches, remat=remat)


JOBS = {
    "as calibrated": job(4, 256, 1024, 8, 4, 16, 128),
    "wide": job(2, 512, 2048, 8, 8, 8, 64),
    "wide, few tokens": job(2, 768, 3072, 8, 4, 4, 32),
    "deep and narrow": job(8, 128, 512, 4, 4, 16, 128),
    "long sequences": job(2, 256, 512, 8, 8, 4, 1024),
    "many tokens": job(2, 256, 1024, 8, 8, 64, 128),
    "microbatches": job(4, 256, 1024, 8, 4, 32, 64, microbatches=4),
    "microbatches, wide": job(4, 384, 1536, 8, 8, 16, 32, microbatches=4),
    "large vocabulary": job(2, 256, 512, 8, 4, 16, 64, V=8192),
    "recomputed": job(4, 256, 1024, 8, 8, 16, 128, remat="block"),
    "tiny": job(2, 64, 128, 4, 4, 8, 64),
}


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", required=True, help="the file that scaling.measure wrote")
    parser.add_argument("--out", type=Path, default="planned.jsonl")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--most", type=int, default=len(JOBS), help="jobs to run now")
    args = parser.parse_args()
    rows, chip = Rows(args.out), load_chip(args.chip)
    todo = [name for name in JOBS if args.only in name and name not in {row["job"] for row in rows}]
    for name in todo[: args.most]:
        checks = check_steps(JOBS[name], chip, args.ranks, args.rounds, most=1000)
        meshes = {format_sizes(c.sizes): [c.predicted, c.seconds] for c in checks}
        place = 1 + sum(c.seconds < checks[0].seconds for c in checks)
        rows.add({"job": name, "place": place, "error": median_error(checks), "tau": tau(checks), "meshes": meshes})
    for row in rows:
        times = {mesh: seconds for mesh, (_, seconds) in row["meshes"].items()}
        chosen, fastest = next(iter(times)), min(times, key=lambda mesh: times[mesh])
        print(
            f"{row['job']:20} chose {chosen:10} place {row['place']:2} of {len(times)}, "
            f"+{times[chosen] / times[fastest] - 1:.0%} of {fastest:10} error {row['error']:.0%}, tau {row['tau']:.2f}"
        )
    print(f"among the two fastest: {sum(row['place'] <= 2 for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
