"""Send and receive: what arrives is what the receiver expects, in every dtype and order; anything else is refused."""

import pytest
import torch
from machine import RankFailed

from scaling import collectives as c
from scaling.collectives.messages import TAG, announcement, data_tag
from scaling.collectives.moves import TAG as EAGER
from scaling.collectives.transfer import TAG as TRANSFER
from scaling.spec import ShardingError, parse

A = torch.arange(6.0).view(2, 3)
MISFITS = {
    "fewer rows": (("A[I, J]", A[:1]), ("A[I, J]", A), "rank 0 sends A[I, J] of (1, 3) float32\n"),
    "another order": (
        ("A[I, J]", A.t()),
        ("A[I, J]", A),
        "of (3, 2) float32\n  this rank expects A[I, J] of (2, 3) float32",
    ),
    "float64": (("A[I, J]", A.double()), ("A[I, J]", A), "sends A[I, J] of (2, 3) float64\n"),
    "as many bytes": (("A[I, J]", A.int()), ("A[I, J]", A), "sends A[I, J] of (2, 3) int32\n"),
    "another array": (("B[I, J]", A), ("A[I, J]", A), "sends B[I, J] of (2, 3) float32\n"),
}


def misfit(mesh, name, async_op):
    (line, x), (expected, like), _ = MISFITS[name]
    if mesh.rank == 0:
        c.send(line, x, mesh, "X", 1)
    else:
        c.wait(c.recv(expected, like, mesh, "X", 0, async_op=async_op))


@pytest.mark.parametrize("name", MISFITS)
def test_what_is_not_expected_is_refused_by_the_receiver(ranks, name):
    with pytest.raises(RankFailed) as error:
        ranks(misfit, {"X": 2}, name, name == "float64")
    assert "rank 1 of" in str(error.value)
    assert MISFITS[name][2] in str(error.value)
    assert "rule: what is received has the type, the shape and the dtype of what is sent" in str(error.value)


KINDS = {
    "A[I, J]": A,
    "B[I]": torch.arange(5, dtype=torch.int16),
    "C[]": torch.tensor(2.0 + 3.0j),
    "D[I, J]": A.t(),
    "E[I]": torch.zeros(0),
    "F[I]": torch.arange(4.0).to(torch.float8_e4m3fn),
    "G[I]": torch.complex(A[0], A[1]).conj(),
    "H[I]": torch.complex(A[0], A[1]).conj().imag,
    "J[I]": A.to(torch.bfloat16)[:, 1],
    "K[I]": A.to(torch.int64)[0],
    "M[I]": A.double()[0],
}


def both_ways(mesh):
    """Messages of every kind to and from, all under way at once, waited for in another order than they were sent."""
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
    with pytest.raises(ShardingError, match="not differentiable"):
        c.send("A[I]", torch.ones(2, requires_grad=True), mesh, "X", other)


def test_messages_of_every_kind_both_ways_at_once(ranks):
    ranks(both_ways, {"X": 2})


def test_an_announcement_tells_all_that_matters_apart():
    said = [announcement(parse(line), x, "cpu") for line, x in KINDS.items()]
    said += [announcement(parse("A[I, J]"), x, "cpu") for x in (A.double(), A[:1], A.t())]
    assert len({bytes(note.tolist()) for note in said}) == len(said)
    assert len({EAGER, TAG, TRANSFER}) == 3
    tags = {data_tag(note) for note in said}
    assert len(tags) == len(said)
    assert all(TAG < tag < 1 << 31 for tag in tags)
    long = [announcement(parse(f"{'A' * 300}[{dim}]"), A[0], "cpu") for dim in "IJ"]
    assert not torch.equal(*long)
