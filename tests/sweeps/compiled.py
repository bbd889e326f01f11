"""A Transformer's whole step under torch.compile, one graph, against the same uncompiled: loss, and params after it.

    python tests/sweeps/compiled.py [--backend inductor] [--only C]

On one rank and on several, in float64. Exit status 1 if one differs by 1e-12.
"""

import sys
import time

import layouts
import torch

from scaling import launch, optim, tree
from scaling.book.largest import largest
from scaling.common.console import Parser
from scaling.strategies import transformer
from scaling.strategies.axes import present

RICH = layouts.MODELS["rich"].with_(L=2, window=(None, 5))
CASES = [
    ({"X": 1}, {}),
    ({"X": 2, "Y": 2}, {"microbatches": 2}),
    ({"X": 2}, {"remat": "block", "label_smoothing": 0.1}),
    ({"C": 2}, {"z_loss": 0.01}),
    ({"C": 2, "Y": 2}, {"context": "ulysses"}),
]


def differences(mesh, options: dict, backend: str) -> tuple[float, float, float]:
    """(of the loss, of the params, seconds to compile)."""
    params, adamw = transformer.shard(layouts.start(RICH), RICH, mesh), optim.adamw(0.01)
    state = adamw.init(params)
    tokens, targets, weights, _ = layouts.batches(RICH, mesh.sizes, {"microbatches": options.get("microbatches", 1)})[0]
    batch = [tree.shard(x, str(present("t[B_PXE, T_C]", mesh)), mesh) for x in (tokens, targets, weights)]

    def step(params, state, tokens, targets, weights):
        loss, grads = transformer.loss_and_grads(params, tokens, targets, RICH, mesh, weights=weights, **options)
        return loss, *adamw.update(grads, state, params)

    wanted, began = step(params, state, *batch), time.time()
    found = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(params, state, *batch)
    pairs = zip(tree.leaves(found[1]), tree.leaves(wanted[1]), strict=True)
    return (
        (found[0] - wanted[0]).abs().item(),
        largest((a - b).abs().max().item() for a, b in pairs),
        time.time() - began,
    )


def main() -> int:
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--only", default="", help="meshes that have this axis")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for sizes, options in CASES:
        if args.only in sizes or not args.only:
            ranks = launch.run(differences, sizes, options, args.backend)
            loss, params, seconds = map(largest, zip(*ranks, strict=True))
            worst = largest((worst, loss, params))
            print(f"{sizes} {options}: loss {loss:.1e}, params {params:.1e}, {seconds:.0f} s to compile", flush=True)
    return 0 if worst < 1e-12 else 1


if __name__ == "__main__":
    sys.exit(main())
