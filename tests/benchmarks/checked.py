"""What the checked mode costs: a training step on ranks that compare their calls, against one on ranks that do not.

    python tests/benchmarks/checked.py [--ranks 4,8] [--strategies data_parallel,fsdp,...] [--steps 20] [--batch 256]

The model, batch and meshes are those of the chapters of Part 5. Both kinds of step run in turn on the same ranks, each
on a mesh of its own; a ratio is that of the two times of the slowest rank, one after the other.
"""

import argparse
import importlib

from harness import in_turn, machine, quartiles, slowest
from tabulate import tabulate

from scaling import data, launch, optim
from scaling.mesh import Mesh
from scaling.models import mlp
from scaling.train.byte_lm import batch_axes, make_step, param_specs

MESHES = {"data_parallel": "X", "fsdp": "X", "tensor_parallel": "Y", "fsdp_tp": "XY"}


def sizes(strategy: str, ranks: int) -> dict[str, int]:
    return {"X": ranks // 2, "Y": 2} if MESHES[strategy] == "XY" else {MESHES[strategy]: ranks}


def run(mesh, name: str, steps: int, rows: int) -> dict[str, list[float]]:
    """Seconds of the steps on this rank: {"checked": [...], "unchecked": [...]}."""
    strategy, config, adamw = importlib.import_module(f"scaling.strategies.{name}"), mlp.Config(), optim.adamw(3e-3)
    text, sides = data.load_text(max_bytes=200_000), {}
    for side, where in (("checked", mesh), ("unchecked", Mesh(mesh.sizes, mesh.device, False, mesh.timeout))):
        params = mlp.init(config, 0, mesh=where, specs=param_specs(strategy))
        state = {"params": params, "opt": adamw.init(params)}
        step = make_step(strategy, adamw, config, where)
        batches = data.endless(text, config.K, rows, where, batch_axes(strategy), 0)

        def once(state=state, step=step, batches=batches):
            state["params"], state["opt"], _ = step(state["params"], state["opt"], next(batches))

        sides[side] = once
    return in_turn(sides, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--strategies", default=",".join(MESHES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256, help="rows of the global batch (default 256)")
    args = parser.parse_args()
    rows = []
    for name in args.strategies.split(","):
        for ranks in map(int, args.ranks.split(",")):
            mesh = sizes(name, ranks)
            per_rank = launch.run(run, mesh, name, args.steps, args.batch)
            times = {side: slowest([result[side] for result in per_rank]) for side in per_rank[0]}
            low, middle, high = quartiles([a / b for a, b in zip(*times.values(), strict=True)])
            ms = [f"{quartiles(times[side])[1] * 1e3:.1f}" for side in ("checked", "unchecked")]
            shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            rows.append([name, shape, *ms, f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    print(machine())
    print(tabulate(rows, ["strategy", "mesh", "ms checked", "unchecked", "ratio"], "github", disable_numparse=True))


if __name__ == "__main__":
    main()
