"""The strategies of Part 5 against one device: loss, gradients, params after AdamW steps; the first gradients by other
options too: activations gathered again or used up, microbatches, partial sums reduced later, and the vjp of forward.
What a layer of each sends, and what overlaps; collective matmuls."""

import time
from collections import Counter
from functools import partial

import problems
import pytest
import torch
from array_types import meta
from machine import on_ranks
from problems import (
    BLOCKS,
    SIZES,
    STRATEGIES,
    close,
    counts,
    one_device,
    pulled,
    same,
    specs,
    squares,
    stack,
    trained,
    whole,
)
from refused import named, read_table
from torch.func import vjp

from scaling import optim, tree
from scaling.collectives import Deferred, Pending
from scaling.collectives.rings import LinkBytes
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import collective_matmul as cm
from scaling.strategies import pods, zero
from scaling.strategies.stack import Block
from scaling.trace import trace

L, B, D, F = SIZES.values()
AG, RS, AR = "AllGather", "ReduceScatter", "AllReduce"
MESHES = {
    "data_parallel": [{"X": 1}, {"X": 2}],
    "fsdp": [{"X": 1}, {"X": 4}],
    "tensor_parallel": [{"Y": 4}],
    "fsdp_tp": [{"X": 1, "Y": 2}, {"X": 4, "Y": 1}, {"X": 2, "Y": 2}],
}
OTHERS = {"data_parallel": BLOCKS[2:3], "fsdp": BLOCKS[1:2], "tensor_parallel": BLOCKS[3:], "fsdp_tp": BLOCKS[1:3]}
F64, F32 = torch.float64, torch.float32
CASES = [(mesh, name, BLOCKS[0], 0, F64) for name, meshes in MESHES.items() for mesh in meshes]
CASES += [(meshes[-1], name, BLOCKS[0], 0, F32) for name, meshes in MESHES.items()]
CASES += [(MESHES[name][-1], name, block, 0, F64) for name, blocks in OTHERS.items() for block in blocks]
CASES += [({"P": 2, "X": 2, "Y": 1}, "pods", BLOCKS[0], 2, dtype) for dtype in (F64, F32)]
CASES += [({"P": 2, "X": 1, "Y": 2}, "pods", BLOCKS[0], 1, dtype) for dtype in (F64, F32)]


def batch_of(strategy, batch, mesh):
    return tree.shard(list(batch), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)


def other_ways(strategy, name, batch, params, mesh, block, bucket, found):
    """Gradients of the first batch. With activations gathered again, or used up, they are `found` to the bit."""
    In, Target = batch_of(strategy, batch, mesh)
    Out, saved = strategy.forward(params, In, mesh, *block, keep=False)
    dOut = 2 / B * (Out - Target)
    for donate in (False, True):
        dIn, grads = strategy.backward(dOut, saved, params, mesh, donate=donate, **bucket)
        assert same([grads, dIn], found)
    assert saved.layers == []
    with pytest.raises(ValueError, match=f"saved has 0 layers, the params have {L}: .*\n  fix: run forward again"):
        strategy.backward(dOut, saved, params, mesh)
    partial, dIns, count = None, [], 2
    for i, (rows, cotangent) in enumerate(zip(In.chunk(count), dOut.chunk(count), strict=True)):
        _, saved = strategy.forward(params, rows, mesh, *block)
        given = partial and {**partial}
        dIn, partial = strategy.backward(cotangent, saved, params, mesh, partial, reduce=i == count - 1, **bucket)
        dIns.append(dIn)
    close([partial, torch.cat(dIns)], found)
    if name in ("data_parallel", "tensor_parallel"):  # a reduction leaves sums as large as they are: in their place
        assert all(partial[key].data_ptr() == given[key].data_ptr() for key in given)


@pytest.mark.parametrize(("mesh", "name", "block", "layers", "dtype"), CASES, ids=str)
def test_equal_to_one_device(mesh, name, block, layers, dtype):
    """Three steps, and the gradients by the vjp of forward. `layers`: how many of them a bucket holds."""
    strategy, (params, batches) = (STRATEGIES | {"pods": pods})[name], whole(dtype)
    types = specs(strategy), strategy.SPECS["In"]
    shards, (In, Target) = tree.shard(params, types[0], mesh), batches[0]
    bucket = {"bucket_bytes": layers * tree.nbytes(shards) // L}

    def step(params, batch):
        In, Target = batch_of(strategy, batch, mesh)
        before = tree.map(torch.clone, (In, params))
        Out, saved = strategy.forward(params, In, mesh, *block)
        dIn, grads = strategy.backward(2 / B * (Out - Target), saved, params, mesh, **bucket)
        tree.check(grads, types[0], SIZES, mesh, dtype)
        assert same(before, (In, params)), "batch or params were changed"
        return squares(Out, Target), grads, dIn  # Loss[] {U}: this rank's terms

    def forward(params, In):
        return strategy.forward(params, In, mesh, *block)[0]

    losses, first, after = trained(shards, step, batches)
    other_ways(strategy, name, batches[0], shards, mesh, block, bucket, first)
    dOut = 2 / B * (stack(params, In, block) - Target)
    _, by_vjp = pulled(forward, mesh, (params, In), types, strategy.SPECS["Out"], dOut)
    terms = f"Loss[S] {{U_{''.join(mesh.sizes)}}}"
    found = tree.unshard([losses, first, after], [terms, [*types], types[0]], mesh)
    wanted = one_device(dtype, block)
    close([*found, [*by_vjp]], [*wanted, wanted[1]])


@on_ranks({"X": 2})
@pytest.mark.parametrize(("stage", "layers", "donate"), [(1, 0, False), (2, 0, True), (2, 2, False), (2, 3, True)])
def test_zero(mesh, stage, layers, donate):
    """Equal to one device; an AllReduce of DP is a ReduceScatter and an AllGather here: the same bytes."""
    params, batches = whole()
    bucket = {"bucket_bytes": layers * tree.nbytes(params) // L}
    adamw, shards = optim.adamw(0.01), {name: [spec] * L for name, spec in zero.SHARDS.items()}
    state = zero.init(adamw, params, mesh)
    for batch in batches:
        In, Target = batch_of(zero, batch, mesh)
        with trace() as log:
            Out, saved = zero.forward(params, In, mesh, *BLOCKS[0])
            _, grads = zero.backward(2 / B * (Out - Target), saved, params, mesh, stage=stage, **bucket)
            given = tree.map(torch.clone, params)
            new, state = zero.update(adamw, grads, state, params, mesh, donate=donate)
        for found in (grads, state["m"]):
            tree.check(found, shards, SIZES, mesh)
        assert new["W_in"] is params["W_in"] if donate else same(params, given)
        params = new
    assert all(event.async_op for event in log.collectives())
    assert counts(log) == {(RS, "X"): 2 * -(-L // max(1, layers)), (AG, "X"): 2 * L}
    assert log.book_bytes == 2 * tree.nbytes(params)
    close(params, one_device()[2])


X, Y = 4, 2
MESH = AbstractMesh({"X": X, "Y": Y})


def arrays(strategy, mesh=MESH, sizes=SIZES, dtype=torch.float32):
    """In, and the params of L layers."""
    meta, types = {"dtype": dtype, "device": "meta"}, {key: parse(text) for key, text in strategy.SPECS.items()}
    local = {key: torch.empty(types[key].local_shape(sizes, mesh), **meta) for key in ("In", "W_in", "W_out")}
    return local.pop("In"), {key: W.expand(sizes["L"], *W.shape) for key, W in local.items()}


def passes(strategy, In, params, mesh=MESH, backward=None, **keep):
    """The logs of one forward and of one backward."""
    with trace() as forward:
        Out, saved = strategy.forward(params, In, mesh, **keep)
    with trace() as back:
        strategy.backward(Out, saved, params, mesh, **(backward or {}))
    return forward, back


# book map: collectives of one layer, forward and backward
LEDGER = named(
    """
strategy         collectives of one layer, forward and backward
data_parallel    ({}, {(AR, "X"): 2})
fsdp             ({(AG, "X"): 2}, {(AG, "X"): 2, (RS, "X"): 2})
tensor_parallel  ({(AG, "Y"): 1, (RS, "Y"): 1}, {(AG, "Y"): 1, (RS, "Y"): 1})
fsdp_tp          ({(AG, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1}, {(AG, "X"): 2, (RS, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1})
""",
    globals(),
)
BD, DF = 4 * B * D, 4 * D * F  # bytes of the activations and of one weight in float32
# Part 5, Takeaways (erratum E-5.1 for the backward of FSDP + TP), with 4 bytes an element instead of 2
BYTES = named(
    """
strategy         forward, backward
data_parallel    (0, 4 * DF)
fsdp             (2 * DF, 4 * DF)
tensor_parallel  (2 * BD, 2 * BD)
fsdp_tp          (2 * BD // X + 2 * DF // Y, 2 * BD // X + 4 * DF // Y)
""",
    globals(),
)


@pytest.mark.parametrize("name", STRATEGIES)
def test_collectives_and_bytes_of_one_layer(name):
    """By hand, and by the vjp of forward, which keeps the weights and leaves what is replicated unreduced."""
    strategy, axes = STRATEGIES[name], "".join(STRATEGIES[name].SPECS.values())
    In, params = arrays(strategy, sizes=SIZES | {"L": 1})
    logs = forward, backward = passes(strategy, In, params)
    assert (counts(forward), counts(backward)) == LEDGER[name]
    assert (forward.book_bytes, backward.book_bytes) == BYTES[name]
    flops = 2 * B * D * F // ((X if "_X" in axes else 1) * (Y if "_Y" in axes else 1))
    assert [log.flops for log in logs] == [2 * flops, 4 * flops]
    if "_Y" in axes:
        again = passes(strategy, In, params, keep=False)[1]
        assert counts(again) == counts(backward) + Counter({(AG, "Y"): 1})
        assert again.book_bytes == backward.book_bytes + BD // (X if "_X" in axes else 1)
    unreduced = {key: n for key, n in LEDGER[name][1].items() if key not in ((AR, "X"), (RS, "X"))}
    _, first = passes(strategy, In, params, backward={"reduce": False})  # microbatches synchronise once, in the last
    sums = strategy.backward(In, strategy.forward(params, In, MESH)[1], params, MESH, reduce=False)[1]
    _, last = passes(strategy, In, params, backward={"partial": sums})
    assert (counts(first), counts(last)) == (unreduced, counts(backward))
    Out, pull = vjp(lambda params, In: strategy.forward(params, In, MESH)[0], params, In)
    with trace() as by_vjp:
        pull(Out)
    assert counts(by_vjp) == {key: n for key, n in LEDGER[name][1].items() if key not in ((AG, "X"), (AR, "X"))}
    gathered = {"fsdp": 2 * DF, "fsdp_tp": 2 * DF // Y, "data_parallel": 4 * DF}.get(name, 0)
    assert by_vjp.book_bytes == backward.book_bytes - gathered


@pytest.mark.parametrize(("layers", "buckets"), [(0, 3), (2, 2), (3, 1)])
def test_a_bucket_holds_as_many_layers_as_fit(layers, buckets):
    """Its gradients are reduced by one collective a leaf, and no byte more is sent."""
    for name, op, share in (("data_parallel", AR, 1), ("fsdp", RS, X)):
        In, params = arrays(STRATEGIES[name])
        for bucket in (layers * 2 * DF // share, (layers + 1) * 2 * DF // share - 1):
            *_, log = passes(STRATEGIES[name], In, params, backward={"bucket_bytes": bucket})
            assert counts(log)[op, "X"] == 2 * buckets
            assert log.book_bytes == L * 4 * DF


@pytest.mark.parametrize("sizes", [{"P": 2, "X": 2, "Y": 2}, {"P": 2, "X": 1024, "Y": 8}], ids=str)
def test_bytes_between_pods_are_the_books(sizes):
    """8DF/M a layer over the datacenter's network (M chips a slice), 12DF/Y over X, 8BD/X over Y of a pod's batch."""
    began, mesh, (L, B, D, F) = time.process_time(), AbstractMesh(sizes), (2, 4096, 8192, 32768)
    moved, (P, X, Y) = Counter(), sizes.values()
    for log in passes(pods, *arrays(pods, mesh, {"L": L, "B": B, "D": D, "F": F}, torch.bfloat16), mesh):
        for event in log.collectives():
            moved["".join(event.axes)] += event.nbytes * (2 if event.op == AR else 1)
    assert moved == {"P": L * 8 * D * F // (X * Y), "X": L * 12 * D * F // Y, "Y": L * 8 * (B // P) * D // X}
    assert time.process_time() - began < 10  # of 16,384 chips too


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), pods], ids=[*STRATEGIES, "pods"])
def test_nothing_in_a_layer_waits_that_need_not(strategy):
    """Gathers and reductions are under way when their lines return, and weights' gradients are not even begun."""
    mesh, listing = AbstractMesh({"P": 2, "X": 2, "Y": 2}), strategy.STRATEGY
    In, stacks = arrays(strategy, mesh)
    weights = [W[0] for W in stacks.values()]

    def waited(pending, kind=Pending):
        assert all(isinstance(each, kind) for each in pending)
        return [each.wait() for each in pending]

    if listing.gather:
        weights = waited(listing.gather(*weights, mesh))
    Out, saved = listing.layer_forward(*weights, In, mesh, Block())
    with trace() as log:
        dIn, *products = listing.layer_backward(*weights, Out, saved, mesh, Block())
    assert [e.async_op for e in log.events if e.op == "ReduceScatter"] == [True] * isinstance(dIn, Pending)
    grads = waited(products, Deferred)
    for reduce in filter(None, (listing.reduce, listing.reduce_slow)):
        grads = waited(reduce(*grads, mesh))


# the function, the types of its operands and result
FORMS = read_table(
    """
function           types of its operands                              type of its result
cm.gather_matmul   ["A[B_X, D_Y]", "W[D, F_Y]"]                       "Out[B_X, F_Y]"
cm.matmul_scatter  ["A[B_X, D_Y]", "W[D_Y, F]"]                       "Out[B_X, F_Y]"
cm.matmul_reduce   ["A[B_X, D_Y]", "W[D_Y, F]"]                       "Out[B_X, F]"
cm.mlp             ["In[B_X, D_Y]", "W_in[D, F_Y]", "W_out[F_Y, D]"]  "Out[B_X, D_Y]"
""",
    globals(),
)


def dense(A, *weights):
    first = A @ weights[0]
    return torch.nn.functional.gelu(first) @ weights[1] if len(weights) == 2 else first


@on_ranks({"X": 1, "Y": 4}, {"X": 2, "Y": 2}, {"X": 1, "Y": 1})
def test_collective_matmuls_equal_one_device(mesh):
    for form, types, result in FORMS:
        operands = problems.drawn((B, D), (D, F), (F, D))[: len(types)]
        dOut = problems.drawn((B, D if form is cm.mlp else F), seed=1)[0]
        wanted = problems.on_one_device(dense, operands, dOut)
        for ways in (1, 2):
            close(pulled(partial(form, mesh=mesh, ways=ways), mesh, operands, types, result, dOut), wanted)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("ways", [1, 2])
def test_hops_and_bytes_of_collective_matmuls(n, ways):
    mesh, F, hops = AbstractMesh({"Y": n}), 4 * n, (n - 1 if ways == 1 else n // 2)
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
