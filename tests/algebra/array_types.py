"""What the tests of algebra share: types of an array, the dumbest plan between two, products checked by the dense one,
one-line types of algorithms."""

import functools
import itertools

import simulated
import torch
from hypothesis import settings

from scaling.algebra.layouts import arrangements
from scaling.spec import Spec

SETTINGS = settings(deadline=None, derandomize=True, max_examples=40)


def types(axes: str, dims=("I", "J"), unreduced=True):
    """Every type of an array of these dims over these axes."""
    for split in arrangements(tuple(axes), len(dims)):
        idle = [axis for axis in axes if all(axis not in over for over in split)]
        for n in range(len(idle) + 1 if unreduced else 1):
            for partial in itertools.combinations(idle, n):
                yield Spec("A", tuple(zip(dims, split, strict=True)), partial)


def naive_bytes(src, dst, shape, mesh):
    """Reduce everything, gather everything; then slicing is free."""
    whole = src.with_unreduced(())
    sent = 0.0
    if src.unreduced:
        n = functools.reduce(lambda x, y: x * y, (mesh[a] for a in src.unreduced))
        sent += 2 * src.nbytes(shape, mesh, 1) * (n - 1) / n
    n = 1
    for axis in whole.axes:
        n *= mesh[axis]
    total = whole.nbytes(shape, mesh, 1) * n
    return sent + total * (n - 1) / n


MATRICES = {"I": 4, "J": 8, "K": 12}


def dense(a, b, out, sizes):
    letters = {dim: chr(97 + i) for i, dim in enumerate(dict.fromkeys(a.dim_names + b.dim_names))}
    sides = ["".join(letters[dim] for dim in spec.dim_names) for spec in (a, b, out)]
    arrays = [torch.randn([sizes[d] for d in s.dim_names], dtype=torch.float64) for s in (a, b)]
    return arrays, torch.einsum(f"{sides[0]},{sides[1]}->{sides[2]}", *arrays)


def check(plan, a, b, out, sizes, mesh):
    arrays, expected = dense(a, b, out, sizes)
    held = {spec: simulated.scatter(spec, array, mesh) for spec, array in zip((a, b), arrays, strict=True)}
    held = simulated.execute(plan.steps, held, mesh)
    got = simulated.gather(out, held[out], [sizes[d] for d in out.dim_names], mesh)
    assert (got - expected).abs().max() < 1e-11, f"{a} * {b} -> {out}\n{plan}"


DP = "In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]"
FSDP_TP = "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]"


UNREDUCED = [  # the result, or an argument, is a partial sum: its cotangent is replicated
    "In[B, D_X] * W[D_X, F] -> Out[B, F] {U_X}",
    "In[B, D] * W[D, F_Y] -> Out[B, F_Y] {U_X}",
    "In[B_X, D_Y] * W_in[D_Y, F] * W_out[F_Y, D] -> Out[B_X, D] {U_Y}",
    "In[B, D] {U_X} * W[D, F_Y] -> Out[B, F_Y] {U_X}",
    "In[B, D_Y] {U_X} * W[D_Y, F] -> Out[B_X, F]",
]
LINES = [  # (line, mesh): what nobody wrote by hand
    (DP, {"X": 2}),
    (FSDP_TP, {"X": 2, "Y": 2}),
    ("In[B, D_XYZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B, D_XYZ]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B_XZ, D_Y] * W_in[D_XZ, F_Y] * W_out[F_Y, D_XZ] -> Out[B_XZ, D_Y]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B_X, D_YZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B_X, D_YZ]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B_X, D] * W_in[D_XZ, F_Y] * W_out[F_Y, D_XZ] -> Out[B_X, D]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B, D] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D]", {"Y": 4}),
    ("In[B, D_X] * W_in[D_X, F] * W_out[F_X, D] -> Out[B, D]", {"X": 4}),
    ("In[B_X, D] * W_1[D, F_Y] * W_2[F_Y, G] * W_3[G_Y, D] -> Out[B_X, D]", {"X": 2, "Y": 2}),
    ("In[B_X, T, D] * W_Q[D, N_Y, H] -> Q[B_X, T, N_Y, H]", {"X": 2, "Y": 2}),
    ("Q[B_X, T, N_Y, H] * K[B_X, S, N_Y, H] -> Att[B_X, N_Y, T, S]", {"X": 2, "Y": 2}),
    ("Att[B_X, N_Y, T, S] * V[B_X, S, N_Y, H] -> O[B_X, T, N_Y, H]", {"X": 2, "Y": 2}),
    ("O[B_X, T, N_Y, H] * W_O[N_Y, H, D] -> Out[B_X, T, D_Y]", {"X": 2, "Y": 2}),
    ("Q[B, T_X, N, H] * K[B, S_X, N, H] -> Att[B, N, T_X, S]", {"X": 4}),
    ("Q[B_X, T, H] *_H K[B_X, S, H] *_S V[B_X, S, H] -> O[B_X, T, H]", {"X": 2}),
    *((line, {"X": 2, "Y": 2}) for line in UNREDUCED),
]
SIZES = {"B": 8, "D": 16, "F": 8, "G": 4, "T": 4, "S": 8, "N": 4, "H": 2}
