"""Each rule finds its waste in timelines that have it, prices it, and is silent without it."""

from dataclasses import replace

import pytest
import torch

from scaling.collectives.op import key_of
from scaling.hardware import Chip, Measured
from scaling.profile import LineRun, RankTimeline, of

MS = 1e-3


def timelines(*rows, ranks: int = 2, steps: int = 3, tail: float = 0.0) -> list[RankTimeline]:
    """The same on every rank: (line, op, milliseconds, {fields of Run}) one after another; `tail`: ms after them."""
    runs, marks, now = [], [0.0], 0.0
    for _ in range(steps):
        for line, op, ms, fields in rows:
            end = now + ms * MS
            group = () if op == "Einsum" else tuple(range(ranks))
            before, after = fields.get("before", line), fields.get("after", line + "'")
            rest = {key: value for key, value in fields.items() if key not in ("before", "after")}
            runs.append(LineRun(line, op, ("X",), now, end, ((now, end),), before, after, group=group, **rest))
            now = end
        now += tail * MS
        marks.append(now)
    return [RankTimeline(rank, tuple(marks), tuple(runs)) for rank in range(ranks)]


def product(line, ms, **fields):
    return line, "Einsum", ms, {"flops": 1000, "dtype": "float32", **fields}


def kinds(profile) -> dict[str, float]:
    return {each.kind: each.gain for each in profile.suggestions()}


def test_a_gather_of_a_stored_array_can_begin_earlier():
    """Behind the 7 ms of products since the one before it, of its own 10: but the first one has nothing before it."""
    rows = [("W = G(W_X)", "AllGather", 10, {"key": (i,)}) for i in range(2)]
    found = of(timelines(rows[0], product("P", 7), rows[1], product("P", 3))).suggestions()
    assert [(s.kind, s.line) for s in found] == [("prefetch", "W = G(W_X)")]
    assert found[0].gain == pytest.approx(7 * MS)
    assert str(found[0]).endswith("(gains at most 7.0 ms a step)"), "hidden, it still takes cores and memory"


@pytest.mark.parametrize("change", [{"async_op": True}, {"before": "P'"}])
def test_one_that_is_ahead_already_or_of_what_a_line_made_cannot(change):
    rows = [product("P", 7), ("W = G(W_X)", "AllGather", 10, change), product("P", 3)]
    assert of(timelines(*rows)).suggestions() == []


def test_the_same_array_gathered_twice():
    first, second, other = ({"key": (key,), "before": "P'"} for key in (1, 1, 2))
    rows = [product("P", 5), ("x = G(x_X)", "AllGather", 4, first), ("x = G(x_X)", "AllGather", 6, second)]
    assert kinds(of(timelines(*rows))) == {"twice": pytest.approx(6 * MS)}
    rows[2] = ("x = G(x_X)", "AllGather", 6, other)
    assert kinds(of(timelines(*rows))) == {}


def test_float32_on_the_wire():
    reduce = ("y = R(y)", "AllReduce", 8, {"dtype": "float32", "nbytes": 2**22})
    assert kinds(of(timelines(product("P", 5, dtype="bfloat16"), reduce))) == {"wire": pytest.approx(4 * MS)}
    assert kinds(of(timelines(product("P", 5), reduce))) == {}


def test_what_widened_the_operand_is_saved_as_well():
    """2 ms of conversion between the product and the collective; one within the product is no part of it."""
    reduce = ("y = R(y)", "AllReduce", 8, {"dtype": "float32", "nbytes": 2**22})
    made = timelines(product("P", 5, dtype="bfloat16"), ("y.float()", "Slice", 3, {}), reduce)
    runs = [[run for run in t.runs if run.op != "Slice"] for t in made]
    ops = [(name, now + start * MS, now + end * MS) for now in made[0].marks[:-1]
           for name, start, end in (("aten::to", 1, 2), ("aten::to", 5.5, 7.5), ("aten::add", 7.5, 8))]  # fmt: skip
    found = of([replace(t, runs=tuple(own), ops=tuple(ops)) for t, own in zip(made, runs, strict=True)]).suggestions()
    assert [(s.kind, s.bound) for s in found] == [("wire", True)]
    assert found[0].gain == pytest.approx((4 + 2) * MS)


def test_many_small_collectives():
    rows = [("dW = R(dW)", "AllReduce", 1, {"nbytes": 4096})] * 10
    found = of(timelines(product("P", 5), *rows)).suggestions()
    assert [(s.kind, s.gain) for s in found] == [("buckets", pytest.approx(9 * MS))]
    assert kinds(of(timelines(product("P", 5), *rows[:3]))) == {}
    large = [("dW = R(dW)", "AllReduce", 1, {"nbytes": 2**22})] * 10
    assert kinds(of(timelines(product("P", 5), *large))) == {}


def test_unbalanced_work():
    """Rank 1 has three times rank 0's FLOPs, and 30 ms of them: evenly it were 20."""
    even = timelines(product("P", 30), ("C", "AllReduce", 1, {}))
    few = [replace(run, flops=run.flops // 3) for run in even[0].runs]
    found = of([replace(even[0], runs=tuple(few)), even[1]]).suggestions()
    assert [(s.kind, s.line) for s in found] == [("unbalanced", "P")]
    assert found[0].gain == pytest.approx(10 * MS, rel=0.01)
    assert kinds(of(even)) == {}


def test_a_send_that_is_waited_for():
    rows = [product("P", 5), ("y = S(y)", "Send", 6, {"peers": (1,)})]
    assert kinds(of(timelines(*rows)[:1])) == {"send": pytest.approx(6 * MS)}
    rows[1][3]["async_op"] = True
    assert kinds(of(timelines(*rows)[:1])) == {}


def test_an_update_that_every_rank_makes():
    """12 ms after gradients are reduced, on four ranks: three quarters of it, less what gathering the params takes."""
    reduce = ("dW = R(dW)", "AllReduce", 5, {"after": "dW[D]", "nbytes": 2**22})
    made = of(timelines(product("P", 5), reduce, ranks=4, tail=12))
    assert kinds(made) == {"replicated": pytest.approx(9 * MS)}
    assert made.suggestions()[0].bound
    assert kinds(of(timelines(product("P", 5), reduce, ranks=4))) == {}


def test_the_largest_gain_stands_first_and_small_ones_are_left_out():
    reduce = ("dW = R(dW)", "AllReduce", 5, {"after": "dW[D]", "nbytes": 2**22, "dtype": "float32"})
    both = of(timelines(product("P", 5, dtype="bfloat16"), reduce, tail=12)).suggestions()
    assert [s.kind for s in both] == ["replicated", "wire"]
    assert [s.kind for s in of(timelines(product("P", 500, dtype="bfloat16"), reduce, tail=12)).suggestions()] == [
        "replicated"
    ]


def test_predicted_beside_measured():
    """A product by FLOPs or by bytes, whichever takes longer; a collective as measured; twice a step each."""
    chip = Chip("here", "cpu", peaks=(("fp32", 1e9),), hbm_bw=1e9, measured=(Measured("AllReduce", 2, 1e-3, 1e9),))
    rows = [product("P", 5, flops=4_000_000, nbytes=1_000_000), product("Q", 5, flops=1_000_000, nbytes=3_000_000)]
    reduce = ("C", "AllReduce", 8, {"nbytes": 2_000_000, "dtype": "float32"})
    gather = ("G", "AllGather", 8, {"nbytes": 2_000_000, "async_op": True})
    lines = {each.line: each.predicted(chip) for each in of(timelines(*rows, reduce, reduce, gather)).lines()}
    assert lines["P"] == pytest.approx(4 * MS)
    assert lines["Q"] == pytest.approx(3 * MS)
    assert lines["C"] == pytest.approx(2 * 3 * MS)
    assert lines["G"] is None, "not measured"
    table = of(timelines(*rows, reduce)).table(chip)
    assert "80%" in table
    assert "predicted" in table


def test_an_operand_is_known_by_its_memory_and_not_by_its_address():
    """Memory that is freed is given out again at the same address: it is another array."""
    keys = {key_of(torch.ones(1024)) for _ in range(20)}
    assert len(keys) == 20
    x = torch.ones(4, 4)
    assert key_of(x) == key_of(x.view(16)) != key_of(x[1])
    before = key_of(x)
    assert key_of(x.add_(1)) != before
