"""What the checked mode costs: a training step on ranks that compare their calls, against one on ranks that do not.

    python tests/benchmarks/checked.py [--ranks 4,8] [--strategies data_parallel,fsdp,...] [--samples 10]

The model, batch and meshes are those of the chapters of Part 5. Both kinds of step run in turn on the same ranks, each
on a mesh of its own. Ratios are of two samples one after the other, in the median with quartiles: of the slowest rank's
time, and of the processor time of all ranks, which other programs on the machine disturb less.
"""

import importlib
import itertools
from time import perf_counter, process_time

import numpy
from harness import in_turn, split
from report import beside, machine, options, ratios, show, spread

from scaling import data, launch, optim
from scaling.mesh import Mesh
from scaling.models import mlp
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

REPEAT = 4  # steps in a sample
BATCH = 256  # rows
MESHES = {"data_parallel": "X", "fsdp": "X", "tensor_parallel": "Y", "fsdp_tp": "XY"}


def run(mesh, name: str, samples: int) -> dict[str, list[numpy.ndarray]]:
    """(seconds, processor seconds) of a step in each sample on this rank: {"checked": [...], "unchecked": [...]}."""
    strategy, config, adamw = importlib.import_module(f"scaling.strategies.{name}"), mlp.MLPConfig(), optim.adamw(3e-3)
    text, sides = data.load_text(max_bytes=200_000), {}
    for side, where in (("checked", mesh), ("unchecked", Mesh(mesh.sizes, mesh.device, False, mesh.timeout))):
        params = mlp.init(config, 0, mesh=where, specs=param_specs(strategy))
        state = {"params": params, "opt": adamw.init(params)}
        batches = data.endless(text, config.K, BATCH, where, batch_axes(strategy), 0)

        def step(state=state, batches=batches, where=where):
            loss, grads = loss_and_grads(strategy, state["params"], *next(batches), config, where)
            state["params"], state["opt"] = adamw.update(grads, state["opt"], state["params"])
            reduced(strategy, loss, where)

        sides[side] = step
    return in_turn(sides, samples, REPEAT, warmup=1, clock=lambda: numpy.array([perf_counter(), process_time()]))


if __name__ == "__main__":
    args = options(__doc__, ranks=(4, 8), strategies=MESHES, samples=10).parse_args()
    rows = []
    for name, ranks in itertools.product(args.strategies, args.ranks):
        mesh = split(MESHES[name], ranks)
        per_rank = launch.run(run, mesh, name, args.samples)
        each = {side: [*zip(*(result[side] for result in per_rank), strict=True)] for side in per_rank[0]}
        slowest = [[max(seconds for seconds, _ in sample) for sample in each[side]] for side in each]
        worked = [[sum(seconds for _, seconds in sample) for sample in each[side]] for side in each]
        shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        rows.append([name, shape, *beside(*slowest), spread(ratios(*worked))])
    print(machine())
    show(
        rows,
        ["strategy", "mesh", "checked, ms", "unchecked, ms", "checked / unchecked", "the same of processor time"],
        2,
    )
