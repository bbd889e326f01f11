"""Send and receive: what arrives is what the receiver expects, in every dtype and order; anything else is refused.
Arrays between meshes of some of the ranks: bitwise, and the bytes of the plan. The ring algorithms against the
collectives, and what their links carry against the book's counts."""

import itertools

import pytest
import torch
from machine import RankFailed, on_ranks
from problems import drawn
from refused import named

from scaling import collectives as c
from scaling.collectives import all_gather, plan_transfer, rings, shard, transfer
from scaling.collectives.messages import TAG, announcement, data_tag
from scaling.collectives.moves import TAG as EAGER
from scaling.collectives.transfer import TAG as TRANSFER
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError, parse
from scaling.trace import trace

A = torch.arange(6.0).view(2, 3)


def misfit(mesh):
    """As many bytes of another dtype, which are none of a buffer's until they are asked for."""
    if mesh.rank == 0:
        c.send("A[I, J]", A.int(), mesh, "X", 1)
    else:
        c.recv("A[I, J]", A, mesh, "X", 0, async_op=True).wait()


def test_an_unexpected_message_is_refused_by_the_receiver(ranks):
    with pytest.raises(RankFailed, match="rank 1 of") as error:
        ranks(misfit, {"X": 2})
    said = "rank 0 sends A[I, J] of (2, 3) int32\n  this rank expects A[I, J] of (2, 3) float32\n"
    assert said in str(error.value)
    assert "rule: what is received has the type, the shape and the dtype of what is sent" in str(error.value)


KINDS = named(
    """
type     array
A[I, J]  A
B[I]     torch.arange(5, dtype=torch.int16)
C[]      torch.tensor(2.0 + 3.0j)
D[I, J]  A.t()
E[I]     torch.zeros(0)
F[I]     torch.arange(4.0).to(torch.float8_e4m3fn)
G[I]     torch.complex(A[0], A[1]).conj()
H[I]     torch.complex(A[0], A[1]).conj().imag
J[I]     A.to(torch.bfloat16)[:, 1]
""",
    globals(),
)


@on_ranks({"X": 2})
def test_messages_of_every_kind_both_ways_at_once(mesh):
    """All are under way, and waited for in another order than they were sent."""
    other, messages, arriving, leaving = 1 - mesh.rank, list(KINDS.items()) * 2, [], []
    for line, x in messages:
        arriving.append(c.recv(line, torch.empty_like(x), mesh, "X", other, async_op=True))
    for line, x in messages:
        leaving.append(c.send(line, x, mesh, "X", other, async_op=True))
    for (line, x), pending in reversed(list(zip(messages, arriving, strict=True))):
        got = pending.wait()
        assert got.dtype == x.dtype, line
        assert torch.equal(got.cfloat(), x.cfloat()), line
    for (line, x), pending in zip(messages, leaving, strict=True):
        assert pending.wait() is x, line
    for sender in (0, 1):
        if mesh.rank == sender:
            assert c.send("A[I, J]", A + sender, mesh, "X", other) is not None
        else:
            assert torch.equal(c.recv("A[I, J]", torch.empty_like(A), mesh, "X", other), A + sender)


def test_announcements_differ_if_types_shapes_or_dtypes_do():
    said = [announcement(parse(line), x, "cpu") for line, x in KINDS.items()]
    said += [announcement(parse("A[I, J]"), x, "cpu") for x in (A.double(), A[:1], A.t())]
    assert len({bytes(note.tolist()) for note in said}) == len(said)
    assert len({EAGER, TAG, TRANSFER}) == 3
    tags = {data_tag(note) for note in said}
    assert len(tags) == len(said)
    assert all(TAG < tag < 1 << 31 for tag in tags)
    long = [announcement(parse(f"{'A' * 300}[{dim}]"), A[0], "cpu") for dim in "IJ"]
    assert not torch.equal(*long)


@on_ranks({"W": 8})
def test_every_pair_of_types_between_disjoint_ranks(mesh):
    """This rank gets its block, once, and what it sends and gets are the plan's bytes."""
    a, b = Mesh({"X": 2, "Y": 2}, ranks=range(4)), Mesh({"Y": 2, "X": 2}, ranks=[4, 5, 6, 7])
    types = "A[I, J, K]", "A[I_X, J_Y, K]", "A[I, J_YX, K]", "A[I_XY, J, K]", "A[I, J_X, K_Y]"
    whole = torch.arange(4 * 8 * 6).view(4, 8, 6)
    arrays = [whole.float(), whole.bfloat16(), whole, whole * 3 % 250 > 100, whole.short()]
    for (source, target), x in zip(itertools.permutations(types, 2), itertools.cycle(arrays)):
        mine = x[parse(source).slices(x.shape, a, a.coord)] if a.member else None
        line = f"{source} -> {target}"
        with trace() as log:
            got = transfer(line, mine, a, b)
        plan = plan_transfer(line, x.shape, a, b)
        sent = sum(m.numel for m in plan if m.source == mesh.rank) * x.element_size()
        assert torch.equal(got, x[parse(target).slices(x.shape, b, b.coord)]) if b.member else got is None, line
        moved = sum(m.numel for m in plan if mesh.rank in (m.source, m.target)) * x.element_size()
        assert (log.wire_bytes, [event.nbytes for event in log.events]) == (sent, [moved]), line
        assert sum(m.numel for m in plan if m.target == mesh.rank) == (got.numel() if b.member else 0), line


def test_replicas_share_the_sending():
    a, b = AbstractMesh({"X": 2, "Y": 2}), AbstractMesh({"Z": 4})
    sent = [0] * 4
    for message in plan_transfer("A[I_X, J] -> A[I_Z, J]", (8, 3), a, b):
        sent[message.source] += message.numel
    assert sent == [6] * 4


@on_ranks({"W": 4})
def test_meshes_of_some_ranks(mesh):
    """Collectives on them, of which one overlaps another; ranks outside pass None, or are refused."""
    for those in ([2, 0], [3, 4]):
        with pytest.raises(ShardingError, match="ascending"):
            Mesh({"X": 2}, ranks=those)
    a, b = Mesh({"X": 2}, ranks=[0, 2], checked=True), Mesh({"X": 3}, ranks=[1, 2, 3])
    x = torch.arange(6.0)
    mine = shard("A[I_X]", x, a) if a.member else None
    with pytest.raises(ShardingError, match="give their shard"):
        transfer("A[I_X] -> A[I_X]", None if a.member else x, a, b)
    if not a.member:
        with pytest.raises(ShardingError, match="not one of the mesh"):
            a.group(("X",))
    gathered = all_gather("A[I_X] -> A[I]", mine, a)
    there = transfer("A[I_X] -> A[I_X]", mine, a, b)
    rank = mesh.rank
    assert (a.member, a.ranks) == (rank in (0, 2), (0, 2))
    assert torch.equal(gathered, x) if a.member else gathered is None
    assert torch.equal(there, x[2 * rank - 2 : 2 * rank]) if rank else there is None


def test_on_one_device_into_another_shape():
    mesh, x = Mesh({"X": 1}), torch.arange(4)
    for given, wanted in (
        ({}, [0, 1, 2, 3]),
        ({"into": (6,), "below": (2,)}, [0, 1, 0, 0, 0, 0]),
        ({"below": (0,)}, [0] * 4),
    ):
        assert transfer("A[I_X] -> A[I]", x, mesh, Mesh({}), **given).tolist() == wanted


@pytest.mark.parametrize(("mesh", "axis"), [({"X": 2, "Y": 4}, "Y"), ({"X": 3}, "X")])
def test_rings_are_equal_to_the_collectives(mesh, axis):
    n = mesh.size((axis,))
    part, whole = drawn((3, 4), (n * 3, 4), seed=mesh.rank)
    chunks, V = whole.view(n, 3, 4), 8 * whole.numel()
    by_blocks = chunks.transpose(0, 1).contiguous()
    cases = [
        (rings.all_gather, part, c.all_gather(f"A[I_{axis}, J] -> A[I, J]", part, mesh)),
        (rings.reduce_scatter, whole, c.reduce_scatter(f"A[I, J] {{U_{axis}}} -> A[I_{axis}, J]", whole, mesh)),
        (rings.all_to_all, chunks, c.all_to_all(f"A[I_{axis}, J, K] -> A[I, J_{axis}, K]", by_blocks, mesh)),
    ]
    for ways, (ring, x, wanted) in itertools.product((1, 2), cases):
        log = rings.LinkBytes()
        torch.testing.assert_close(ring(x, mesh, axis, ways, log).flatten(), wanted.flatten(), rtol=0, atol=1e-12)
        hops = n - 1 if ways == 1 else n // 2
        if ring != rings.all_to_all:
            assert (log.busiest, log.hops, sum(log.bytes.values())) == (hops * V // n, hops, n * (n - 1) * V // n)


def counted(ways, n, items):
    """What links carry on an abstract ring, in bytes: AllGather and AllToAll of the same array of V bytes."""
    mesh, logs = AbstractMesh({"X": n}), (rings.LinkBytes(), rings.LinkBytes())
    rings.all_gather(torch.empty(n, items, device="meta"), mesh, "X", ways, logs[0])
    rings.all_to_all(torch.empty(n, items, device="meta"), mesh, "X", ways, logs[1])
    return logs[0].busiest, logs[1].busiest, 4 * n * n * items


def test_half_and_quarter():
    """Question 10: an AllToAll takes 1/2 of an AllGather one way round, 1/4 with both ways, for every even n."""
    for n in (2, 6, 16):
        gather, exchange, V = counted(1, n, 2)
        assert (gather, exchange * 2) == (V * (n - 1) // n, gather)
        gather, exchange, V = counted(2, n, 2)
        assert (gather, exchange * 4) == (V // 2, gather)
    gather, exchange, V = counted(2, 5, 2)  # an odd ring
    assert (gather, exchange) == (2 * V // 5, 3 * V // 25)
    assert counted(1, 1, 3)[:2] == counted(2, 1, 3)[:2] == (0, 0)
