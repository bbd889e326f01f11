"""The trace: which events, their types, V, wire bytes and FLOPs, and that blocks nest."""

from math import prod

import pytest
import torch
from torch.func import grad, vjp

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh
from scaling.trace import trace

MESH = AbstractMesh({"X": 4, "Y": 2})
I, J = 8, 16  # what one device holds in the calls below, float32
V = I * J * 4  # its bytes


def meta(*shape):
    return torch.empty(shape, device="meta")


# call on A of local shape [I, J] -> op, axes, types before and after, V, bytes sent by this rank (Part 3)
MOVES = {
    "AllGather": (
        lambda x: c.all_gather("A[I_X, J] -> A[I, J]", x, MESH),
        ("X",), "A[I_X, J]", "A[I, J]", 4 * V, 3 * V,
    ),
    "ReduceScatter": (
        lambda x: c.reduce_scatter("A[I, J] {U_X} -> A[I_X, J]", x, MESH),
        ("X",), "A[I, J] {U_X}", "A[I_X, J]", V, 3 * V // 4,
    ),
    "AllReduce": (
        lambda x: c.all_reduce("A[I, J] {U_XY} -> A[I, J]", x, MESH),
        ("X", "Y"), "A[I, J] {U_XY}", "A[I, J]", V, 2 * 7 * V // 8,
    ),
    "ReduceScatter by mean": (
        lambda x: c.reduce_scatter("A[I, J] {U_X} -> A[I_X, J]", x, MESH, op="mean"),
        ("X",), "A[I, J] {U_X}", "A[I_X, J]", V, 3 * V // 4,
    ),
    "AllReduce by max": (
        lambda x: c.all_reduce("A[I, J] {U_X} -> A[I, J]", x, MESH, op="max"),
        ("X",), "A[I, J] {U_X}", "A[I, J]", V, 2 * 3 * V // 4,
    ),
    "AllToAll": (
        lambda x: c.all_to_all("A[I_X, J] -> A[I, J_X]", x, MESH),
        ("X",), "A[I_X, J]", "A[I, J_X]", 4 * V, 3 * V // 4,
    ),
    "Slice": (
        lambda x: c.shard("A[I, J] -> A[I_X, J]", x, MESH),
        ("X",), "A[I, J]", "A[I_X, J]", V, 0,
    ),
    "CollectivePermute": (
        lambda x: c.ppermute("A[I_X, J]", x, MESH, "X", [(0, 1), (1, 0)]),
        ("X",), "A[I_X, J]", "A[I_X, J]", V, V,
    ),
    "Broadcast": (
        lambda x: c.broadcast("A[I, J] {U_X} -> A[I, J]", x, MESH),
        ("X",), "A[I, J] {U_X}", "A[I, J]", V, 3 * V,
    ),
    "Reduce": (
        lambda x: c.reduce("A[I, J] {U_X} -> A[I, J] {U_X}", x, MESH, root=1),
        ("X",), "A[I, J] {U_X}", "A[I, J] {U_X}", V, V,
    ),
    "Scatter": (
        lambda x: c.scatter("A[I, J] {U_X} -> A[I_X, J]", x, MESH),
        ("X",), "A[I, J] {U_X}", "A[I_X, J]", V, 3 * V // 4,
    ),
    "Gather": (
        lambda x: c.gather("A[I_X, J] -> A[I, J] {U_X}", x, MESH, root=1),
        ("X",), "A[I_X, J]", "A[I, J] {U_X}", 4 * V, V,
    ),
    "Send": (lambda x: c.send("A[I, J]", x, MESH, "Y", 1), ("Y",), "A[I, J]", "A[I, J]", V, V),
    "Recv": (lambda x: c.recv("A[I, J]", x, MESH, "Y", 1), ("Y",), "A[I, J]", "A[I, J]", V, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_an_event_per_collective(name):
    op, (call, axes, before, after, nbytes, wire_bytes) = name.split()[0], MOVES[name]
    with trace() as log:
        call(meta(I, J))
    (event,) = log.events
    assert (event.op, event.axes, str(event.before), str(event.after)) == (op, axes, before, after)
    assert (event.nbytes, event.wire_bytes, event.flops, event.async_op) == (nbytes, wire_bytes, 0, False)
    assert 0 < event.start <= event.end
    assert log.collectives() == ([] if op == "Slice" else [event])
    assert (log.count(op), log.count(op, axes), log.count(op, "Z"), log.count("Einsum")) == (1, 1, 0, 0)


SECOND = AbstractMesh({"X": 4, "Y": 2}, {"X": 1, "Y": 0})
PEERS = {  # call on SECOND -> the ranks along the axis
    "a permutation": (lambda x: c.ppermute("A[I_X, J]", x, SECOND, "X", [(0, 1), (1, 2), (3, 3)]), (0,)),
    "another's Broadcast": (lambda x: c.broadcast("A[I, J] {U_X} -> A[I, J]", x, SECOND, root=3), (3,)),
    "its own Broadcast": (lambda x: c.broadcast("A[I, J] {U_X} -> A[I, J]", x, SECOND, root=1), ()),
    "a Scatter": (lambda x: c.scatter("A[I, J] {U_X} -> A[I_X, J]", x, SECOND, root=3), (3,)),
    "a Send": (lambda x: c.send("A[I, J]", x, SECOND, "Y", 1), (1,)),
    "an AllGather": (lambda x: c.all_gather("A[I_X, J] -> A[I, J]", x, SECOND), ()),
}


@pytest.mark.parametrize(("call", "peers"), PEERS.values(), ids=PEERS)
def test_an_event_names_single_ranks_that_this_one_waits_for(call, peers):
    with trace() as log:
        call(meta(I, J))
    assert [event.peers for event in log.events] == [peers]


def test_one_event_for_each_dim_of_a_line():
    with trace() as log:
        c.all_gather("A[I_X, J_Y] -> A[I, J]", meta(I, J), MESH)
    assert [(e.axes, e.nbytes, str(e.after)) for e in log.events] == [
        (("X",), 4 * V, "A[I, J_Y]"),
        (("Y",), 8 * V, "A[I, J]"),
    ]


# line, shapes of the operands and of the result -> FLOPs (Part 4, Counting Dots)
FLOPS = {
    "A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}": ([(2, 3), (3, 5)], (2, 5), 2 * 2 * 3 * 5),
    "A[B, I, J] * B[B, J, K] -> C[B, I, K]": ([(7, 2, 3), (7, 3, 5)], (7, 2, 5), 2 * 7 * 2 * 3 * 5),
    "A[I] * B[J] -> C[I, J]": ([(2,), (3,)], (2, 3), 2 * 3),
    "A[I] * B[I] -> C[]": ([(4,), (4,)], (), 2 * 4),
    "A[I, J] -> C[J, I]": ([(2, 3)], (3, 2), 0),
}


@pytest.mark.parametrize("line", FLOPS)
def test_the_flops_and_the_memory_of_a_product(line):
    shapes, result, flops = FLOPS[line]
    with trace() as log:
        c.einsum(line, *(torch.ones(shape) for shape in shapes))
    (event,) = log.events
    assert (event.op, event.axes, event.flops, event.nbytes, event.wire_bytes) == ("Einsum", (), flops, 0, 0)
    assert " * ".join(map(str, event.before)) + f" -> {event.after}" == line
    assert event.memory == 4 * sum(map(prod, [*shapes, result]))


def test_sums_over_a_log():
    with trace() as log:
        for op in ("AllGather", "ReduceScatter", "AllReduce", "Slice"):
            MOVES[op][0](meta(I, J))
        c.einsum("A[I, J] * B[J, K] -> C[I, K]", meta(2, 3), meta(3, 5))
    assert (log.book_bytes, log.wire_bytes, log.flops) == (4 * V + V + 2 * V, 3 * V + 3 * V // 4 + 7 * V // 4, 60)


def test_the_table_shows_the_lines_as_they_ran():
    with trace() as log:
        c.all_gather("W[D_X, F] -> W[D, F]", meta(I, J), MESH, async_op=True).wait()
        c.all_gather("W[D_{data}] -> W[D]", meta(4), AbstractMesh({"data": 3}))
        c.einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", meta(200, 3), meta(3, 5))
    head, _, first, second, third = log.table().splitlines()
    assert head.split("  ")[0] == "line"
    assert first.split()[:4] == ["W[D,", "F]", "=", "AllGather_X(W[D_X,"]
    assert first.split()[5:7] == ["2,048", "1,536"]
    assert first.endswith(" async")
    assert second.startswith("W[D] = AllGather_{data}(W[D_{data}])")
    assert third.startswith("C[I, K] {U_X} = A[I, J_X] * B[J_X, K]")
    assert "6,000" in third


def test_blocks_nest_and_each_sees_what_runs_inside_it():
    x = torch.ones(3)
    one = lambda: c.einsum("A[I] * B[I] -> C[]", x, x)  # noqa: E731
    with trace() as outer:
        with trace() as inner:  # until here both logs are equal
            one()
        one()
        with trace() as second:
            one()
    with pytest.raises(KeyError), trace() as raised:
        raise KeyError
    one()
    assert [len(log.events) for log in (outer, inner, second, raised)] == [3, 1, 1, 0]


def both_ways(mesh):
    """What a forward and backward, explicit, by autograd and by torch.func, leave in the log of a real mesh."""
    x, w = torch.arange(4.0) + mesh.rank, torch.ones(8)

    def explicit():
        full = c.all_gather("A[I_X] -> A[I]", x, mesh)
        return full, c.reduce_scatter("dA[I] {U_X} -> dA[I_X]", w, mesh)

    def by_vjp():
        full, pull = vjp(lambda x: c.all_gather("A[I_X] -> A[I]", x, mesh), x)
        return full, pull(w)[0]

    def by_autograd():
        leaf = torch.nn.Parameter(x.clone())
        full = c.all_gather("A[I_X] -> A[I]", leaf, mesh)
        return full.detach(), torch.autograd.grad(full, leaf, w)[0]

    results = []
    for way in (explicit, by_vjp, by_autograd):
        untraced = way()
        with trace() as log:
            traced = way()
        assert all(map(torch.equal, traced, untraced)), "a trace only observes"
        results.append(
            [(e.op, e.axes, str(e.before), str(e.after), e.nbytes, e.wire_bytes, e.start <= e.end) for e in log.events]
        )
    with trace() as log:
        grad(lambda x: c.all_reduce("A[I] {U_X} -> A[I]", x, mesh).sum())(x)
    return results, [e.op for e in log.events]


def test_a_derivative_traces_as_the_explicit_backward_does(ranks):
    wanted = [
        ("AllGather", ("X",), "A[I_X]", "A[I]", 32, 16, True),
        ("ReduceScatter", ("X",), "dA[I] {U_X}", "dA[I_X]", 32, 16, True),
    ]
    for results, reduced in ranks(both_ways, {"X": 2}):
        assert results == [wanted] * 3
        assert reduced == ["AllReduce", "AllReduce"]


def asynchronous(mesh):
    with trace() as log:
        pending = c.all_reduce("A[I] {U_X} -> A[I]", torch.ones(4), mesh, async_op=True)
        started = log.events[0].end
        c.einsum("A[I] -> C[]", torch.ones(3))
        pending.wait()
        first = log.events[0].end
        pending.wait()
    event, product = log.events
    assert (event.op, event.async_op, started) == ("AllReduce", True, 0.0)
    assert event.start < product.start < product.end < event.end == first
    return event.nbytes


def test_an_asynchronous_event_ends_where_it_is_waited_for(ranks):
    assert ranks(asynchronous, {"X": 2}) == [16, 16]


def test_on_one_device_collectives_move_nothing():
    mesh = Mesh({"X": 1})
    with trace() as log:
        c.all_gather("A[I_X] -> A[I]", torch.ones(4), mesh)
        c.all_reduce("A[I] {U_X} -> A[I]", torch.ones(4), mesh)
    assert [(e.op, e.wire_bytes) for e in log.events] == [("AllGather", 0), ("AllReduce", 0)]


def test_a_line_that_is_reached_is_told_before_it_is_recorded():
    told = []
    with trace() as log, trace(lambda event, moment: told.append((event.op, moment, len(log.events)))):
        for _ in range(2):
            c.all_gather("A[I_X] -> A[I]", torch.empty(2, device="meta"), AbstractMesh({"X": 2}))
    moments = [("reached", 0), ("started", 1), ("ended", 1), ("reached", 1), ("started", 2), ("ended", 2)]
    assert told == [("AllGather", *each) for each in moments]
