"""What a layer of each strategy sends, in both passes: which collectives, how many bytes, and what overlaps."""

from collections import Counter

import pytest
import torch
from mlp_problem import AG, AR, BLOCKS, RS, SIZES, STRATEGIES, B, D, F, L, close, counts, specs, whole
from torch.func import vjp

from scaling import tree
from scaling.collectives import Deferred, Pending, all_reduce
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import pods
from scaling.strategies.stack import Block
from scaling.trace import trace


def one_layer(mesh, name, **keep):
    """One forward and backward of one layer of B x D x F on an AbstractMesh: the two logs."""
    strategy, meta = STRATEGIES[name], {"dtype": torch.float32, "device": "meta"}
    shape = lambda key, **more: torch.empty(types[key].local_shape(SIZES, mesh), **meta)  # noqa: E731
    types = {key: parse(text) for key, text in strategy.SPECS.items()}
    params = {key: shape(key)[None] for key in ("W_in", "W_out")}
    with trace() as forward:
        Out, saved = strategy.forward(params, shape("In"), mesh, **keep)
    with trace() as backward:
        strategy.backward(Out, saved, params, mesh)
    return forward, backward


LEDGER = {  # book map: collectives of one layer, forward and backward
    "data_parallel": ({}, {(AR, "X"): 2}),
    "fsdp": ({(AG, "X"): 2}, {(AG, "X"): 2, (RS, "X"): 2}),
    "tensor_parallel": ({(AG, "Y"): 1, (RS, "Y"): 1}, {(AG, "Y"): 1, (RS, "Y"): 1}),
    "fsdp_tp": (
        {(AG, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1},
        {(AG, "X"): 2, (RS, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1},
    ),
}


X, Y = 4, 2
BD, DF = 4 * B * D, 4 * D * F  # bytes of the activations and of one weight in float32
BYTES = {  # Part 5, Takeaways (erratum E-5.1 for the backward of FSDP + TP), with 4 bytes an element instead of 2
    "data_parallel": (0, 4 * DF),
    "fsdp": (2 * DF, 4 * DF),
    "tensor_parallel": (2 * BD, 2 * BD),
    "fsdp_tp": (2 * BD // X + 2 * DF // Y, 2 * BD // X + 4 * DF // Y),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_collectives_and_bytes_of_one_layer(name):
    mesh, axes = AbstractMesh({"X": X, "Y": Y}), "".join(STRATEGIES[name].SPECS.values())
    logs = forward, backward = one_layer(mesh, name)
    assert (counts(forward), counts(backward)) == LEDGER[name]
    assert (forward.book_bytes, backward.book_bytes) == BYTES[name]
    flops = 2 * B * D * F // ((X if "_X" in axes else 1) * (Y if "_Y" in axes else 1))
    assert [log.flops for log in logs] == [2 * flops, 4 * flops]
    if "_Y" in axes:
        again = one_layer(mesh, name, keep=False)[1]
        assert counts(again) == counts(backward) + Counter({(AG, "Y"): 1})
        assert again.book_bytes == backward.book_bytes + BD // (X if "_X" in axes else 1)


def run_vjp(mesh, name, block):
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    with trace() as by_hand:
        Out, saved = strategy.forward(params, In, mesh, *block)
        dIn, grads = strategy.backward(dOut, saved, params, mesh)
    with trace() as by_vjp:
        Out_vjp, pull = vjp(lambda params, In: strategy.forward(params, In, mesh, *block)[0], params, In)
        grads_vjp, dIn_vjp = pull(dOut)
        if name == "data_parallel":  # a replicated weight's cotangent is unreduced: the AllReduce is the caller's
            for key, spec in (("W_in", "dW_in[D, F]"), ("W_out", "dW_out[F, D]")):
                line = f"{spec} {{U_X}} -> {spec}"
                grads_vjp[key] = torch.stack([all_reduce(line, g, mesh) for g in grads_vjp[key]])
    close([Out_vjp, dIn_vjp, grads_vjp], [Out, dIn, grads], torch.float64)
    return counts(by_hand) - counts(by_vjp), counts(by_vjp) - counts(by_hand), by_hand.book_bytes - by_vjp.book_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_backward_is_the_vjp_of_forward(ranks, name):
    """In numbers and in collectives, but for the weights that the explicit backward gathers again and a vjp keeps."""
    mesh = {"X": 2, "Y": 2}
    again = {(AG, "X"): 2 * L} if "fsdp" in name else {}
    again_bytes = L * 2 * 8 * D * F // (2 if name == "fsdp_tp" else 1) if "fsdp" in name else 0
    for result in ranks(run_vjp, mesh, name, BLOCKS[0]):
        assert result == (Counter(again), Counter(), again_bytes)


def run_microbatches(mesh, name, count):
    """The gradients of one batch, taken whole and in `count` microbatches, with the collectives of both."""
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    _, saved = strategy.forward(params, In, mesh)
    with trace() as once:
        dIn, wanted = strategy.backward(dOut, saved, params, mesh)
    partial, dIns = None, []
    for i, (rows, cotangent) in enumerate(zip(In.chunk(count), dOut.chunk(count), strict=True)):
        _, saved = strategy.forward(params, rows, mesh)
        with trace() as log:
            last = i == count - 1
            dIn_rows, partial = strategy.backward(cotangent, saved, params, mesh, partial, reduce=last)
        dIns.append(dIn_rows)
        if not last:
            assert not any(event.op in (AR, RS) and event.axes == ("X",) for event in log.events)
    close([torch.cat(dIns), partial], [dIn, wanted], torch.float64)
    over_x = [Counter({k: n for k, n in counts(each).items() if k[1] == "X"}) for each in (once, log)]
    return over_x[0] == over_x[1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_microbatches_synchronise_once(ranks, name):
    assert all(ranks(run_microbatches, {"X": 2, "Y": 2}, name, 4))


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), pods], ids=[*STRATEGIES, "pods"])
def test_nothing_in_a_layer_waits_that_need_not(strategy):
    """Gathers and reductions are under way when their lines return, and weights' gradients are not even begun."""
    mesh, listing = AbstractMesh({"P": 2, "X": 2, "Y": 2}), strategy.STRATEGY
    types = {key: parse(text) for key, text in strategy.SPECS.items()}
    In, W_in, W_out, Out = (torch.empty(spec.local_shape(SIZES, mesh), device="meta") for spec in types.values())
    weights = [W_in, W_out]
    if listing.gather:
        pending = listing.gather(*weights, mesh)
        assert all(isinstance(W, Pending) for W in pending)
        weights = [W.wait() for W in pending]
    _, saved = listing.layer_forward(*weights, In, mesh, Block())
    with trace() as log:
        dIn, *products = listing.layer_backward(*weights, Out, saved, mesh, Block())
    assert [e.async_op for e in log.events if e.op == "ReduceScatter"] == [True] * isinstance(dIn, Pending)
    assert all(isinstance(product, Deferred) for product in products)
    grads = [product.wait() for product in products]
    for reduce in filter(None, (listing.reduce, listing.reduce_slow)):
        pending = reduce(*grads, mesh)
        assert all(isinstance(dW, Pending) for dW in pending)
        grads = [dW.wait() for dW in pending]
