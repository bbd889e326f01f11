"""Calls that all ranks have made before are begun before all have come: what that changes, and what it does not."""

import random
import time
import warnings

import pytest
import torch

from scaling import collectives as c
from scaling.collectives import wait
from scaling.mesh import Mesh
from scaling.mesh.meeting import meeting
from scaling.mesh.page import PLACES
from scaling.spec import ShardingError

GATHER, SCATTER, SUM = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]", "A[I] {U_X} -> A[I]"
WARM = 3  # steps after which all pairs of calls of a step are known


def gather(mesh, value: float, n: int = 2, **options):
    return c.all_gather(GATHER, torch.full((1, n), value), mesh, **options)


def begins(mesh):
    """Rank 1 comes a third of a second late to a step of three calls."""
    for step in range(WARM + 1):
        late = step == WARM
        wait(c.all_reduce("Done[] {U_X} -> Done[]", torch.ones(()), mesh))
        if late and mesh.rank == 1:
            time.sleep(0.3)
        began = time.monotonic()
        pending = [gather(mesh, mesh.rank + i, async_op=True) for i in (10.0, 20.0)]
        took = time.monotonic() - began
        found = [each.wait()[:, 0].tolist() for each in pending]
    return took, found


def test_a_rank_does_not_wait_for_others_before_it_needs_their_data(ranks):
    for took, found in ranks(begins, {"X": 2}):
        assert took < 0.2
        assert found == [[10.0, 11.0], [20.0, 21.0]]


def first_time(mesh):
    fresh = Mesh(mesh.sizes, checked=True)
    if mesh.rank == 1:
        time.sleep(0.2)
    began = time.monotonic()
    pending = gather(fresh, 1.0, async_op=True)
    took = time.monotonic() - began
    pending.wait()
    return took


def test_a_call_that_is_new_waits_for_all(ranks):
    assert ranks(first_time, {"X": 2})[0] > 0.1


OTHER_CALLS = {
    "shape": lambda mesh: gather(mesh, 1.0, 3),
    "op": lambda mesh: c.reduce_scatter(SCATTER, torch.ones(3, 2), mesh),
    "permutation": lambda mesh: c.ppermute("A[I_X]", torch.ones(2), mesh, "X", [(0, 1)]),
    "differentiated": lambda mesh: c.all_gather(GATHER, torch.ones(1, 2, requires_grad=True), mesh),
    "one that all have made": lambda mesh: c.all_reduce(SUM, torch.ones(5), mesh),
}


def step_of(mesh, i: float, other=None) -> list:
    """Four calls, begun before the first one is waited for; `other`: the second one."""
    pending = [gather(mesh, mesh.rank + i, async_op=True)]
    pending.append(other(mesh) if other else c.all_reduce(SUM, torch.full((4,), mesh.rank + i), mesh, async_op=True))
    pending.append(gather(mesh, mesh.rank + i + 1, async_op=True))
    pending.append(c.all_reduce(SUM, torch.full((5,), i), mesh, async_op=True))
    return pending


def differs_later(mesh, what):
    fresh = Mesh(mesh.sizes, checked=True)
    for i in range(WARM):
        for each in step_of(fresh, float(i)):
            wait(each)
    if mesh.rank == 2:
        time.sleep(0.1)  # the others have begun all four by then
    errors, pending = [], []
    try:
        pending = step_of(fresh, 100.0, OTHER_CALLS[what] if mesh.rank == 2 else None)
    except ShardingError as error:
        errors.append(str(error))
    for each in pending[1:]:
        with pytest.raises(ShardingError) as error:
            wait(each)
        errors.append(str(error.value))
    after = [wait(each).flatten().tolist() for each in step_of(fresh, 200.0)]
    return errors, after


@pytest.mark.parametrize("what", OTHER_CALLS)
def test_a_disagreement_in_what_was_begun_is_told_to_all_and_the_group_still_works(ranks, what):
    for rank, (errors, after) in enumerate(ranks(differs_later, {"X": 3}, what)):
        assert len(errors) == (1 if rank == 2 else 3)  # of all that were begun, nobody gets a result
        for error in errors:
            assert "the ranks along X do not make the same call\n" in error
            assert f"\n  ranks [0, 1]: AllReduce {SUM} of (4,) float32" in error
            assert "\n  rank 2: " in error
        sums = [603.0] * 4, [600.0] * 5
        assert after == [
            [200.0] * 2 + [201.0] * 2 + [202.0] * 2,
            sums[0],
            [201.0] * 2 + [202.0] * 2 + [203.0] * 2,
            sums[1],
        ]


def be_impatient(mesh, seconds: float) -> None:
    """Let ranks wait so long for each other; gloo, which would close the connections, waits longer."""
    meeting(mesh.group(("X",)).checked).timeout = seconds


def gives_up(mesh):
    """Rank 2 comes after the others' wait has timed out; it makes on zeros what they have begun. It comes later than
    the mesh's timeout, after which gloo would close the connections if it did not wait longer."""
    hasty, ready = Mesh(mesh.sizes, checked=True, timeout=1.0), Mesh(mesh.sizes)
    be_impatient(hasty, 60.0)
    for i in range(WARM):
        for each in step_of(hasty, float(i)):
            wait(each)
    be_impatient(hasty, 0.2)
    told = []
    if mesh.rank < 2:
        for each in step_of(hasty, 50.0):
            with pytest.raises((TimeoutError, ShardingError)) as error:
                wait(each)
            told.append(str(error.value))
    c.all_reduce(SUM, torch.ones(1), ready)
    be_impatient(hasty, 60.0)
    time.sleep(1.0)
    return told, [wait(each).flatten().tolist() for each in step_of(hasty, 200.0)][1]


def test_after_a_wait_has_timed_out_the_group_still_works(ranks):
    (first, after), *others = ranks(gives_up, {"X": 3})
    assert len(first) == 4
    assert "rank 2: has not come" in first[0]
    assert after == [603.0] * 4 == others[0][1] == others[1][1]


def across(mesh):
    """In every step X comes before Y; in the last one each rank waits for another, in a circle."""

    fresh = Mesh(mesh.sizes, checked=True)

    def step(axes):
        for axis in axes:
            c.all_reduce(f"A[] {{U_{axis}}} -> A[]", torch.ones(()), fresh)

    for _ in range(WARM):
        step("XY")
    message = ""
    try:
        step("XY" if mesh.coord["X"] == mesh.coord["Y"] else "YX")
    except ShardingError as error:
        message = str(error)
    return message


def test_ranks_that_wait_for_each_other_in_what_they_have_begun_are_told_so(ranks):
    assert all("the ranks wait for each other" in message for message in ranks(across, {"X": 2, "Y": 2}))


def elsewhere(mesh):
    """Rank 0 waits along Y for a rank that wants to tell it, along X, of another call."""
    fresh = Mesh(mesh.sizes, checked=True)
    for _ in range(WARM):
        pending = gather(fresh, 1.0, async_op=True)
        c.all_reduce("A[] {U_Y} -> A[]", torch.ones(()), fresh)
        pending.wait()
    message = ""
    try:
        pending = gather(fresh, 1.0, 2 + mesh.coord["X"], async_op=True)
        if mesh.rank != 1:
            c.all_reduce("A[] {U_Y} -> A[]", torch.ones(()), fresh)
        pending.wait()
    except ShardingError as error:
        message = str(error)
    return message


def test_a_rank_that_waits_along_one_axis_is_told_of_a_disagreement_along_another(ranks):
    assert "along X do not make the same call" in ranks(elsewhere, {"X": 2, "Y": 2})[0]


def many(mesh):
    pending = [gather(mesh, mesh.rank + float(i), async_op=True) for i in range(3 * PLACES)]
    return [each.wait()[:, 0].tolist() for each in reversed(pending)] == [
        [float(i), i + 1.0] for i in reversed(range(3 * PLACES))
    ]


def test_more_calls_under_way_than_there_are_places(ranks):
    assert all(ranks(many, {"X": 2}))


CALLS = (
    lambda mesh, x: c.all_gather("A[I_X] -> A[I]", x[:1], mesh, async_op=True),
    lambda mesh, x: c.all_reduce(SUM, x, mesh, async_op=True),
    lambda mesh, x: c.all_reduce("B[I] {U_X} -> B[I]", x[:3], mesh, async_op=True),
    lambda mesh, x: c.all_reduce("B[I] {U_X} -> B[I]", x[:2], mesh, op="max"),
)


def expected(call: int, size: int, value: float) -> torch.Tensor:
    each = torch.arange(size) + value
    if call == 0:
        return each
    return each.max().expand(2) if call == 3 else each.sum().expand(6 if call == 1 else 3)


def at_random(mesh, seed, rounds):
    """Steps of known calls, in some of which a rank leaves one out, makes another, or ends early: whatever is returned
    is right, and after each round all go on."""
    hasty, ready, said, wrong, told = Mesh(mesh.sizes, checked=True), Mesh(mesh.sizes), 0, [], 0
    be_impatient(hasty, 0.2)
    dice = random.Random(seed)
    steps = [[dice.randrange(4) for _ in range(dice.randint(2, 5))] for _ in range(3)]
    for round in range(rounds):
        step, odd, fault = (
            list(dice.choice(steps)),
            dice.randrange(mesh.size()),
            dice.choice(["none", "out", "other", "end"]),
        )
        at, depth = dice.randrange(len(step)), dice.randint(1, 4)
        if mesh.rank == odd and fault != "none":
            step = {"out": step[:at] + step[at + 1 :], "other": [*step[:at], (step[at] + 1) % 4, *step[at + 1 :]],
                    "end": step[:at]}[fault]  # fmt: skip
        under_way = []
        try:
            for i, call in enumerate(step):
                value = float(1000 * round + 10 * i)
                under_way.append((call, value, CALLS[call](hasty, torch.full((6,), mesh.rank + value))))
                while len(under_way) > depth or (i == len(step) - 1 and under_way):
                    call_, value_, pending = under_way.pop(0)
                    result = wait(pending)
                    said += 1
                    if not torch.equal(result, expected(call_, mesh.size(), value_)):
                        wrong.append((round, fault, odd, mesh.rank, call_, value_, result.tolist()))
        except (ShardingError, TimeoutError):
            told += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is dropped without wait(): nobody waits after an error
            under_way.clear()
            pending = None
        c.all_reduce(SUM, torch.ones(1), ready)
    return said, told, wrong


@pytest.mark.parametrize("seed", range(2))
def test_whatever_ranks_do_what_is_returned_is_right(ranks, seed):
    for said, told, wrong in ranks(at_random, {"X": 3}, seed, 10):
        assert not wrong
        assert said > 5
        assert told > 2


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 110))
def test_the_same_for_long(ranks, seed):
    for _, _, wrong in ranks(at_random, {"X": 2 + seed % 3}, seed, 60):
        assert not wrong
