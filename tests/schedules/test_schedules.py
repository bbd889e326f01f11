"""Schedules as data, simulated: closed forms met exactly, deadlocks and wrong programs found."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import evaluated, named, refused

from scaling import schedules
from scaling.schedules import SCHEDULES, Backward, BackwardInput, Forward, ReduceGrads, make, split_backward
from scaling.schedules import closed_forms as bubbles
from scaling.schedules.schedule import COMPUTE, SENDS, parts
from scaling.schedules.simulator import Deadlock, Times, simulate

ISSUE = [(name, p, m) for name in SCHEDULES for p in (2, 3, 4) for m in (1, 4, 6, 8)]
UNDEFINED = [case for case in ISSUE if case[0] == "interleaved" and case[2] % case[1]]
UNDEFINED += [case for case in ISSUE if case[0] == "dualpipev" and case[2] < 2 * case[1]]
CASES = [(*case, None) for case in ISSUE if case not in UNDEFINED] + [("interleaved", 4, 8, 3)]
EVEN, ANY = [Times(), Times(3, 3, 2)], [Times(5, 4, 3), Times(2, 7, 1)]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_closed_forms_are_met_exactly(name, stages, microbatches, chunks):
    schedule = make(name, stages, microbatches, chunks)
    for times in EVEN + ANY * (name in ("naive", "gpipe", "1f1b", "zb-h1")):
        timeline = simulate(schedule, times)
        args = name, stages, microbatches, schedule.chunks, times
        idle, work = bubbles.bubble_time(*args), times.forward + times.backward_input + times.backward_weight
        assert (timeline.idle(stages - 1), timeline.makespan) == (idle, idle + microbatches * work)
        assert timeline.live == bubbles.live_activations(*args[:4])
        assert timeline.bubble == bubbles.bubble(*args)


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 16), st.integers(1, 3))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_every_microbatch_passes_every_stage_once(name, stages, microbatches, chunks):
    try:
        schedule = make(name, stages, microbatches, chunks)
    except ValueError:
        return
    simulate(schedule)  # checks that each instruction finds what it needs, and nothing is made twice
    assert len(schedule) == stages
    computed = [part for p in schedule for s in p if isinstance(s, COMPUTE) for part in parts(s)]
    done = Counter((type(part), part.stage, part.microbatch) for part in computed)
    for stage in range(stages * schedule.chunks):
        assert sum(isinstance(s, ReduceGrads) and s.stage == stage for p in schedule for s in p) == 1
        for m in range(microbatches):
            assert done[Forward, stage, m] == 1
            assert done[Backward, stage, m] + done[BackwardInput, stage, m] == 1
            assert done[BackwardInput, stage, m] == done[schedules.BackwardWeight, stage, m]
    for rank, program in enumerate(schedule):
        assert not any(isinstance(s, (*SENDS, schedules.RecvActivation)) and s.peer == rank for s in program)
        assert not any(isinstance(s, ReduceGrads) and isinstance(then, SENDS) for s, then in pairwise(program))
        both = [step for step in program if isinstance(step, schedules.ForwardBackward)]
        assert all(step.forward.stage != step.backward.stage for step in both)


def test_one_chunk_and_hops_by_hand():
    assert make("interleaved", 4, 8, 1).programs == make("1f1b", 4, 8).programs
    idle = simulate(make("dualpipev", 4, 16)).idle(3)
    assert idle == bubbles.bubble_time("dualpipev", 4, 16, 2) == 3
    slow = simulate(make("gpipe", 4, 8), Times(hop=1))  # hops delay, but do not change the order
    assert slow.makespan == simulate(make("gpipe", 4, 8)).makespan + 2 * 3  # three hops forward, three back


def test_layers_in_the_order_of_their_stages():
    orders = {("1f1b", 4): [0, 1, 2, 3], ("interleaved", 8): [0, 1, 4, 5, 2, 3, 6, 7], ("dualpipev", 4): [0, 3, 1, 2]}
    for (name, layers), order in orders.items():
        assert make(name, 2, 4).layer_order(layers) == order


@pytest.mark.parametrize("collect", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_split_backward(name, collect):
    whole = make(name, 4, 8)
    split, plain = simulate(split_backward(whole, collect)), simulate(whole)
    for kept, before in zip(split.live, plain.live, strict=True):
        assert kept <= min(8, before + Fraction(collect - 1, whole.chunks))
    if collect == 1 or name == "gpipe":  # (P-1) W less
        assert split.bubble_time == bubbles.bubble_time(name, 4, 8, whole.chunks) - Fraction(3, whole.chunks)


def test_deadlock_is_found_and_named():
    good = make("1f1b", 2, 4)
    first, last = good.programs
    late = sorted(last, key=lambda step: isinstance(step, Forward | schedules.RecvActivation))  # backwards first
    unsent = [step for step in first if step != schedules.SendActivation(0, 2, 1)]
    cut = [step for step in first if not isinstance(step, schedules.SendActivation)]
    unread = [step for step in first if not isinstance(step, (*COMPUTE[1:], ReduceGrads, schedules.RecvGrad))]
    for programs, error, said in (
        ((first, late), ValueError, "without"),
        ((unsent, last), ValueError, "expects RecvActivation"),
        ((cut, last), Deadlock, "rank 1: RecvActivation"),
        ((unread, last), ValueError, "never received"),
        ((first, (*last, Backward(1, 0))), ValueError, "has already"),
    ):
        with pytest.raises(error, match=said):
            simulate(replace(good, programs=tuple(map(tuple, programs))))


FORMS = "make", "bubbles.bubble_time", "bubbles.bubble", "bubbles.live_activations"
# what is asked for: what is said
REFUSED = named("""
call                                                       words of its error
make('pipe', 2, 2)                                         unknown schedule 'pipe'
make('interleaved', 2, 4).layer_order(6)                   use a multiple of 4 layers
schedules.one_f_one_b(2, 4, 2)                             use interleaved for several
make('interleaved:1000000000', 2, 4)                       at most 1000
schedules.dualpipe_v(2, 4, 3)                              2 chunks
bubbles.bubble_time('zb-h1', 2, 4, 1, Times(1, 1, 2))      W <= F
bubbles.bubble_time('dualpipev', 2, 4, 2, Times(1, 2, 1))  F = B >= W
bubbles.bubble_time('gpipe', 2, 4, 1, Times(hop=1))        no time for transfers
split_backward(make('dualpipev', 2, 4))                    is not split
split_backward(make('1f1b', 4, 8), 0)                      collect = 0
""")
REFUSED |= {f"make({name!r}, 0, 4)": "stages = 0: must be a whole number" for name in SCHEDULES}
REFUSED |= {f"make({name!r}, 2, 1.5)": "microbatches = 1.5: must be a whole number" for name in SCHEDULES}
REFUSED |= {f"{form}(*{case}, 2)": f"{case[0]}: {case[2]} microbatches are" for case in UNDEFINED for form in FORMS}
test_refused = refused(evaluated(REFUSED, globals()))
