"""Collective matmuls beside one device, with gradients, and what their links carry."""

from functools import partial

import pytest
import torch
from problems import close, drawn, on_one_device, pulled

from scaling.collectives.rings import LinkBytes
from scaling.mesh import AbstractMesh
from scaling.strategies import collective_matmul as cm

B, D, F = 6, 8, 16
FORMS = [  # the function, the types of its operands and result
    (cm.gather_matmul, ["A[B_X, D_Y]", "W[D, F_Y]"], "Out[B_X, F_Y]"),
    (cm.matmul_scatter, ["A[B_X, D_Y]", "W[D_Y, F]"], "Out[B_X, F_Y]"),
    (cm.matmul_reduce, ["A[B_X, D_Y]", "W[D_Y, F]"], "Out[B_X, F]"),
    (cm.mlp, ["In[B_X, D_Y]", "W_in[D, F_Y]", "W_out[F_Y, D]"], "Out[B_X, D_Y]"),
]


def dense(A, *weights):
    first = A @ weights[0]
    return torch.nn.functional.gelu(first) @ weights[1] if len(weights) == 2 else first


def compared(mesh):
    for form, types, result in FORMS:
        operands = drawn((B, D), (D, F), (F, D))[: len(types)]
        dOut = drawn((B, D if form is cm.mlp else F), seed=1)[0]
        wanted = on_one_device(dense, operands, dOut)
        for ways in (1, 2):
            close(pulled(partial(form, mesh=mesh, ways=ways), mesh, operands, types, result, dOut), wanted)


@pytest.mark.parametrize("sizes", [{"X": 1, "Y": 4}, {"X": 2, "Y": 2}, {"X": 1, "Y": 1}])
def test_equal_to_one_device_with_gradients(ranks, sizes):
    ranks(compared, sizes)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("ways", [1, 2])
def test_hops_and_bytes_by_the_closed_form(n, ways):
    mesh, hops = AbstractMesh({"Y": n}), (n - 1 if ways == 1 else n // 2)
    F = 4 * n
    meta = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    cases = {  # form: operands, V, hops, (multiple of V/n over the busiest link)
        cm.gather_matmul: ((meta(B, 2), meta(2 * n, 5)), 4 * B * 2 * n, hops, hops),
        cm.matmul_scatter: ((meta(B, 3), meta(3, F)), 4 * B * F, hops, hops),
        cm.matmul_reduce: ((meta(B, 3), meta(3, F)), 4 * B * F, 3 * hops, 2 * hops),
    }
    for form, (operands, V, want_hops, share) in cases.items():
        log = LinkBytes()
        form(*operands, mesh, ways=ways, log=log)
        assert (log.hops, log.busiest) == (want_hops, V * share // n), form.__name__
        if ways == 2:
            form(*operands, mesh, log=(unsaid := LinkBytes()))
            assert unsaid == log, f"{form.__name__} sends both ways unless told otherwise"
