"""Schedules as data, simulated: closed forms met exactly, deadlocks and wrong programs found."""

from collections import Counter
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from scaling import schedules
from scaling.schedules import SCHEDULES, Backward, ForwardBackward, ReduceGrads, SendActivation, make, split_backward
from scaling.schedules import closed_forms as bubbles
from scaling.schedules.instructions import (
    COMPUTE,
    SENDS,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGrad,
    parts,
)
from scaling.schedules.simulator import Deadlock, Times, simulate

ISSUE = [(name, p, m) for name in SCHEDULES for p in (2, 4, 8) for m in (1, 4, 8, 16)]
DEFINED = [
    (name, p, m)
    for name, p, m in ISSUE
    if not (name == "interleaved" and m % p) and not (name == "dualpipev" and m < 2 * p)
]


@pytest.mark.parametrize(("name", "stages", "microbatches"), DEFINED)
def test_closed_forms_are_met_exactly(name, stages, microbatches):
    schedule = make(name, stages, microbatches)
    for times in (Times(), Times(3, 3, 2)):
        timeline = simulate(schedule, times)
        args = name, stages, microbatches, schedule.chunks, times
        assert timeline.idle(stages - 1) == bubbles.bubble_time(*args)
        assert timeline.live == bubbles.live_activations(*args[:4])
        assert timeline.bubble == bubbles.bubble(*args)
        assert timeline.overhead == bubbles.overhead(*args)
        assert timeline.makespan == bubbles.bubble_time(*args) + microbatches * sum(
            (times.forward, times.backward_input, times.backward_weight)
        )


@given(st.sampled_from(["gpipe", "1f1b", "naive", "zb-h1"]), st.integers(1, 6), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_closed_forms_for_any_times(name, stages, microbatches, data):
    f, b = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    times = Times(f, b, data.draw(st.integers(1, min(f, b))))
    timeline = simulate(make(name, stages, microbatches), times)
    assert timeline.bubble_time == bubbles.bubble_time(name, stages, microbatches, 1, times)
    assert timeline.live == bubbles.live_activations(name, stages, microbatches)


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 16), st.integers(1, 3))
@settings(deadline=None, max_examples=50, derandomize=True)
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
            assert done[BackwardInput, stage, m] == done[BackwardWeight, stage, m]
    for rank, program in enumerate(schedule):
        assert not any(isinstance(s, (*SENDS, RecvActivation)) and s.peer == rank for s in program)
        assert not any(isinstance(s, ReduceGrads) and isinstance(then, SENDS) for s, then in pairwise(program))
        both = [step for step in program if isinstance(step, ForwardBackward)]
        assert all(step.forward.stage != step.backward.stage for step in both)


def test_the_textbook_fractions():
    for v in (2, 3):
        timeline = simulate(make("interleaved", 4, 8, v))
        assert (timeline.overhead, timeline.bubble) == (Fraction(3, 8) / v, Fraction(3, v * 8 + 3))
    # Qi et al.: with F = B = W, ZB-H1's bubble is a third of 1F1B's.
    assert simulate(make("1f1b", 4, 8)).bubble_time == 3 * simulate(make("zb-h1", 4, 8)).bubble_time


def test_a_schedule_is_plain_data():
    schedule = make("1f1b", 2, 2)
    assert make("interleaved", 4, 8, 1).programs == make("1f1b", 4, 8).programs
    assert schedule == make("1f1b", 2, 2)
    assert schedule[0][:2] == (Forward(0, 0), SendActivation(0, 0, peer=1))
    with pytest.raises(FrozenInstanceError):
        schedule[0][0].stage = 1


def test_what_dualpipe_overlaps_may_take_less():
    times = Times(overlapped=Fraction(5, 2))
    timeline = simulate(make("dualpipev", 4, 16), times)
    assert timeline.idle(3) == bubbles.bubble_time("dualpipev", 4, 16, 2, times) == Fraction(9, 4)


def test_hops_delay_but_do_not_change_the_order():
    slow = simulate(make("gpipe", 4, 8), Times(hop=1))
    assert slow.makespan == simulate(make("gpipe", 4, 8)).makespan + 2 * 3  # three hops forward, three back


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
    with pytest.raises(Deadlock, match=r"rank 3: SendGrad\(stage=3, microbatch=0, peer=2\)"):
        simulate(make("1f1b", 4, 8), blocking_sends=True)
    simulate(make("gpipe", 4, 8), blocking_sends=True)  # forwards and backwards never cross

    good = make("1f1b", 2, 4)
    late = tuple(sorted(good[1], key=lambda step: isinstance(step, Forward | RecvActivation)))  # backwards first
    with pytest.raises(ValueError, match="without"):
        simulate(replace(good, programs=(good[0], late)))
    unsent = tuple(step for step in good[0] if step != SendActivation(0, 2, 1))
    with pytest.raises(ValueError, match="expects RecvActivation"):
        simulate(replace(good, programs=(unsent, good[1])))
    cut = tuple(step for step in good[0] if not isinstance(step, SendActivation))
    with pytest.raises(Deadlock, match="rank 1: RecvActivation"):
        simulate(replace(good, programs=(cut, good[1])))
    unread = [step for step in good[0] if not isinstance(step, (*COMPUTE[1:], ReduceGrads, RecvGrad))]
    with pytest.raises(ValueError, match="never received"):
        simulate(replace(good, programs=(tuple(unread), good[1])))
    with pytest.raises(ValueError, match="has already"):
        simulate(replace(good, programs=(good[0], (*good[1], Backward(1, 0)))))


def test_layer_order():
    orders = {("1f1b", 4): [0, 1, 2, 3], ("interleaved", 8): [0, 1, 4, 5, 2, 3, 6, 7], ("dualpipev", 4): [0, 3, 1, 2]}
    for (name, layers), order in orders.items():
        assert make(name, 2, 4).layer_order(layers) == order


FORMS = make, bubbles.bubble_time, bubbles.bubble, bubbles.live_activations
test_refused = refused(
    {
        "a schedule": (lambda: make("pipe", 2, 2), "unknown schedule 'pipe'"),
        "layers": (lambda: make("interleaved", 2, 4).layer_order(6), "use a multiple of 4 layers"),
        "chunks of 1F1B": (lambda: schedules.one_f_one_b(2, 4, 2), "use interleaved for several"),
        "three chunks": (lambda: schedules.dualpipe_v(2, 4, 3), "2 chunks"),
        "a long W": (lambda: bubbles.bubble_time("zb-h1", 2, 4, 1, Times(1, 1, 2)), "W <= F"),
        "F unlike B": (lambda: bubbles.bubble_time("dualpipev", 2, 4, 2, Times(1, 2, 1)), "F = B >= W"),
        "transfers": (lambda: bubbles.bubble_time("gpipe", 2, 4, 1, Times(hop=1)), "no time for transfers"),
        "overlapped": (lambda: bubbles.bubble("dualpipev", 2, 4, 2, Times(overlapped=2)), "differs from rank to rank"),
        "split twice": (lambda: split_backward(make("dualpipev", 2, 4)), "is not split"),
        "split by none": (lambda: split_backward(make("1f1b", 4, 8), 0), "at least 1"),
        **{
            f"{name} {bad}": (lambda name=name, bad=bad: make(name, *bad), "at least 1")
            for name in SCHEDULES
            for bad in ((0, 4), (2, 1.5))
        },
        **{
            f"{i} {case}": (lambda what=what, case=case: what(*case, 2), f"{case[0]}: {case[2]} microbatches are")
            for case in ISSUE
            if case not in DEFINED
            for i, what in enumerate(FORMS)
        },
    }
)
