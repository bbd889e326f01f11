"""Make matrices orthogonal for Muon by Newton-Schulz, whole matrices or, in three ways, sharded ones.

    M[S_Z, O_Y, I_X]    this rank's shards of S matrices, from I inputs to O outputs

`by_gathering`: each rank gathers every matrix and computes all of them. `by_owners`: each matrix is sent whole to one
rank, which computes it and sends it back. `on_shards`: the iteration runs on shards, whose Gram matrices are partial
sums.

                FLOPs of a matrix, n x m, n <= m        bytes over the R ranks that have shards of it, AllGather's V
    gathered    5 (4 n^2 m + 2 n^3)                     AllGather of nm
    owned       a share 1/R of these                    two AllToAlls of nm
    on_shards   5 (4 n^2 m / R + 2 n^3)                 two AllToAlls of nm, five AllReduces of n^2, in float32
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_reduce, reshard
from scaling.spec import Spec, block_index, dtype_bytes, format_axes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a quintic that is steep at 0 (Jordan 2024, kellerjordan.github.io)
STEPS, EPS = 5, 1e-7
FORMS = ("gathered", "owned", "on_shards")


def newton_schulz(M: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a matrix [O, I] in `dtype` near U V^T, for M[O, I] = U S V^T, whose singular values lie around 1.

    Each step is X <- a X + b (X X^T) X + c (X X^T)^2 X, with products over the longer side.
    """
    a, b, c = COEFFICIENTS
    tall = M.shape[0] > M.shape[1]
    X = M.to(dtype).mT if tall else M.to(dtype)
    X = X / X.norm().clamp(min=EPS)
    for _ in range(STEPS):
        A = X @ X.mT
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


@dataclass(frozen=True)
class MatrixStack:
    """Matrices of one shape, M[S, O, I], with their type and their mesh (None if they are on one device)."""

    type: Spec
    mesh: Any

    @property
    def others(self) -> tuple[str, ...]:
        """The axes of the mesh that do not split S, over which ranks can share the work on the same matrices."""
        return () if self.mesh is None else tuple(a for a in self.mesh.sizes if a not in self.type.axes_of("S"))

    def typed(self, S: Sequence[str] = (), O: Sequence[str] = (), I: Sequence[str] = ()) -> Spec:
        """Return the type with these axes, which for S are added to the axes that split it already."""
        stack = (*self.type.axes_of("S"), *S)
        return Spec("M", (("S", stack), ("O", tuple(O)), ("I", tuple(I))))

    def whole(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return (S, O, I) of this rank's stack of whole matrices, for a local shape [S, O, I]."""
        parts = [1 if self.mesh is None else self.mesh.size(self.type.axes_of(dim)) for dim in "OI"]
        return shape[0], shape[1] * parts[0], shape[2] * parts[1]


def newton_schulz_each(M: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply Newton-Schulz to every matrix of a stack M[S, O, I]."""
    return torch.stack([newton_schulz(m, dtype) for m in M]) if len(M) else M.to(dtype)


def by_gathering(M: Tensor, stack: MatrixStack, dtype: torch.dtype) -> Tensor:
    """Gather M[S, O_Y, I_X] -> M[S, O, I], make it orthogonal, and return this rank's shards M[S, O_Y, I_X]."""
    whole = stack.typed()
    X = reshard(f"{stack.type} -> {whole}", M.to(dtype), stack.mesh)
    return reshard(f"{whole} -> {stack.type}", newton_schulz_each(X, dtype), stack.mesh)


def by_owners(M: Tensor, stack: MatrixStack, dtype: torch.dtype, loads: list[float]) -> Tensor:
    """Reshard M[S, O_Y, I_X] -> M[S_XY, O, I], make it orthogonal, and return it as M[S, O_Y, I_X].

    `loads` has the FLOPs of each rank so far, to which this function adds. If the ranks do not divide S, each rank gets
    as many slots as the fullest one, and the least loaded ranks fill all of theirs.
    """
    mesh, R = stack.mesh, len(loads)
    places, mine = assigned(len(M), loads, matrix_flops(*stack.whole(M.shape)[1:]))
    padded = M.new_zeros((-(-len(M) // R) * R, *M.shape[1:]), dtype=dtype)
    padded[places] = M.to(dtype)
    owned = stack.typed(S=stack.others)
    X = reshard(f"{stack.type} -> {owned}", padded, mesh)
    count = mine[block_index(stack.others, mesh.coord, mesh)]
    X = torch.cat([newton_schulz_each(X[:count], dtype), X[count:]])
    return reshard(f"{owned} -> {stack.type}", X, mesh)[places]


def assigned(S: int, loads: list[float], flops: float) -> tuple[list[int], list[int]]:
    """Return the slot of each of S matrices, where ranks have equally many slots, and each rank's number of matrices.

    The least loaded ranks get the most matrices.
    """
    R = len(loads)
    share = -(-S // R)
    full = S - R * (share - 1)  # the number of ranks that have a whole share
    order = sorted(range(R), key=lambda rank: (loads[rank], rank))
    counts = [share - 1] * R
    for rank in order[:full]:
        counts[rank] = share
    for rank in range(R):
        loads[rank] += counts[rank] * flops
    return [rank * share + i for rank in range(R) for i in range(counts[rank])], counts


def on_shards(M: Tensor, stack: MatrixStack, dtype: torch.dtype) -> Tensor:
    """Split the longer side over all ranks, M[S, O, I_XY], and reduce A[S, O, P] {U_XY} = M M^T in each step.

    It computes in float32 or float64, because partial sums rounded to bfloat16 would show the mesh.
    """
    (a, b, c), mesh = COEFFICIENTS, stack.mesh
    shape, axes = stack.whole(M.shape), (*stack.type.axes_of("O"), *stack.type.axes_of("I"))
    tall = shape[1] > shape[2]
    split = stack.typed(O=axes) if tall else stack.typed(I=axes)
    X = reshard(f"{stack.type} -> {split}", M.to(torch.promote_types(dtype, torch.float32)), mesh)
    X = X.mT if tall else X
    over, stacked = format_axes(axes), format_axes(stack.type.axes_of("S"))
    stacked = f"S_{stacked}" if stacked else "S"
    squares = all_reduce(f"n[{stacked}] {{U_{over}}} -> n[{stacked}]", X.square().sum((1, 2)), mesh)
    X = X / squares.sqrt().clamp(min=EPS)[:, None, None]
    for _ in range(STEPS):
        A = all_reduce(f"A[{stacked}, O, P] {{U_{over}}} -> A[{stacked}, O, P]", X @ X.mT, mesh)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    X = X.mT.contiguous() if tall else X
    return reshard(f"{split} -> {stack.type}", X, mesh)


def form_costs(
    shape: Sequence[int], stack: MatrixStack, intensity: float, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Return {form: its cost on one rank, in FLOPs} for a stack of this local shape [S, O, I].

    Communication is converted to FLOPs: each byte that a form moves costs `intensity` FLOPs, which the chip could do
    meanwhile (Part 3: an AllReduce takes as long as two AllGathers, an AllToAll a quarter of one). "on_shards" is
    left out if the longer side does not divide over the ranks, or if the matrices are not sharded.
    """
    mesh, (S, O, I) = stack.mesh, stack.whole(shape)
    n, m, size = min(O, I), max(O, I), dtype_bytes(dtype)
    shards, ranks = mesh.size((*stack.type.axes_of("O"), *stack.type.axes_of("I"))), mesh.size(stack.others)
    one, moved, share = n * m * size, shards > 1, -(-S // ranks)  # bytes of a matrix; matrices of the fullest rank
    found = {"gathered": S * matrix_flops(O, I) + intensity * S * one * moved}
    places = share * ranks * one  # AllToAll there and back; AllGather to the ranks that hold the same shards
    found["owned"] = share * matrix_flops(O, I) + intensity * places * (2 * moved / 4 + (ranks > shards))
    if moved and m % shards == 0:
        sent = 2 * S * n * m * 4 / 4 + 2 * STEPS * S * n * n * 4
        found["on_shards"] = S * STEPS * (4 * n * n * m / shards + 2 * n**3) + intensity * sent
    return found


def orthogonal(M: Tensor, stack: MatrixStack, dtype: torch.dtype, form: str, loads: dict[tuple, list[float]]) -> Tensor:
    """Make the matrices of M[S, O, I] orthogonal by a form of `form_costs`, and return this rank's shards of them.

    `loads` has the FLOPs given to each rank so far, by the mesh axes that share the work; "owned" adds to it.
    """
    if stack.mesh is None or stack.mesh.size(stack.others) == 1:
        return newton_schulz_each(M, dtype)
    if form == "owned":
        return by_owners(M, stack, dtype, loads.setdefault(stack.others, [0.0] * stack.mesh.size(stack.others)))
    split = any(stack.type.axes_of(dim) for dim in "OI")
    run: Callable[..., Tensor] = on_shards if form == "on_shards" and split else by_gathering
    return run(M, stack, dtype)


def matrix_flops(O: int, I: int) -> float:
    """Return the FLOPs of Newton-Schulz for one matrix [O, I]."""
    n, m = min(O, I), max(O, I)
    return STEPS * (4 * n * n * m + 2 * n**3)
