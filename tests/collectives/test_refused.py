"""What the typed calls refuse, before anything is sent or written, with the rule and the fix. And whether arrays lie in
each other's memory, and whether elements of one share theirs: against the places of all elements."""
# ruff: noqa: F401 - calls in tables name what is imported

import random
import re
from collections import Counter

import pytest
import torch
from array_types import meta
from refused import evaluated, refused
from torch import ones

from scaling import collectives as c
from scaling.algebra import matmul
from scaling.collectives import rings
from scaling.collectives.operands import overlap, overlaps_itself
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

ONE, ABSTRACT = Mesh({"X": 1, "Y": 1}), AbstractMesh({"X": 2})
GATHER, SCATTER, PRODUCT = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]", "A[I, J] * B[J, K] -> C[I, K]"
SUM, TRANSFER, RAGGED = "A[I] {U_X} -> A[I]", "A[I_X] -> A[I]", "Row[G_X, E, R, D] -> Row[G, E_X, R, D]"
X, MASK = torch.arange(24.0).view(2, 3, 4), torch.tensor([[True, False, True], [False, True, False]])
ROWS, MASKED = torch.arange(20.0).view(5, 4), "x[B, T, D] {U_Y}"


def product(a, b, line=PRODUCT, **options):
    return c.einsum(line, a, b, **options)


def donated(x):
    return c.all_reduce("A[I, J] {U_X} -> A[I, J]", x, ONE, donate=True)


test_operands = refused(
    evaluated(
        """
call                                                       words of its error
c.all_gather('A[2, I_X] -> A[2, I]', ones(3, 1), ONE)      dim 2 of this shard
c.all_gather('A[8_X] -> A[8]', meta(8), ABSTRACT)          dim 8 of this shard has size 8, not 4
c.ppermute('A[2, I]', ones(3, 1), ONE, 'X', [])            has size 3, not 2
c.ppermute('A[I_Q] -> A[I]', ones(3), ONE, 'X', [])        unknown mesh axis Q
c.send('A[I_Z]', meta(4), ABSTRACT, 'X', 1)                unknown mesh axis Z
c.shard('A[3_X]', meta(3), ABSTRACT)                       which does not divide into 2 blocks over X
c.shard('A[I, J]', X, ONE)                                 its type has 2 dims
c.all_gather(GATHER, meta(2, 2), ONE)                      the operand is on meta
c.all_reduce(SUM, ones(2).numpy(), ONE)                    numpy.ndarray
c.all_gather(GATHER, ones(2, 2).to_sparse(), ONE)          fix: give it as .to_dense()
c.send('A[I]', ones(2, requires_grad=True), Mesh({'X': 1}), 'X', 1)
    not differentiable, since its transpose lies on another rank
c.reshard('A[I] -> A[I_X]', meta(3, 4), ABSTRACT)          its type has 1 dims
c.reshard('A[I] * B[I] -> A[I]', meta(3, 4), ABSTRACT)     has one operand
c.run(matmul('A[I, J]', 'B[J, K]'), meta(3, 4), ABSTRACT)  1 shards for 2 operands
c.reshard('A[I, J] -> A[I_X, J]', meta(3, 4), ABSTRACT)    does not divide
""",
        globals(),
    )
)

test_products = refused(
    evaluated(
        """
call                                                             words of its error
product(ones(3, 1), ones(1, 1), 'A[2, J] * B[J, K] -> C[2, K]')  dim 2 says its own size
product(ones(2, 2), meta(2, 2))                meta device
product(ones(2, 2).numpy(), ones(2, 2))        torch.as_tensor
product(None, None)                            do not have the dims of their types
product(ones(2, 2), ones(3, 2), defer=True)    they differ in the size of dim J
product(ones(2, 2), ones(2, 2).double())
    the operands, torch.float32 on cpu and torch.float64 on cpu, have one dtype
product(ones(2, 2).bool(), ones(2, 2).bool())  of torch.bool it has none
product(ones(2, 2).to(torch.float8_e4m3fn), None, 'A[I, J] -> C[I]')
    an operand is torch.float8_e4m3fn, without its scales
product(ones(2, 2), ones(2, 2), add=True)      fix: give out=
product(ones(2, 2, requires_grad=True), ones(2, 2), out=ones(2, 2))  fix: leave out= away
# of which torch gets the sum over a batch wrong
product(ones(2, 5), ones(5, 2).to_sparse(), 'A[L, J] * B[J, K] -> C[J, K, L]')  fix: give them as .to_dense()
product(ones(3, 3), ones(3, 3), 'A[I, J_X] * B[J, K] -> C[I, K]')  case 2
product(ones(3, 3), ones(3, 3), 'A[I, J_X] * B[J_X, K] -> C[I, K]', defer=True)  case 3
""",
        globals(),
    )
)

test_reductions = refused(
    evaluated(
        """
call                                                     words of its error
c.all_reduce(SUM, meta(4), ABSTRACT, op='avg')           one of sum, mean, max, min
c.all_reduce(SUM, meta(4, dtype=torch.int32), ABSTRACT, op='mean')  a mean has fractions
c.all_reduce(SUM, ones(4, dtype=torch.complex64), ONE, op='max')  the max of torch.complex64
c.all_reduce(SUM, meta(4, dtype=torch.int16), ABSTRACT)  the sum of torch.int16
c.broadcast(SUM, ones(4).to(torch.float8_e4m3fn), ONE)   fix: convert it
donated(X[0, :1, :3].expand(2, 3))                       the donated operand has shape (2, 3) and strides (0, 1)
donated(torch.complex(X[0], X[0]).conj())                the donated operand is a view that conjugates or negates
donated(torch.complex(X[0], X[0]).conj().imag)           give it as .resolve_conj().resolve_neg()
donated(ones(2, 3, requires_grad=True))                  the donated operand requires a gradient
""",
        globals(),
    )
)

test_masks = refused(
    evaluated(
        """
call                                                      words of its error
c.masked(MASKED, X, None, ONE)                            both are dense tensors
c.masked(MASKED, X.to_sparse(), MASK, ONE)                both are dense tensors
c.masked(MASKED, X, MASK[0], ONE)                         a mask is bool, and has the operand's first dims
c.masked(MASKED, X, MASK.to('meta'), ONE)                 the mask is torch.bool [2, 3] on meta
c.masked(MASKED, X, MASK.float(), ONE)                    the mask is torch.float32
c.masked(MASKED, X, MASK[:1], ONE)                        the mask is torch.bool [1, 3]
c.masked('m[B, T] {U_Y}', MASK, MASK, ONE)                partial sums are of numbers
c.masked('x[9, T, D] {U_Y}', X, MASK, ONE)                says those that are numbers
c.masked('x[B, T, D]', X, MASK, ONE)                      a mask makes partial sums
c.masked('x[B, T, D] -> x[B, T, D] {U_X}', X, MASK, ONE)  a mask makes partial sums
c.masked('x[B, T, D] {U_Z}', X, MASK, ONE)                unknown mesh axis Z
""",
        globals(),
    )
)

test_moved_rows = refused(
    evaluated(
        """
call                                                     words of its error
# it keeps other rows
c.ragged_all_to_all(RAGGED, ROWS, (5,), (3,), ONE)       5 rows cannot be sent as (5,) and received as (3,)
c.ragged_all_to_all(RAGGED, ROWS, (5,), (-5,), ONE)      5 rows cannot be sent as (5,) and received as (-5,)
c.ragged_all_to_all(RAGGED, meta(4, 3), (4,), (2, 2), ABSTRACT)  4 rows cannot be sent as (4,) and received
c.ragged_all_to_all(RAGGED, meta(4, 3), (2, 1), (2, 2), ABSTRACT)  4 rows cannot be sent as (2, 1) and received
c.ragged_all_to_all(RAGGED, ROWS, [5.0], [5], ONE)       sends = [5.0]: must be whole numbers
c.ragged_all_to_all(RAGGED, ROWS, None, None, ONE)       sends = None: must be whole numbers
c.ragged_all_to_all(RAGGED, ROWS[:, 0], [5], [5], ONE)   dims up to R are one
c.ragged_all_to_all(RAGGED.replace('E_X', 'E'), meta(4, 3), (2, 2), (2, 2), ABSTRACT)  rule: AllToAll takes
c.ragged_all_to_all(RAGGED.replace('X', 'Z'), meta(4, 3), (2, 2), (2, 2), ABSTRACT)  unknown mesh axis Z
c.transfer('A[I_X] {U_Y} -> A[I_X]', X[0, 0], ONE, ONE)  partial sums stay on their mesh
c.transfer('A[I_X] -> A[J_X]', X[0, 0], ONE, ONE)        of the same dims in the same order
c.transfer('A[I_Z] -> A[I_X]', X[0, 0], ONE, ONE)        unknown mesh axis Z
c.transfer('A[I_X] -> A[I_Z]', X[0, 0], ONE, ONE)        unknown mesh axis Z
c.transfer(TRANSFER, X[0, 0], ONE, ONE, into=(-1,))      into has a size of at least 0
c.transfer(TRANSFER, X[0, 0], ONE, ONE, into=6)          into has a size of at least 0
c.transfer(TRANSFER, X[0, 0], ONE, ONE, into=(3, 2))     into has a size of at least 0
c.transfer(TRANSFER, X[0, 0], ONE, ONE, below=(2.5,))    below has a size of at least 0
c.ppermute('A[I_X]', X[0, 0], ONE, 'X', [(0.9, 0)])      a permutation is pairs of whole numbers
c.ppermute('A[I_X]', X[0, 0], ONE, 'X', [(0,)])          a permutation is pairs of whole numbers
c.ppermute('A[I_X]', X[0, 0], ONE, 'X', 3)               a permutation is pairs of whole numbers
""",
        globals(),
    )
)

test_rings = refused(
    evaluated(
        """
call                                              words of its error
rings.all_gather(meta(4), ABSTRACT, 'X', ways=3)  ways must be 1 or 2
rings.reduce_scatter(meta(5), ABSTRACT, 'X')      does not divide into 2
rings.all_to_all(meta(3, 2), ABSTRACT, 'X')       a chunk for each device
""",
        globals(),
    )
)

NOT_BY_NAME = "c.ppermute('A[I]', ROWS[0], ONE, 'X', [], True)", "c.send('A[I]', ROWS[0], ONE, 'X', 1, True)"
test_options_are_given_by_name = refused(  # those of others: test_drawn.py
    evaluated(dict.fromkeys(NOT_BY_NAME, ""), globals()),
    TypeError,
    "positional",
)


MISFITS = {  # words of the error: the buffer within a stack [3, 4, 4]; the result is [4, 4]
    "the result has shape (4, 4), out (3, 4)": lambda g: g[1, :3],
    "the result is torch.float32 on cpu, out torch.float64 on cpu": lambda g: g[1].double(),
    "elements share their memory": lambda g: g[1, :1].expand(4, 4),
    "conjugates or negates": lambda g: torch.zeros(4, 4, dtype=torch.complex64).conj().imag,
    "out torch.float32 on meta": lambda g: g[1].to("meta"),
    "out is a ndarray": lambda g: g[1].numpy(),
    "out requires a gradient": lambda g: g[1].clone().requires_grad_() * 1,
}


@pytest.mark.parametrize("words", MISFITS)
def test_a_buffer_that_does_not_fit_is_refused_and_nothing_is_written(words):
    stack = torch.arange(48.0).view(3, 4, 4)
    for write in (
        lambda out: c.all_gather("A[I, J_X] -> A[I, J]", ones(4, 4), ONE, out=out, async_op=True).wait(),
        lambda out: c.reduce_scatter(SCATTER, ones(4, 4), ONE, out=out),
        lambda out: c.einsum(PRODUCT, ones(4, 8), ones(8, 4), out=out),
    ):
        g = stack.clone()
        with pytest.raises(ShardingError, match=re.escape(words)) as error:
            write(MISFITS[words](g))
        assert "\n  rule: " in str(error.value)
        assert torch.equal(g, stack)


def test_a_buffer_that_shares_memory_with_an_operand_is_refused():
    x = torch.arange(64.0).view(8, 8)
    kept = x.clone()
    for call in (
        lambda: c.all_gather(GATHER, x[1:5], ONE, out=x[:4]),  # a part of it
        lambda: c.reduce_scatter(SCATTER, x[:4], ONE, out=x[1:5]),
        lambda: product(x, x.clone(), out=x),
        lambda: product(x.clone(), x, out=x.t()),
        lambda: product(x, None, "A[I, J] -> C[J]", out=x[3]),
    ):
        with pytest.raises(ShardingError, match="out shares memory with an operand"):
            call()
        assert torch.equal(x, kept)


def view(dice: random.Random, x: torch.Tensor) -> torch.Tensor:
    """What slices, transposes and expands make of a tensor."""
    for _ in range(dice.randrange(5)):
        if not x.dim():
            break
        how, dim = dice.choice(["part", "step", "row", "turn", "expand"]), dice.randrange(x.dim())
        start = dice.randrange(x.shape[dim] + 1)
        if how == "part":
            x = x.narrow(dim, start, dice.randrange(x.shape[dim] - start + 1))
        elif how == "step":
            x = x.movedim(dim, 0)[start :: dice.choice([2, 3])].movedim(0, dim)
        elif how == "row" and start < x.shape[dim]:
            x = x.select(dim, start)
        elif how == "turn":
            x = x.transpose(0, dim)
        elif how == "expand":
            x = x[None].expand(2, *x.shape) if x.dim() < 4 else x
    return x


def test_overlap_is_exact():
    x, places, found = torch.zeros(6, 6), torch.arange(36.0).view(6, 6), Counter()
    for seed in range(200):
        (a, of_a), (b, of_b) = ([view(random.Random(2 * seed + i), t) for t in (x, places)] for i in (0, 1))
        assert overlap(a, b) == overlap(b, a) == bool({*of_a.flatten().tolist()} & {*of_b.flatten().tolist()})
        assert overlaps_itself(a) == (of_a.unique().numel() < of_a.numel())
        found[overlap(a, b), overlaps_itself(a)] += 1
    assert min(found.values()) > 5, found
    assert len(found) == 4
    # of other memory or of none; of windows
    assert not any(overlap(a, b) for a, b in [(x, x.clone()), (x.to("meta"), x.to("meta"))])
    assert overlaps_itself(x.view(-1).unfold(0, 3, 2))
    assert overlaps_itself(x.view(-1).as_strided((2, 2), (1, 1)))
