"""The trace: which events, their types, V, wire bytes and FLOPs; blocks nest. Peak memory, known by hand."""

from functools import partial
from math import prod

import pytest
import torch
from array_types import meta
from machine import on_ranks
from refused import read_table
from torch.func import grad, vjp

from scaling import collectives as c
from scaling.collectives import all_gather, einsum
from scaling.mesh import AbstractMesh
from scaling.models.pointwise import vjp as tape
from scaling.trace import trace
from scaling.trace.peak import peak_memory

MESH = AbstractMesh({"X": 4, "Y": 2}, {"X": 1, "Y": 0})
I, J = 8, 16  # what one device holds in the calls below, float32
V = I * J * 4  # its bytes


def ragged(line, x, mesh):
    """8 rows, of which 2 stay; as many rows come, or 9."""
    return c.ragged_all_to_all(line, x, (2, 2, 2, 2), torch.tensor([0, 2, 5, 2]), mesh)


AROUND, APART = [(0, 1), (1, 2), (3, 3)], [(1, 1), (0, 2)]
RAGGED = "A[G_X, E, R, D] {U_Y} -> A[G, E_X, R, D] {U_Y}"
# calls on A of local shape [I, J]: V and the bytes sent by this rank (Part 3), and the one rank that it waits for
TABLE = """
call            line                            op                 axes  V      bytes       peers  options
all_gather      A[I_X, J] -> A[I, J]            AllGather          X     4 * V  3 * V       ()
reduce_scatter  A[I, J] {U_X} -> A[I_X, J]      ReduceScatter      X     V      3 * V // 4  ()
reduce_scatter  A[I, J] {U_X} -> A[I_X, J]      ReduceScatter      X     V      3 * V // 4  ()     op="mean"
all_reduce      A[I, J] {U_XY} -> A[I, J]       AllReduce          XY    V      7 * V // 4  ()
all_reduce      A[I, J] {U_X} -> A[I, J]        AllReduce          X     V      3 * V // 2  ()     op="max"
all_to_all      A[I_X, J] -> A[I, J_X]          AllToAll           X     4 * V  3 * V // 4  ()
shard           A[I, J] -> A[I_X, J]            Slice              X     V      0           ()
ppermute        A[I_X, J]                       CollectivePermute  X     V      V           (0,)   axis="X", perm=AROUND
ppermute        A[I_X, J]                       CollectivePermute  X     V      0           ()     axis="X", perm=APART
broadcast       A[I, J] {U_X} -> A[I, J]        Broadcast          X     V      3 * V       ()     root=1
broadcast       A[I, J] {U_X} -> A[I, J]        Broadcast          X     V      0           (3,)   root=3
reduce          A[I, J] {U_X} -> A[I, J] {U_X}  Reduce             X     V      V           (0,)
scatter         A[I, J] {U_X} -> A[I_X, J]      Scatter            X     V      3 * V // 4  ()     root=1
scatter         A[I, J] {U_X} -> A[I_X, J]      Scatter            X     V      0           (3,)   root=3
gather          A[I_X, J] -> A[I, J] {U_X}      Gather             X     4 * V  V           (3,)   root=3
send            A[I, J]                         Send               Y     V      V           (1,)   axis="Y", to=1
recv            A[I, J]                         Recv               Y     V      0           (1,)   axis="Y", source=1
"""
MOVES = read_table(TABLE, vars(c) | globals(), ("line", "op", "axes"))
MOVES.append((ragged, RAGGED, "AllToAll", "X", 4 * V, 6 * V // 8, (), {}))


@pytest.mark.parametrize("case", MOVES)
def test_an_event_per_collective(case):
    call, line, op, axes, nbytes, wire_bytes, peers, options = case
    with trace() as log:
        call(line, meta(I, J), MESH, **options)
    (event,) = log.events
    assert (event.op, event.axes) == (op, tuple(axes))
    assert f"{event.before} -> {event.after}" == (line if "->" in line else f"{line} -> {line}")
    assert (event.nbytes, event.wire_bytes, event.flops, event.async_op) == (nbytes, wire_bytes, 0, False)
    assert event.peers == peers
    assert 0 < event.start <= event.end
    assert log.collectives() == ([] if op == "Slice" else [event])
    assert (log.count(op), log.count(op, axes), log.count(op, "Z"), log.count("Einsum")) == (1, 1, 0, 0)


# FLOPs as Part 4 counts them (Counting Dots)
TABLE = """
line                                     shapes                  result     FLOPs              dtype
A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}   [(2, 3), (3, 5)]        (2, 5)     2 * 2 * 3 * 5      torch.float32
A[B, I, J] * B[B, J, K] -> C[B, I, K]    [(7, 2, 3), (7, 3, 5)]  (7, 2, 5)  2 * 7 * 2 * 3 * 5  torch.float32
A[I] * B[J] -> C[I, J]                   [(2,), (3,)]            (2, 3)     2 * 3              torch.float64
A[I] * B[I] -> C[]                       [(4,), (4,)]            ()         2 * 4              torch.float32
A[I, J] -> C[J, I]                       [(2, 3)]                (3, 2)     0                  torch.float32
"""


@pytest.mark.parametrize(("line", "shapes", "result", "flops", "dtype"), read_table(TABLE, globals(), ("line",)))
def test_the_flops_and_the_memory_of_a_product(line, shapes, result, flops, dtype):
    with trace() as log:
        c.einsum(line, *(torch.ones(shape, dtype=dtype) for shape in shapes))
    (event,) = log.events
    assert (event.op, event.axes, event.flops, event.nbytes, event.wire_bytes) == ("Einsum", (), flops, 0, 0)
    assert " * ".join(map(str, event.before)) + f" -> {event.after}" == line
    assert [*event.memory] == [dtype.itemsize * prod(shape) for shape in (*shapes, result)]


def test_the_table_shows_the_lines_as_they_ran_and_a_log_has_their_sums():
    with trace() as log:
        c.all_gather("W[D_X, F] -> W[D, F]", meta(I, J), MESH, async_op=True).wait()
        c.all_gather("W[D_{data}] -> W[D]", meta(4), AbstractMesh({"data": 3}))
        c.einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", meta(200, 3), meta(3, 5))
        c.all_reduce("A[I, J] {U_X} -> A[I, J]", meta(I, J), MESH)
        c.shard("A[I, J] -> A[I_X, J]", meta(I, J), MESH)
    assert (log.book_bytes, log.wire_bytes, log.flops) == (4 * V + 48 + 2 * V, 3 * V + 32 + 6 * V // 4, 6000)
    head, _, first, second, third, *_ = log.table().splitlines()
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


@on_ranks({"X": 2})
def test_a_derivative_traces_as_the_explicit_backward_does(mesh):
    """A forward and backward, explicit, by autograd and by torch.func, on a real mesh."""
    x, w = torch.arange(4.0) + mesh.rank, torch.ones(8)

    def gather(x):
        return c.all_gather("A[I_X] -> A[I]", x, mesh)

    def explicit():
        return gather(x), c.reduce_scatter("dA[I] {U_X} -> dA[I_X]", w, mesh)

    def derived(by):
        full, pull = by(gather, x)
        return full, *pull(w)

    def by_autograd():
        leaf = torch.nn.Parameter(x.clone())  # as a module's: no plain tensor
        full = gather(leaf)
        return full.detach(), *torch.autograd.grad(full, leaf, w)

    logs = []
    for way in (explicit, partial(derived, vjp), partial(derived, tape), by_autograd):
        untraced = way()
        with trace() as log:
            traced = way()
        assert all(map(torch.equal, traced, untraced)), "a trace only observes"
        logs.append([(e.op, e.axes, str(e.before), str(e.after), e.nbytes, e.wire_bytes) for e in log.events])
    with trace() as log:
        grad(lambda x: c.all_reduce("A[I] {U_X} -> A[I]", x, mesh).sum())(x)
    gathered = ("AllGather", ("X",), "A[I_X]", "A[I]", 32, 16)
    assert logs == [[gathered, ("ReduceScatter", ("X",), "dA[I] {U_X}", "dA[I_X]", 32, 16)]] * 4
    assert [e.op for e in log.events] == ["AllReduce", "AllReduce"]


def test_ragged_rows_go_back_as_many_as_they_came_and_of_partial_sums_replicated():
    rows, pull = vjp(lambda x: ragged(RAGGED, x, MESH), meta(I, J))
    with trace() as log:
        (back,) = pull(meta(9, J))
    (event,) = log.events
    assert (rows.shape, back.shape, event.op) == ((9, J), (I, J), "AllToAll")
    assert f"{event.before} -> {event.after}" == "dA[G, E_X, R, D] -> dA[G_X, E, R, D]"
    assert (event.nbytes, event.wire_bytes) == (4 * 9 * J * 4, 7 * J * 4)


@on_ranks({"X": 2})
def test_an_asynchronous_event_ends_where_it_is_waited_for(mesh):
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
    assert event.nbytes == 16


def test_a_line_that_is_reached_is_reported_before_it_is_recorded():
    told = []
    with trace() as log, trace(lambda event, moment: told.append((event.op, moment, len(log.events)))):
        for _ in range(2):
            c.all_gather("A[I_X] -> A[I]", meta(2), AbstractMesh({"X": 2}))
    moments = [("reached", 0), ("started", 1), ("ended", 1), ("reached", 1), ("started", 2), ("ended", 2)]
    assert told == [("AllGather", *each) for each in moments]


def test_storages_are_counted_once_and_until_they_are_freed():
    x = meta(100)
    with peak_memory() as memory:
        y = x + 1
        assert memory.now == memory.peak == 800  # x counts from its first use
        view = y.view(10, 10)[2:]
        assert memory.now == 800
        del y
        assert memory.now == 800  # the view still needs it
        del view
        assert memory.now == 400
        z = x * 2
        assert memory.peak == 800
    del z
    assert memory.peak == 800


def test_steps_of_a_gather():
    mesh = AbstractMesh({"X": 4})
    W, In = meta(8, 16), meta(2, 32)
    with peak_memory() as memory:
        whole = all_gather("W[D_X, F] -> W[D, F]", W, mesh)
        Tmp = einsum("In[B_X, D] * W[D, F] -> Tmp[B_X, F]", In, whole)
        del whole
        Tmp + 1
    (gather, after, _), (product, _, peak) = memory.steps
    assert (gather.op, product.op) == ("AllGather", "Einsum")
    assert after == 4 * (8 * 16 + 32 * 16)
    assert memory.peak == peak == after + 4 * (2 * 32 + 2 * 16)
    assert "AllGather_X" in memory.table()
