"""Ring attention beside PyTorch's own, `_templated_ring_attention`, over gloo on this machine's CPU, in float32.

    python tests/oracles/ring_torch.py [--ranks 4]

torch's `context_parallel` runs on GPUs alone, but the ring beneath it takes any attention operator: here the flash
attention of CPUs. Plain order is its ring without load balance, zig-zag order the one with it; both its rotations run.
Prints the largest differences of O, dQ, dK and dV over their maximum, for a cotangent that is not uniform, and fails
above 3e-6. Where torch has no such function, or another signature, it says so and passes.
"""

import sys

import torch

from scaling import launch
from scaling.book.largest import largest
from scaling.common.console import Parser, table
from scaling.strategies import context

LIMIT = 3e-6
B, N, K, H = 2, 8, 2, 16


def theirs(mesh, Q, K, V, dO, balanced: bool, rotation: str):
    """[B, T_C, heads, H] -> (O, dQ, dK, dV); torch has [B, heads, T, H] and a copy of the keys for each query head."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    private._cp_options.enable_load_balance = balanced
    private._cp_options.rotate_method = private._RotateMethod[rotation]
    group, copies = mesh.group(("C",)).pg, Q.shape[2] // K.shape[2]
    q, k, v, do = (x.movedim(2, 1).contiguous() for x in (Q, *(x.repeat_interleave(copies, 2) for x in (K, V)), dO))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    O, lse, *_ = private._templated_ring_attention(group, 2, flash, query=q, key=k, value=v, is_causal=True)
    grads = private._templated_ring_attention_backward(
        group, 2, backward, do, "grad_out", q, k, v, O, lse, is_causal=True, dropout_p=0.0
    )
    O, dQ, dK, dV = (x.movedim(1, 2) for x in (O, *grads[:3]))
    return O, dQ, *(x.unflatten(2, (-1, copies)).sum(3) for x in (dK, dV))


def compared(mesh, form: str, rotation: str):
    """Both on this rank's shards, in the order of the form: no exchange is needed to begin with."""
    t, g = 64, torch.Generator().manual_seed(mesh.rank)
    Q, K_, V, dO = (torch.randn(B, t, heads, H, generator=g) for heads in (N, K, K, N))
    Q, V = Q * torch.linspace(0.1, 3, t)[:, None, None], V + mesh.rank
    O, pull = torch.func.vjp(lambda *x: context.attention(*x, mesh, form=form), Q, K_, V)
    ours = O, *pull(dO)
    try:
        wanted = theirs(mesh, Q, K_, V, dO, form == "zigzag", rotation)
    except (ImportError, AttributeError, KeyError, TypeError, NotImplementedError) as error:
        return repr(error)
    return [(float((a - b).abs().max()), float(b.abs().max())) for a, b in zip(ours, wanted, strict=True)]


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks, rows, off = parser.parse_args().ranks, [], []
    for form in ("ring", "zigzag"):
        for rotation in ("ALL_TO_ALL", "ALL_GATHER"):
            results = launch.run(compared, {"C": ranks}, form, rotation)
            if isinstance(results[0], str):
                print(f"skipped: torch {torch.__version__} has no ring that runs on a CPU: {results[0]}")
                return 0
            over_ranks = [zip(*each, strict=True) for each in zip(*results, strict=True)]
            off.append([largest(apart) / largest(size) for apart, size in over_ranks])
            rows.append((form, rotation.lower(), *(f"{each:.1e}" for each in off[-1])))
    print(table(rows, ["form", "torch's rotation", "O", "dQ", "dK", "dV"]))
    worst = largest(map(largest, off))
    print(f"worst {worst:.1e}, limit {LIMIT:.0e}: {'equal' if worst <= LIMIT else 'DIFFERENT'}")
    return int(not worst <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
