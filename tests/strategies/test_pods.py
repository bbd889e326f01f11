"""Data parallelism over pods: only shards cross the slow axis."""

import torch
from mlp_problem import SIZES, L, close, specs, whole

from scaling import tree
from scaling.collectives import all_reduce, reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import pods
from scaling.trace import trace

PODS = {"P": 2, "X": 2, "Y": 2}
WEIGHTS = specs(pods)
BLOCK = ("gelu", True, True)


def other_ways(mesh):
    """Gradients by microbatches and with the flat reduction, beside `backward`'s."""
    params, (batch, *_) = whole(torch.float64)
    params, In = tree.shard(params, WEIGHTS, mesh), tree.shard(batch[0], pods.SPECS["In"], mesh)
    Out, saved = pods.forward(params, In, mesh, *BLOCK)
    plain = pods.backward(Out, saved, params, mesh)
    with trace() as log:
        dIn, sums = pods.backward(Out, saved, params, mesh, reduce=False)
        flat = dIn, {name: over_pods_first(name, dW, mesh) for name, dW in sums.items()}
    partial, dIns = None, []
    for i, rows in enumerate(In.chunk(2)):
        Out, saved = pods.forward(params, rows, mesh, *BLOCK)
        dIn, partial = pods.backward(Out, saved, params, mesh, partial, reduce=i == 1)
        dIns.append(dIn)
    return plain, flat, (torch.cat(dIns), partial), crossing(log)


def over_pods_first(name, dW, mesh):
    whole, shard = {"W_in": ("[L, D, F_Y]", "[L, D_X, F_Y]"), "W_out": ("[L, F_Y, D]", "[L, F_Y, D_X]")}[name]
    dW = all_reduce(f"dW{whole} {{U_PX}} -> dW{whole} {{U_X}}", dW, mesh)
    return reduce_scatter(f"dW{whole} {{U_X}} -> dW{shard}", dW, mesh)


def crossing(log):
    """Bytes by the book's count on each axis, AllReduce twice."""
    moved = {}
    for event in log.collectives():
        axis = "".join(event.axes)
        moved[axis] = moved.get(axis, 0) + event.nbytes * (2 if event.op == "AllReduce" else 1)
    return moved


def test_other_ways_to_the_same_gradients(ranks):
    for plain, flat, microbatched, moved in ranks(other_ways, PODS):
        close(flat, plain, torch.float64)
        close(microbatched, plain, torch.float64)
        assert moved["P"] == 2 * 2 * L * SIZES["D"] * SIZES["F"] // 2 * 8  # X times what need cross


def step_bytes(mesh, L, B, D, F):
    """Bytes on each axis in a forward and a backward, in bfloat16 on an abstract mesh."""
    sizes, meta = {"L": L, "B": B, "D": D, "F": F}, {"dtype": torch.bfloat16, "device": "meta"}
    params = {name: torch.empty(parse(spec).local_shape(sizes, mesh), **meta) for name, spec in WEIGHTS.items()}
    In = torch.empty(parse(pods.SPECS["In"]).local_shape(sizes, mesh), **meta)
    with trace() as log:
        Out, saved = pods.forward(params, In, mesh)
        pods.backward(Out, saved, params, mesh)
    return crossing(log)


def test_bytes_are_the_books():
    """8DF/M a layer over the datacenter's network (M chips a slice), 12DF/Y over X, 8BD/X over Y of a pod's batch."""
    for sizes in ({"P": 2, "X": 2, "Y": 2}, {"P": 2, "X": 1024, "Y": 8}):
        mesh, (L, B, D, F) = AbstractMesh(sizes), (2, 4096, 8192, 32768)
        moved = step_bytes(mesh, L, B, D, F)
        X, Y, P = sizes["X"], sizes["Y"], sizes["P"]
        assert moved["P"] == L * 8 * D * F // (X * Y)
        assert moved["X"] == L * 12 * D * F // Y
        assert moved["Y"] == L * 8 * (B // P) * D // X
