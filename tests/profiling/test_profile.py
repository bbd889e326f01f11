"""A profile of real steps: one of a rank alone, and of two ranks of which one is slow."""

import json
import os
import re
import time
from dataclasses import replace

import pytest
import torch
from machine import ended, once
from refused import read_table

from scaling import trace
from scaling.collectives import all_reduce, einsum
from scaling.common.torch_private import profiling
from scaling.hardware import Chip, Measured
from scaling.measure.command import toml
from scaling.mesh import Mesh
from scaling.profile import profile, record
from scaling.profile.command import main
from scaling.profile.record import runs_of, watched
from scaling.profile.timeline import LineRun, RankTimeline
from scaling.profile.torch_trace import RankTrace, join_traces, on_device, read_trace, with_transfers
from scaling.spec import parse

LINE = "A[I, J] * B[J, K] -> C[I, K]"
DELAY = 0.03


def test_one_process(tmp_path):
    """Memory by line is what the tensors take; the parts add up to the step; files are written."""
    a, b = torch.randn(256, 128), torch.randn(128, 512)
    einsum(LINE, a, b)
    with profile() as p:
        began = time.perf_counter()
        c = einsum(LINE, a, b)
        torch.relu_(c)
        d = torch.ones(1000)
        p.step()
        took = time.perf_counter() - began
    (part,) = p.parts()
    assert part.total == pytest.approx(part.step, rel=1e-9)
    assert part.step == pytest.approx(took, rel=0.3, abs=5e-3)  # by a clock outside
    assert part.between > 0
    assert part.waiting == part.exposed == part.hidden == 0
    (line,) = p.lines()
    assert (line.calls, line.flops) == (1, 2 * 256 * 128 * 512)
    assert line.nbytes == a.nbytes + b.nbytes + c.nbytes
    begun, product = p.memory()
    assert (begun.live, product.live, product.peak) == (0, c.nbytes, c.nbytes + d.nbytes)
    if os.path.exists(record.COUNTER):
        looked = [when for when, _ in p.timelines[0].waited]
        assert len(looked) == 4, "at the beginning, as the line starts and ends, at the end"
        assert looked == sorted(looked)
    text = p.table()
    assert str(line.line) in text
    assert max(map(len, text.splitlines())) <= 100
    p.save(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (drawn,) = [e for e in events if e["name"] == line.line]
    assert drawn["args"]["FLOPs"] == line.flops
    (matmul,) = [e for e in events if e["name"] == "aten::mm"]
    assert drawn["ts"] <= matmul["ts"] <= matmul["ts"] + matmul["dur"] <= drawn["ts"] + drawn["dur"]


class Block(torch.Tensor):
    def __del__(self):
        os.write(2, b"was allocated before the profiling started")


def test_torch_s_warning_of_a_block_that_was_allocated_before_is_not_shown(capfd, monkeypatch):
    """torch warns of the first one of a process that is freed: it is one of ours."""
    record._free_in_silence([Block()])
    os.write(2, b"what comes after is")
    assert capfd.readouterr().err == "what comes after is"
    freed = []
    monkeypatch.setattr(record, "_free_in_silence", lambda blocks: freed.append((len(blocks), profiling())))
    for memory in (True, False):
        with profile(memory=memory):
            pass
    assert freed == [(1, True)]


def test_a_profile_within_another_sees_the_same():
    with profile() as outer:
        for _ in range(2):
            with profile() as inner:
                einsum(LINE, torch.ones(2, 3), torch.ones(3, 4))
    assert [line.line for line in outer.lines()] == [line.line for line in inner.lines()]


def test_a_profile_says_what_it_lacks(tmp_path):
    with pytest.raises(ValueError, match="at the end of its block"), profile() as p:
        p.table()
    with profile(ops=False, memory=False) as p:
        all_reduce("A[I] {U_X} -> A[I]", torch.ones(4), Mesh({"X": 1}))
    einsum(LINE, torch.ones(2, 2), torch.ones(2, 2))  # outside of it nothing is recorded
    assert [run.communicates for run in p.timelines[0].runs] == [False]  # one device
    assert not trace.open_logs
    with pytest.raises(ValueError, match="fix: profile\\(\\) without ops=False"):
        p.save(tmp_path)


def span(name, start, seconds, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "cat": cat, "tid": tid, "args": args}


def test_the_profilers_export_is_read():
    """On a clock 1,000 s ahead, which the second of two spans tells best: nested operations, other threads, gloo's
    spans, memory of both devices."""
    memory = [{"ph": "i", "name": "[memory]", "ts": t * 1e6, "args": {"Bytes": n, "Device Type": d}, "tid": 1}
              for t, n, d in ((1001, 8, 0), (1002, -8, 0), (1003, 64, 1))]  # fmt: skip
    events = [
        span("A", 1000.5, 0.1),
        span("B", 1002.0, 0.1),
        span("aten::linear", 1003.0, 2.0),
        span("aten::mm", 1003.5, 1.0),
        span("aten::mm", 1005.5, 1.0),
        span("aten::other", 1003.0, 1.0, tid=2),
        span("gloo:all_reduce", 1004.0, 1.0, "user_annotation", tid=7),
    ]
    for ahead in (0.0, 50.0):  # of the clock asked for
        seen = read_trace({"traceEvents": [*events, *memory]}, [("A", 0.0), ("B", 2.0)], ahead=ahead)
        assert seen.ops == (("aten::linear", 3.0 + ahead, 5.0 + ahead), ("aten::mm", 5.5 + ahead, 6.5 + ahead))
        assert seen.memory == ((1.0 + ahead, 8), (2.0 + ahead, -8))
        assert seen.transfers == (("gloo:all_reduce", 4.0 + ahead, 5.0 + ahead),)
        assert seen.shift == ahead - 1000


def test_the_ranks_traces_are_joined_on_one_clock():
    """Rank 1's clock is 1,000 s ahead; its line has what is said of it, arrows stay within a rank."""
    arrow = {"ph": "s", "name": "ac2g", "ts": 5e6, "id": 7, "pid": 40, "tid": 1}
    named = {"ph": "M", "name": "process_name", "pid": 40, "tid": 0, "args": {"name": "python"}}
    traces = [
        RankTrace(json.dumps({"traceEvents": [named, arrow, *(span("A", at + ahead, 1.0) for at in (2, 4))]}), -ahead)
        for ahead in (0, 1000)
    ]
    runs = tuple(LineRun("A", "Einsum", (), at, at + 1, ((at, at + 1),), nbytes=n) for n, at in ((1, 2.0), (2, 4.0)))
    events = join_traces(traces, [RankTimeline(0, (0.0, 9.0), ()), RankTimeline(1, (0.0, 9.0), runs)])["traceEvents"]
    drawn = [(e["ts"], e["args"].get("V")) for e in events if e["name"] == "A"]
    assert drawn == [(2e6, None), (4e6, None), (2e6, 1), (4e6, 2)]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    assert len({(e["pid"], e["id"]) for e in events if "id" in e}) == 2


def test_kernels_belong_to_the_line_that_launched_them():
    """A product and an AllReduce launched at once, run later: of the transfer, 3 to 7, what the product and the
    operation after it do not cover is exposed."""
    events = [span("P", 0.0, 0.2)]
    for number, (name, launched, start, seconds) in enumerate(
        [("gemm", 0.1, 2.0, 2.0), ("ncclKernel_AllReduce", 0.3, 3.0, 4.0), ("gelu", 0.5, 4.5, 1.0)]
    ):
        events += [span("cudaLaunchKernel", launched, 0.01, "cuda_runtime", correlation=number),
                   span(name, start, seconds, "kernel", tid=9, correlation=number)]  # fmt: skip
    seen = read_trace({"traceEvents": events}, [("P", 0.0)], "cuda")
    product = LineRun("P", "Einsum", (), 0.0, 0.2, ((0.0, 0.2),))
    reduce = LineRun("C", "AllReduce", ("X",), 0.2, 0.4, ((0.2, 0.4),), group=(0, 1))
    (product, reduce), ops = on_device([product, reduce], seen.kernels)
    assert product.held == ((2.0, 4.0),)
    assert ops == (("gelu", 4.5, 5.5),)
    assert reduce.transfer == (3.0, 7.0)
    assert reduce.held == ((4.0, 4.5), (5.5, 7.0))


def test_an_asynchronous_line_holds_the_rank_in_its_call_and_its_wait():
    times: dict = {"called": 1.0, "start": 1.5, "left": 2.0, "waited": 5.0, "end": 6.0}
    event = trace.Event("AllReduce", ("X",), (), parse("A[B]"), async_op=True, **times)
    for ahead in (0.0, 10.0):
        (run,) = runs_of([event], ahead=ahead)
        held = ((1.0 + ahead, 2.0 + ahead), (5.0 + ahead, 6.0 + ahead))
        assert (run.called, run.end, run.held) == (1.0 + ahead, 6.0 + ahead, held)
    (run,) = runs_of([event])
    moved = [("gloo:all_reduce", 0.5, 0.6), ("gloo:all_reduce", 1.6, 5.9)]
    (placed,) = with_transfers([replace(run, group=(0, 1))], moved)
    assert placed.transfer == (1.6, 5.9)


def watch(mesh, place, predict=""):
    """Rank 1 sleeps before its second product in each step."""
    x, W, numbers = torch.randn(64, 64), torch.randn(64, 64), []
    for number in watched(range(9), place, mesh.rank, predict):
        y = einsum("x[B, D_X] * W[D_X, F] -> y[B, F] {U_X}", x, W)
        y = all_reduce("y[B, F] {U_X} -> y[B, F]", y, mesh)
        if mesh.rank == 1 and place:
            time.sleep(DELAY)
        z = einsum("y[B, F] * W[F, D] -> z[B, D]", y, W)
        all_reduce("z[B, D] {U_X} -> z[B, D]", z, mesh)
        numbers.append(number)
    return numbers


def test_some_steps_of_a_run_are_profiled_and_a_slow_rank_is_named_with_its_line(ranks, tmp_path):
    """On a busy machine others may be late too, and longer; how exactly it is found, `test_split.py` has."""
    machine, place = tmp_path / "machine.toml", tmp_path / "p"
    reduce = Measured("AllReduce", 2, 0.25, 1e9)  # 250 ms, then a byte each nanosecond
    one = Chip("m", "cpu", "here", peaks=(("fp32", 1e9),), hbm_bytes=1e9, hbm_bw=1e9, measured=(reduce,))
    machine.write_text(toml(one))

    def named():
        assert ranks(watch, {"X": 2}, str(place), str(machine)) == [list(range(9))] * 2
        said = (place / "lines.txt").read_text()
        assert "  predicted  of roof" in said
        assert re.search(r" 250\.0\d ", said)
        slow = " ".join(said.partition("slow ranks")[2].split())
        (late,) = re.findall(r"rank 1 is (\S+) ms slow before z\[B, D\] = y\[B, F\] \* W\[F, D\]: others wait", slow)
        assert float(late) / 1e3 == pytest.approx(DELAY, rel=0.5)
        events = json.loads((place / "trace.json").read_text())["traceEvents"]
        lines = [e for e in events if e["name"] == "z[B, D] = AllReduce_X(z[B, D] {U_X})"]
        zero, one = ([e for e in lines if e["pid"] // 1000 == rank] for rank in (0, 1))
        assert len(zero) == len(one) == 5
        assert all(abs(a["ts"] - b["ts"]) < 1e6 for a, b in zip(zero, one, strict=True)), "on one clock"
        assert sum(e["args"]["waiting ms"] for e in zero) / 5 > DELAY * 1e3 / 4
        assert all(e["args"]["waiting ms"] >= 0 for e in one)

    once(named)
    assert ranks(watch, {"X": 2}, "") == [list(range(9))] * 2


# --- `python -m scaling.profile` runs a chapter as it is, and writes a profile of what its ranks do

REDUCE = "a[I] = AllReduce_X(a[I] {U_X})"
CHAPTER = '''
"""A chapter that goes to its ranks twice."""
import torch

from scaling.book.page import Page
from scaling.collectives import all_reduce

page = Page(__doc__, mesh="X=2", times=(1, "how often"))


def act(mesh, times):
    for _ in range(times):
        x = all_reduce("a[I] {U_X} -> a[I]", torch.ones(4), mesh)
    return x.tolist()


page.check("what the ranks give", page.on_ranks(act, page.args.times) == [2.0] * 4)
page.check("and again", page.on_ranks(act, 2 * page.args.times) == [2.0] * 4)
page.end()
'''


@pytest.mark.slow
def test_each_time_that_a_chapter_goes_to_its_ranks_has_a_profile(tmp_path, capfd):
    (tmp_path / "chapter.py").write_text(CHAPTER)
    assert main([str(tmp_path / "found"), str(tmp_path / "chapter.py"), "--times", "3"]) == 0
    assert "2 checks: all hold" in capfd.readouterr().out
    for place, times in (("found", 3), ("found-2", 6)):
        assert REDUCE in (tmp_path / place / "lines.txt").read_text()
        events = json.loads((tmp_path / place / "trace.json").read_text())["traceEvents"]
        assert sorted(e["pid"] // 1000 for e in events if e["name"] == REDUCE) == [0] * times + [1] * times


CANNOT = read_table(
    """
arguments                           exit code  words
"pyproject.toml chapter.py"         2          "it must be FILE.json or a folder, and "
"pyproject.toml/deeper chapter.py"  2          "it must be FILE.json or a folder, and "
"found nowhere.py"                  2          "nowhere.py: there is no such chapter"
"found chapter.py --steps 0"        2          "unrecognized arguments: --steps 0"
"found alone.py"                    1          "started no ranks"
""",
    globals(),
)


@pytest.mark.parametrize(("arguments", "code", "said"), CANNOT)
def test_impossible_profiles_are_refused(tmp_path, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    for name, text in {"chapter.py": CHAPTER, "alone.py": "print(1)", "pyproject.toml": ""}.items():
        (tmp_path / name).write_text(text)
    assert ended(main, arguments.split()) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "found").exists()
