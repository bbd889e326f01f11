"""The checked mode: ranks that are about to make different calls raise, all of them, and are told who calls what; who
does not come to a call is named, with where he waits or that he has ended.

Above the collectives, arguments that differ between ranks would give wrong numbers without a message that shows it: so
such a call is an error on every rank, too, which names ranks and argument before anything is sent. Of those that
tests/misuse draws each twist is tried; the others are a table."""

import os
import re
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from machine import on_ranks
from misuse.ranks import Case, finding, page_of, tell
from misuse.rooms import ON_RANKS
from misuse.steps import CHANGED
from torch.utils.flop_counter import FlopCounterMode

from scaling import collectives as c
from scaling import tree
from scaling.collectives.checked import alike
from scaling.configs import Config
from scaling.mesh import Mesh, page
from scaling.mesh.meeting import MeetingByMessages, meeting
from scaling.mesh.page import LENGTH, PLACES
from scaling.models import transformer as model
from scaling.schedules import gpipe, one_f_one_b
from scaling.spec import ShardingError, parse
from scaling.strategies import pipeline, transformer
from scaling.strategies.expert import moe

TWO, FOUR = on_ranks({"X": 2}), on_ranks({"X": 2, "Y": 2})
GATHER, SCATTER, SUM = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]", "A[I] {U_X} -> "


def gather(mesh, shape=(4, 2), dtype=torch.float32, line=GATHER):
    c.all_gather(line, torch.zeros(shape, dtype=dtype), mesh)


def total(mesh, axes="X", name="A"):
    return c.all_reduce(f"{name}[] {{U_{axes}}} -> {name}[]", torch.ones(()), mesh).item()


def said(line, shape="(4, 2)", dtype="float32"):
    return re.escape(f"{line} of {shape} {dtype}") + "\n"


def gathered(words, **options):
    return lambda mesh: gather(mesh, **options), words


def permuted(pairs):
    call = f"CollectivePermute A[I_X, J] -> A[I_X, J] by {tuple(pairs)}"
    return lambda mesh: c.ppermute("A[I_X, J]", torch.zeros(4, 2), mesh, "X", pairs), said(call)


def reduced(call, after, words, requires_grad=False, **options):
    """A call by some way to put parts together, or from some root."""
    kind, x = call.__name__.title().replace("_", ""), torch.ones(4, requires_grad=requires_grad)
    return lambda mesh: call(SUM + after, x, mesh, **options), said(f"{kind} {SUM}{after}{words}", "(4,)")


def in_some_way(way, words=""):
    """One line on shards of one shape, differentiated or observed."""
    call = lambda mesh: way(lambda x: c.all_gather(GATHER, x, mesh), torch.zeros(2, 2))  # noqa: E731
    return call, said(f"AllGather {GATHER}", "(2, 2)", f"float32{words}")


def counted(f, x):
    with FlopCounterMode(display=False):
        return f(x)


def with_grad(f, x):
    return f(x.requires_grad_())


def backward(mesh, uses_first):
    """A rank that does not use what it gathered first runs one collective of the backward less."""
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = c.all_gather("A[I_X] -> A[I]", a, mesh), c.all_gather("B[J_X] -> B[J]", b, mesh)
    torch.autograd.grad(second.sum() + (first.sum() if uses_first else 0), (a, b), allow_unused=True)
    total(mesh, name="N")


USUAL = gathered(said(f"AllGather {GATHER}"))
# what rank 0 does and all are told that it said, and rank 1
DIFFER = {
    "op": (USUAL, (lambda mesh: c.reduce_scatter(SCATTER, torch.zeros(4, 2), mesh), said(f"ReduceScatter {SCATTER}"))),
    "type": (USUAL, gathered(said("AllGather B[I_X, J] -> B[I, J]"), line="B[I_X, J] -> B[I, J]")),
    "shape": (USUAL, gathered(said(f"AllGather {GATHER}", "(4, 3)"), shape=(4, 3))),
    "dtype": (USUAL, gathered(said(f"AllGather {GATHER}", dtype="float64"), dtype=torch.float64)),
    "pairs": (permuted([(0, 1)]), permuted([(1, 1)])),
    "root": [reduced(c.broadcast, "A[I]", f" with root {root}", root=root) for root in (0, 1)],
    "max and min": [reduced(c.reduce, "A[I] {U_X}", f" with root 0 by {op}", op=op) for op in ("max", "min")],
    "sum and min": [reduced(c.reduce_scatter, "A[I_X]", "", op="sum"),
                    reduced(c.reduce_scatter, "A[I_X]", " by min", op="min")],
    "a gradient's": [reduced(c.all_reduce, "A[I]", "", requires_grad=True),
                     reduced(c.all_reduce, "A[I]", " by mean", requires_grad=True, op="mean")],
    "requires_grad": (in_some_way(lambda f, x: f(x)), in_some_way(with_grad, ", differentiated")),
    "no_grad": (in_some_way(with_grad, ", differentiated"), in_some_way(torch.no_grad()(with_grad))),
    "a mode": (in_some_way(counted, ", under FlopCounterMode"), in_some_way(lambda f, x: f(x))),
    "torch.func": (in_some_way(lambda f, x: f(x)), in_some_way(torch.func.vjp, ", differentiated")),
    "a backward": (
        (partial(backward, uses_first=True), said("ReduceScatter dA[I] {U_X} -> dA[I_X]", "(4,)")),
        (partial(backward, uses_first=False), said("AllReduce N[] {U_X} -> N[]", "()")),
    ),
}  # fmt: skip


def refused(call, mesh) -> str:
    """The error of a call that is none of a kind; the group can still be used."""
    with pytest.raises(ShardingError) as error:
        call(mesh)
    assert c.all_gather("A[I_X] -> A[I]", torch.tensor([mesh.coord["X"]]), mesh).tolist() == [0, 1]
    return str(error.value)


def are_told(message, words) -> None:
    """Of each rank's call, and the rule."""
    assert "the ranks along X do not make the same call" in message
    assert "rule: all ranks of a group run the same lines in the same order" in message
    for rank, each in enumerate(words):
        assert re.search(f"\n  rank {rank}: {each}", message), message


@TWO
@pytest.mark.parametrize("what", DIFFER)
def test_a_disagreement_is_an_error_on_every_rank_that_names_ranks_and_lines(mesh, what):
    are_told(refused(DIFFER[what][mesh.rank][0], mesh), [words for _, words in DIFFER[what]])


@FOUR
def test_ranks_of_a_group_are_named_by_their_places_in_the_run_those_that_agree_together(mesh):
    axes = "YX" if mesh.rank == 2 else "XY"
    everyone = refused(lambda mesh: c.all_gather(f"A[I_{axes}] -> A[I]", torch.zeros(3), mesh), mesh)
    along_x = refused(lambda mesh: gather(mesh, (4, mesh.coord["X"])), mesh)
    assert "the ranks along X, Y" in everyone or "the ranks along Y, X" in everyone
    assert "\n  ranks [0, 1, 3]: AllGather A[I_XY] -> A[I] of (3,) float32\n" in everyone
    assert "\n  rank 2: AllGather A[I_YX] -> A[I] of (3,) float32\n" in everyone
    for x in (0, 1):
        assert f"\n  rank {2 * x + mesh.rank % 2}: AllGather {GATHER} of (4, {x}) float32\n" in along_x


@TWO
def test_meetings_are_counted_on_past_what_two_bytes_hold(mesh):
    held = meeting(mesh.group(("X",)).pg)
    held.number = (held.number | 0xFFFF) - 4  # the same on all ranks: their calls were
    assert [total(mesh) for _ in range(12)] == [2.0] * 12
    with pytest.raises(ShardingError):
        gather(mesh, shape=(4 + mesh.rank, 2))


@TWO
def test_calls_that_differ_only_after_many_letters(mesh):
    line = f"A{'a' * LENGTH}{'bc'[mesh.rank]}[I_X, J] -> A[I, J]"
    assert "make the same call\n  ranks [0, 1]: AllGather Aaa" in refused(partial(gather, line=line), mesh)


@TWO
def test_nothing_is_compared_where_nothing_is_sent(mesh):
    """By a slice that one rank makes, nor where a device is alone along an axis: its mask is no other's."""
    if mesh.rank == 1:
        c.shard("A[I] -> A[I_X]", torch.zeros(4), mesh)
    gather(mesh)
    other = Mesh({"X": 1, "Y": 2}, checked=True, timeout=60)
    assert c.masked("x[B] {U_X}", torch.ones(2), torch.ones(2) > 0, other).tolist() == [1.0, 1.0]


@TWO
def test_who_has_waited_long_does_not_wait_any_more(mesh):
    for late in range(2):
        time.sleep(0.4 if mesh.rank == late else 0)  # the other one looks who waits for whom
        for _ in range(PLACES + 1):  # until the places of that meeting are another's
            gather(mesh, (1 + late, 1))


@TWO
def test_ranks_that_share_no_memory_compare_by_messages(mesh):
    """As between machines."""
    kept, page._map = page._map, lambda *_: None
    try:
        apart = Mesh(mesh.sizes, checked=True, timeout=60)
    finally:
        page._map = kept
    assert isinstance(meeting(apart.group(("X",)).pg), MeetingByMessages)
    for what in ("op", "pairs", "a mode"):
        test_a_disagreement_is_an_error_on_every_rank_that_names_ranks_and_lines(apart, what)


# Who does not come


def called_in_vain(call, error, mesh) -> str:
    with pytest.raises(error) as told:
        call(mesh)
    return str(told.value)


@FOUR
def test_ranks_that_wait_for_each_other_in_different_groups_are_told_so(mesh):
    """In a circle: 0 waits along Y for 1, 1 along X for 3, 3 along Y for 2, 2 for 0."""
    axis = "Y" if mesh.coord["X"] == mesh.coord["Y"] else "X"
    message = called_in_vain(partial(total, axes=axis), ShardingError, mesh)
    assert "the ranks wait for each other, each in another call\n" in message
    for rank, axis, other in [(0, "Y", 1), (1, "X", 3), (2, "X", 0), (3, "Y", 2)]:
        call = f"AllReduce A[] {{U_{axis}}} -> A[] of () float32"
        assert f"\n  rank {rank}: {call}, waits for rank {other}\n" in message
    assert total(mesh, "XY") == 4


@TWO
def test_a_late_rank_is_named(mesh):
    hasty = Mesh(mesh.sizes, checked=True, timeout=0.5)
    if mesh.rank == 0:
        message = called_in_vain(gather, TimeoutError, hasty)
        assert "Timed out: not all ranks have come within 0.5 s\n" in message
        assert f"\n  rank 0: AllGather {GATHER} of (4, 2) float32, waits for rank 1\n" in message
        assert "\n  rank 1: has not come, and waits in no other call on this mesh\n" in message
    total(mesh)
    gather(hasty)  # the meeting that was not held is the next one


@TWO
def test_a_rank_that_has_ended_is_named(mesh):
    """As under torchrun, where nobody else watches for ranks that end well but early."""
    fresh = Mesh(mesh.sizes, checked=True, timeout=60)
    if mesh.rank == 1:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        meeting(fresh.group(("X",)).pg).page.set_pid(child)
    else:
        message = called_in_vain(gather, ShardingError, fresh)
        assert "a rank has ended\n  rank 0: AllGather " in message
        assert "\n  rank 1: has ended\n" in message
    total(mesh)


@FOUR
def test_a_rank_that_waits_in_another_call_is_named_with_it(mesh, tmp_path):
    hasty, told = Mesh(mesh.sizes, checked=True, timeout=0.5), tmp_path / "told"
    meeting(hasty.group(("Y",)).pg).timeout = 60.0
    if mesh.rank == 0:
        message = called_in_vain(total, TimeoutError, hasty)
        told.touch()
        assert "\n  rank 2: AllReduce B[] {U_Y} -> B[] of () float32, waits for rank 3\n" in message
    if mesh.rank in (2, 3):
        while mesh.rank == 3 and not told.exists():
            time.sleep(0.02)
        total(hasty, "Y", "B")
    total(mesh, "XY")


CONFIG = Config("small", L=1, D=4, F=4, N=2, K=2, H=2, V=8)
IDS = torch.zeros(2, 4, dtype=torch.int64)


def route(mesh, k=1):
    params = {"router": torch.ones(4, 2)} | {name: torch.ones(1, 4, 4) for name in ("W_in", "W_gate", "W_out")}
    moe(params, torch.ones(1, 2, 4), CONFIG.with_(E=2, k=k), mesh, "X")


def init(mesh, seed=0):
    tree.init({"w": tree.Normal(1.0)}, {"w": "w[I_X, J]"}, {"I": 4, "J": 3}, mesh, seed)


def evaluate(mesh, eps=1e-5):
    config = CONFIG.with_(eps=eps)
    transformer.loss(transformer.shard(model.init(config, 0), config, mesh), IDS, IDS, config, mesh)


def pipe(mesh, make=gpipe, layers=1):
    params = {"W_in": torch.ones(layers, 4, 6), "W_out": torch.ones(layers, 6, 4)}
    x = torch.ones(4, 4)
    pipeline.value_and_grad(params, x, x, mesh, make(2, 2), lambda Out, Target: Out.sum(), axis="X")


def move(mesh, rows=2):
    c.transfer("A[I_X] -> A[I]", torch.ones(rows), mesh, mesh)


# (the call, what rank 1 gives otherwise) -> what all are told of each of the two
ABOVE = {
    "experts": (route, {"k": 2}, "moe with config=Config.*{}", "V=8, E=2\\)", "k=2\\)"),
    "seed": (init, {"seed": 1}, "init with seed={},", "0", "1"),
    "eps": (evaluate, {"eps": 0.1}, "loss with config=Config.*{}", "V=8\\)", "eps=0.1\\)"),
    "schedule": (pipe, {"make": one_f_one_b}, "pipeline {},", "gpipe", "1f1b"),
    "layers": (pipe, {"layers": 2}, r"pipeline gpipe, .*W_in: float32\[{}, 4, 6\]", "1", "2"),
    "shards": (move, {"rows": 3}, r"transfer A\[I_X\] -> A\[I\] .* x=float32\[{}\]", "2", "3"),
}


@TWO
@pytest.mark.parametrize("what", ABOVE)
def test_arguments_that_differ_between_ranks(mesh, what):
    call, otherwise, words, *values = ABOVE[what]
    message = refused(partial(call, **(otherwise if mesh.rank else {})), mesh)
    are_told(message, [".*" + words.format(value) for value in values])


@TWO
def test_if_one_rank_acts_differently_all_raise_or_the_numbers_are_right(mesh, tmp_path):
    """Of the acts of tests/misuse with each twist of rank 1; of the configs that may be others, with one. Meshes are
    made in tests/mesh."""
    control, wrong = dist.new_group(backend="gloo"), []
    for name, act in ON_RANKS.items():
        left_out = {*CHANGED} - {"theta"} if name == "training" else {}
        twists = [] if act.messages or name == "mesh" else [twist for twist in act.twists if twist not in left_out]
        for number, twist in enumerate(twists):
            case, told = Case([(name, number)], odd=1, at=0, twist=twist), [None, None]
            with warnings.catch_warnings():  # of what is dropped
                warnings.simplefilter("ignore")
                mine = tell(mesh, case, tmp_path)
            dist.all_gather_object(told, mine, group=control)
            page_of(mesh).set_pid(os.getpid())
            dist.barrier(control)
            wrong += [f"{case}: {found}"] if (found := finding(case, told)) else []
    assert not wrong, "\n\n".join(wrong)


@TWO
def test_numbers_that_do_not_go_together_are_an_error_on_every_rank(mesh):
    """Of calls that are alike but for these."""
    line, sends, receives = "A[G_X, E, R, D] -> A[G, E_X, R, D]", [2, 2], [1, 2] if mesh.rank else [2, 2]
    told = refused(lambda mesh: c.ragged_all_to_all(line, torch.ones(4, 3), sends, receives, mesh), mesh)
    assert "the ranks send [[2, 2], [2, 2]], but expect [[2, 2], [1, 2]]" in told
    for mask, words in (
        (torch.ones(2, 3) > 0, "6 of 6 elements are held by several devices along X"),
        (torch.arange(6).view(2, 3) > 2, "3 of 6 elements are held"),
    ):
        told = refused(lambda mesh: c.masked("x[B, T, D] {U_X}", torch.ones(2, 3, 4), mask, mesh), mesh)  # noqa: B023
        assert words in told


@TWO
def test_how_arguments_are_compared(mesh):
    """Of a function nothing is compared, of a long argument its digest, of a config what is not its default."""
    given = {"state": {"w": (torch.ones(2, 3), parse("w[I_X, J]")), "n": (1, None)}, "config": CONFIG}
    alike(mesh, "a call", f=lambda: mesh.rank, long="a" * 200, **given)
    with pytest.raises(ShardingError, match=r"rank 0: a call with long='a+\.\.\. \(digest \w+\)\n  rank 1: "):
        alike(mesh, "a call", long=["a" * 200, "a" * 199 + "b"][mesh.rank])
    said = "state={n: [1, None], w: [float32[2, 3], w[I_X, J]]}, config=Config(name='small', L=1,"
    with pytest.raises(ShardingError, match=re.escape(said)):
        alike(mesh, "a call", **given, f=1 if mesh.rank else print)
