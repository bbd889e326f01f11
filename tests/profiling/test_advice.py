"""Each rule finds its waste in timelines that have it, prices it, and is silent without it."""

from dataclasses import replace

import pytest
import torch
from machine import once
from refused import read_table

from scaling.collectives import all_gather, all_reduce, einsum, wait
from scaling.collectives.op import key_of
from scaling.hardware import Chip, Measured
from scaling.profile import LineRun, RankTimeline, of, profile

MS = 1e-3
WHOLE = {"after": "dW[D]", "nbytes": 2**22}  # a gradient, on every rank
WIDE = {"dtype": "float32", "nbytes": 2**22}


def timelines(*rows, ranks: int = 2, steps: int = 3, tail: float = 0.0) -> list[RankTimeline]:
    """The same on every rank: (line, op, milliseconds, {fields of Run}) one after another; `tail`: ms after them."""
    runs, marks, now = [], [0.0], 0.0
    for _ in range(steps):
        for line, op, ms, fields in rows:
            end = now + ms * MS
            group = () if op == "Einsum" else tuple(range(ranks))
            given = {"before": line, "after": line + "'", "group": group} | fields
            runs.append(LineRun(line, op, ("X",), now, end, ((now, end),), **given))
            now = end
        now += tail * MS
        marks.append(now)
    return [RankTimeline(rank, tuple(marks), tuple(runs)) for rank in range(ranks)]


def product(ms, line="P", **fields):
    return line, "Einsum", ms, {"flops": 1000, "dtype": "float32", **fields}


def moved(op, ms, **fields):
    return "C", op, ms, fields


def gather(ms, key, **fields):
    return moved("AllGather", ms, key=(key,), **fields)


SHORT, LONG = (product(ms, dtype="bfloat16") for ms in (5, 500))
REDUCED = moved("AllReduce", 5, **WHOLE)
WIDENED = moved("AllReduce", 5, **WHOLE, dtype="float32")
TABLE = """
rows                                                                  found                             options
# behind the 7 ms of products since the one before it, of its own 10: the first one has nothing before it
[gather(10, 0), product(7), gather(10, 1), product(3)]                {"prefetch": 7}
[product(7), gather(10, 0, async_op=True), product(3)]                {}
# a line made it
[product(7), gather(10, 0, before="P'"), product(3)]                  {}
[product(5), gather(4, 1, before="P'"), gather(6, 1, before="P'")]    {"twice": 6}
[product(5), gather(4, 1, before="P'"), gather(6, 2, before="P'")]    {}
[SHORT, moved("AllReduce", 8, **WIDE)]                                {"wire": 4}
[product(5), moved("AllReduce", 8, **WIDE)]                           {}
[product(5), *[moved("AllReduce", 1, nbytes=4096)] * 10]              {"buckets": 9}
[product(5), *[moved("AllReduce", 1, nbytes=4096)] * 3]               {}
[product(5), *[moved("AllReduce", 1, nbytes=2**22)] * 10]             {}
[product(5), moved("Send", 6, peers=(1,))]                            {"send": 6}
[product(5), moved("Send", 6, peers=(1,), async_op=True)]             {}
# 12 ms after gradients are reduced, on four ranks: three quarters of it
[product(5), REDUCED]                                                 {"replicated": 9}                 ranks=4, tail=12
[product(5), REDUCED]                                                 {}                                ranks=4
# the largest gain stands first, and small ones are left out
[SHORT, WIDENED]                                                      {"replicated": 6, "wire": 2.5}    tail=12
[LONG, WIDENED]                                                       {"replicated": 6}                 tail=12
"""


@pytest.mark.parametrize(("rows", "found", "options"), read_table(TABLE, globals()))
def test_each_waste_is_found_and_priced(rows, found, options):
    made = timelines(*rows, **options)
    advice = of(made[:1] if rows[-1][1] == "Send" else made).suggestions()
    assert [(each.kind, each.gain) for each in advice] == [(kind, pytest.approx(ms * MS)) for kind, ms in found.items()]
    for each in advice:
        assert each.line == "C"
        bound = each.kind in ("prefetch", "wire", "replicated")  # what comes instead has a price of its own
        assert each.bound == bound
        assert str(each).endswith(f"(gains {'at most ' * bound}{each.gain * 1e3:.1f} ms a step)")


def test_the_cost_of_widening_the_operand_counts():
    """2 ms of conversion between the product and the collective; one within the product is no part of it."""
    made = timelines(SHORT, ("y.float()", "Slice", 3, {}), moved("AllReduce", 8, **WIDE))
    runs = [[run for run in t.runs if run.op != "Slice"] for t in made]
    ops = [(name, now + start * MS, now + end * MS) for now in made[0].marks[:-1]
           for name, start, end in (("aten::to", 1, 2), ("aten::to", 5.5, 7.5), ("aten::add", 7.5, 8))]  # fmt: skip
    (found,) = of(
        [replace(t, runs=tuple(own), ops=tuple(ops)) for t, own in zip(made, runs, strict=True)]
    ).suggestions()
    assert (found.kind, found.gain) == ("wire", pytest.approx((4 + 2) * MS))


def test_unbalanced_work():
    """Rank 1 has three times rank 0's FLOPs, and 30 ms of them: evenly it were 20."""
    even = timelines(product(30), moved("AllReduce", 1))
    few = [replace(run, flops=run.flops // 3) for run in even[0].runs]
    (found,) = of([replace(even[0], runs=tuple(few)), even[1]]).suggestions()
    assert (found.kind, found.line, found.gain) == ("unbalanced", "P", pytest.approx(10 * MS, rel=0.01))
    assert of(even).suggestions() == []


PREDICTED = """
line  calls     ms  exposed  hidden  waiting  GFLOP    MB  predicted  of roof
----  -----  -----  -------  ------  -------  -----  ----  ---------  -------
P
          1   5.00                            0.004  1.00       4.00      80%
Q
          1   5.00                            0.001  3.00       3.00      60%
H
          1   5.00                            0.004             1.00      20%
C
          2  16.00    16.00    0.00     0.00         4.00       6.00      37%
G
          1   8.00     8.00    0.00     0.00         2.00"""


def test_predicted_beside_measured():
    """A product by FLOPs or by bytes, whichever takes longer; a collective as measured, if it was; twice a step."""
    rates, measured = (("fp32", 1e9), ("bf16", 4e9)), (Measured("AllReduce", 2, 1e-3, 1e9),)
    chip = Chip("here", "cpu", peaks=rates, hbm_bw=1e9, measured=measured)
    rows = [product(5, flops=4_000_000, nbytes=1_000_000), product(5, "Q", flops=1_000_000, nbytes=3_000_000)]
    rows += [product(5, "H", flops=4_000_000, dtype="bfloat16")]
    rows += [moved("AllReduce", 8, nbytes=2_000_000, dtype="float32")] * 2
    rows += [("G", "AllGather", 8, {"nbytes": 2_000_000, "async_op": True})]
    lines, _, parts = of(timelines(*rows)).table(chip).partition("\n\n")
    assert f"\n{lines}" == PREDICTED
    assert parts.splitlines()[2].split() == ["products", "15.00", "15.00"]


def test_an_operand_is_known_by_its_memory_and_not_by_its_address():
    """Memory that is freed is given out again at the same address: it is another array."""
    assert len({key_of(torch.ones(1024)) for _ in range(20)}) == 20
    x = torch.ones(4, 4)
    assert key_of(x) == key_of(x.view(16)) != key_of(x[1])
    before = key_of(x)
    assert key_of(x.add_(1)) != before


def wastes(mesh, fixed: bool) -> set[str]:
    """What is suggested for a step with a gather where it is needed, one of what was gathered, float32 sent of 16 bits,
    and many small sums; or without them."""
    x, W = torch.randn(1024, 1024).bfloat16(), torch.randn(2, 512, 256).bfloat16()
    gather, product = "W[D_X, F] -> W[D, F]", "x[B_X, D] * W[D, F] -> y[B_X, F]"

    def step():
        whole = all_gather(gather, W[0], mesh)
        ahead = all_gather(gather, W[1], mesh, async_op=True) if fixed else None
        einsum(product, x, whole)
        y = einsum(product, x, wait(ahead) if fixed else all_gather(gather, W[1], mesh))
        for _ in range(1 if fixed else 2):
            all_gather("y[B_X, F] -> y[B, F]", y, mesh)
        z = einsum("x[B, E_X] * V[E_X, D] -> z[B, D] {U_X}", x[:, :8], x[:8])
        all_reduce("z[B, D] {U_X} -> z[B, D]", z if fixed else z.float(), mesh)
        for _ in range(1 if fixed else 16):
            all_reduce("n[] {U_X} -> n[]", torch.zeros(()), mesh)

    step()
    with profile() as p:
        for _ in range(3):
            step()
            p.step()
    return {each.kind for each in p.suggestions()}


def test_the_wastes_of_a_real_step_are_found_and_none_without_them(ranks):
    kinds = {"prefetch", "twice", "wire", "buckets"}

    def found():
        assert [suggested & kinds for suggested in ranks(wastes, {"X": 2}, False)] == [kinds] * 2

    once(found)
    assert [suggested & kinds for suggested in ranks(wastes, {"X": 2}, True)] == [set()] * 2
