"""Collective matmuls beside one device, with gradients, and what their links carry."""

import pytest
import torch
from torch.func import vjp

from scaling import tree
from scaling.book.largest import largest
from scaling.collectives import all_reduce
from scaling.collectives.rings import LinkBytes
from scaling.mesh import AbstractMesh
from scaling.strategies import collective_matmul as cm

B, D, F = 6, 8, 16
FORMS = {  # the function, the types of its operands and result
    "gather": (cm.gather_matmul, ("A[B_X, D_Y]", "W[D, F_Y]"), "Out[B_X, F_Y]"),
    "scatter": (cm.matmul_scatter, ("A[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F_Y]"),
    "reduce": (cm.matmul_reduce, ("A[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]"),
    "mlp": (cm.mlp, ("In[B_X, D_Y]", "W_in[D, F_Y]", "W_out[F_Y, D]"), "Out[B_X, D_Y]"),
}


def drawn(*shapes):
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes]


def dense(name, x, *weights):
    first = x @ weights[0]
    return torch.nn.functional.gelu(first) @ weights[1] if name == "mlp" else first


def compared(mesh):
    """The largest difference of each form's result and gradients from one device's, relative."""
    found = {}
    for name, (form, types, result) in FORMS.items():
        whole = drawn((B, D), (D, F), *([(F, D)] if name == "mlp" else []))
        wanted, pull = vjp(lambda *a, name=name: dense(name, *a), *whole)
        d_out = drawn(wanted.shape)[0]
        grads = pull(d_out)
        shards = tree.shard(whole, list(types), mesh)
        for ways in (1, 2):
            out, back = vjp(lambda *a, form=form, ways=ways: form(*a, mesh, ways=ways), *shards)
            # Out is replicated over Y in the AllReduce form, so its cotangent is each device's part of a sum
            mine = tree.shard([d_out], [result], mesh)[0] / (mesh.sizes["Y"] if name == "reduce" else 1)
            pairs = [(out, tree.shard([wanted], [result], mesh)[0])]
            for got, want, text in zip(back(mine), grads, types, strict=True):
                summed = got
                if "_X" not in text:  # a weight that every X holds: its gradient is a sum
                    summed = all_reduce("dW[I, J] {U_X} -> dW[I, J]", got, mesh)
                pairs.append((summed, tree.shard([want], [text], mesh)[0]))
            found[name, ways] = largest(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("sizes", [{"X": 1, "Y": 4}, {"X": 2, "Y": 2}, {"X": 1, "Y": 1}])
def test_equal_to_one_device_with_gradients(ranks, sizes):
    for found in ranks(compared, sizes):
        assert largest(found.values()) < 1e-12, found


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
