"""What a layer of each strategy sends, in both passes: which collectives, how many bytes, and what overlaps."""

from collections import Counter

import pytest
import torch
from problems import AG, AR, RS, SIZES, STRATEGIES, B, D, F, L, counts
from torch.func import vjp

from scaling.collectives import Deferred, Pending
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import layers as engine
from scaling.strategies import pods
from scaling.strategies.stack import Block
from scaling.trace import trace

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


LEDGER = {  # book map: collectives of one layer, forward and backward
    "data_parallel": ({}, {(AR, "X"): 2}),
    "fsdp": ({(AG, "X"): 2}, {(AG, "X"): 2, (RS, "X"): 2}),
    "tensor_parallel": ({(AG, "Y"): 1, (RS, "Y"): 1}, {(AG, "Y"): 1, (RS, "Y"): 1}),
    "fsdp_tp": (
        {(AG, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1},
        {(AG, "X"): 2, (RS, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1},
    ),
}
BD, DF = 4 * B * D, 4 * D * F  # bytes of the activations and of one weight in float32
BYTES = {  # Part 5, Takeaways (erratum E-5.1 for the backward of FSDP + TP), with 4 bytes an element instead of 2
    "data_parallel": (0, 4 * DF),
    "fsdp": (2 * DF, 4 * DF),
    "tensor_parallel": (2 * BD, 2 * BD),
    "fsdp_tp": (2 * BD // X + 2 * DF // Y, 2 * BD // X + 4 * DF // Y),
}


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


@pytest.mark.parametrize(("layers", "made"), [(0, [1, 1, 1]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (99, [3])])
def test_a_bucket_holds_as_many_layers_as_fit(layers, made, monkeypatch):
    """Its gradients are reduced together, out of one buffer in which blocks that are scattered lie in one piece, and
    no byte more is sent."""
    counted, real = [], engine._room

    def room(like, shape, dim, together, dtype=None):
        made = real(like, shape, dim, together, dtype)
        assert made.movedim(dim, 0 if together else 1).is_contiguous()
        counted.append((together, *made.shape))
        return made

    monkeypatch.setattr(engine, "_room", room)
    for name, op, share in (("data_parallel", AR, 1), ("fsdp", RS, X)):
        In, params = arrays(STRATEGIES[name])
        for bucket in (layers * 2 * DF // share, (layers + 1) * 2 * DF // share - 1):
            *_, log = passes(STRATEGIES[name], In, params, backward={"bucket_bytes": bucket})
            assert counts(log)[op, "X"] == 2 * len(made)
            assert log.book_bytes == L * 4 * DF
            rooms = [(count > 1, count, *shape) for count in made for shape in ((D, F), (F, D))]
            assert counted == (rooms if op == RS else [])
            counted.clear()


@pytest.mark.parametrize("sizes", [{"P": 2, "X": 2, "Y": 2}, {"P": 2, "X": 1024, "Y": 8}], ids=str)
def test_bytes_between_pods_are_the_books(sizes):
    """8DF/M a layer over the datacenter's network (M chips a slice), 12DF/Y over X, 8BD/X over Y of a pod's batch."""
    mesh, (L, B, D, F) = AbstractMesh(sizes), (2, 4096, 8192, 32768)
    moved, (P, X, Y) = Counter(), sizes.values()
    for log in passes(pods, *arrays(pods, mesh, {"L": L, "B": B, "D": D, "F": F}, torch.bfloat16), mesh):
        for event in log.collectives():
            moved["".join(event.axes)] += event.nbytes * (2 if event.op == AR else 1)
    assert moved == {"P": L * 8 * D * F // (X * Y), "X": L * 12 * D * F // Y, "Y": L * 8 * (B // P) * D // X}


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
