"""Ops on shards, run for each device, beside the same op on the whole array: what the judge passes is equal to it.

The oracle is torch: the operands' shards go through the op one device after the other, and the results are put together
by the type that the judge infers. What it neither refuses nor names as not judged must be the dense result.

The judge, explicit mode and shard_map give a call the same type, or differ for a reason that docs/rules.md has in a
table. The page prints the table of operations, too."""

import itertools
import re

import pytest
import torch
from mutants import text_of
from refused import named
from torch import Tensor
from torch.nn import functional as F

from scaling import explicit
from scaling.algebra.ops import OP_KINDS
from scaling.check import judge
from scaling.check.findings import Judgement
from scaling.check.held import Dim, axes_along, is_interleaved
from scaling.check.mode import Judge
from scaling.check.watched import watching
from scaling.collectives import all_gather
from scaling.mesh import AbstractMesh
from scaling.shard_map import pcast, shard_map
from scaling.shard_map.names import bound_axes
from scaling.shard_map.types import marks, varying
from scaling.spec import ShardingError, Spec, parse

DEVICES, SHAPE = 2, (4, 6)
MESH, SIZES = AbstractMesh({"X": DEVICES}), {"I": 4, "J": 6}
TYPES = [parse(text) for text in ("x[I_X, J]", "x[I, J_X]", "x[I, J]", "x[I, J] {U_X}")]
ONE = """
-x; x.clone(); x.relu(); x * 2; x / 2; 2 / x; x + 1; 1 - x; torch.add(x, 0); x ** 2; torch.rsub(x, 5, alpha=0)
x.float(); x.to(torch.int64); x.bool(); x.clamp(min=0); torch.div(x, 2, rounding_mode="floor")
x.masked_fill(x > 0, 0.0); x.sum(); x.sum(1); x.sum(-1, keepdim=True); x.mean(0); x.mean(); x.amax(1); x.amax()
x.prod(0); x.std(0); x.norm(dim=1); x.logsumexp(1); x.argmax(1); x.softmax(0); x.log_softmax(1); x.cumsum(0)
x.cumsum(1); x.cumprod(1); x.logcumsumexp(0); x.t(); x.reshape(24); x.reshape(2, 2, 6); x.reshape(4, 3, 2); x[None]
x.expand(3, 4, 6); x.flip(0); x.flip(1); x.tril(); x.triu(1); x.roll(1); x.roll(1, 0); x.roll(1, -1)
x.roll((1, 1), (0, 1)); x.repeat_interleave(2, 1); F.pad(x, (1, 1)); F.pad(x, (0, 0, 1, 1))
F.pad(x, (1, 1), value=1.0); x.argsort(1); x.sort(0)[0]; x.sort(-1)[0]; x.topk(2, 1)[0]; x.topk(2, 0)[1]
x.cummax(1)[0]; x.diagonal(); x.diagonal(1); x.unfold(1, 2, 1); torch.diag_embed(x); x.trace(); x.median()
x.median(1)[0]; x.kthvalue(1, 1)[0]; x.diff(dim=1) if x.shape[1] == 6 else x.triu(); torch.sinc(x)
torch.special.i0(x); F.hardshrink(x); F.avg_pool1d(x, 2); F.conv1d(x[:, None], torch.ones(1, 1, 3).double())
torch.fft.fft(x).real; torch.kron(x, torch.ones(2, 2).double()); x.rot90(); F.layer_norm(x, x.shape[1:])
F.normalize(x); torch.stack([x, x])[0]; torch.deg2rad(x); x.repeat(2, 1); torch.block_diag(x, x)
torch.addcmul(x, x, x)
"""
TWO = """
x + y; x - y; torch.add(x, y, alpha=2); torch.rsub(x, y); x * y; x / y; x @ y.T; x.T @ y; torch.maximum(x, y)
torch.where(x > 0, x, y); torch.lerp(x, y, 0.5); torch.lerp(x, x, y); torch.addmm(x @ y.T, x, y.T); (x * y).sum()
torch.addcmul(x, x, y); torch.cdist(x, y); x * (y > 0); torch.kron(x, y); torch.logaddexp(x, y)
"""
CALLS = [(call, n) for text, n in ((ONE, 1), (TWO, 2)) for call in text.replace("\n", ";").split(";") if call.strip()]
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def shards(x: Tensor, spec: Spec) -> list[Tensor]:
    if spec.unreduced:
        part = drawn(*x.shape)
        return [part, x - part]
    dims = [i for i, (_, axes) in enumerate(spec.dims) if axes]
    return list(x.chunk(DEVICES, dims[0])) if dims else [x, x]


def whole(parts: list[Tensor], spec: Spec, how: str) -> Tensor:
    if spec.unreduced:
        both = torch.stack(parts)
        return {"max": both.amax, "min": both.amin, "mean": both.double().mean}.get(how, both.sum)(0)
    dims = [i for i, (_, axes) in enumerate(spec.dims) if axes]
    assert dims or torch.equal(*parts), "the devices differ along X, which the type does not say"
    return torch.cat(parts, dims[0]) if dims else parts[0]


def is_taken_at_its_word(dim: Dim) -> bool:
    """Return whether a dim's axes are not known, as in a stack, or it is refused where a collective moves it."""
    return any(part.axes is None and part.size > 1 for part in dim) or is_interleaved(dim)


def function_of(call: str):
    return eval(f"lambda x, y=None: {call.strip()}", {"torch": torch, "F": F})


def declared_shards(specs) -> tuple[Judge, list[Tensor]]:
    """Return a judge that knows a shard without numbers of each type, and the shards."""
    watch = Judge(Judgement(), MESH.sizes)
    given = [torch.empty(spec.local_shape(SIZES, MESH), dtype=torch.float64, device="meta") for spec in specs]
    for x, spec in zip(given, specs, strict=True):
        watch.declare(x, spec, "")
    return watch, given


@pytest.mark.parametrize(("call", "operands"), CALLS, ids=[call.strip() for call, _ in CALLS])
def test_an_op_that_passes_is_that_of_one_device(call, operands):
    fn = function_of(call)
    for specs in itertools.product(TYPES, repeat=operands):
        watch, given = declared_shards(specs)
        report, arrays = watch.report, [drawn(*SHAPE) for _ in specs]
        try:
            with watching(watch):
                held = watch.held(fn(*given))
        except RuntimeError:
            continue  # the shards do not fit: no device runs it
        if report.findings or report.unjudged or any(map(is_taken_at_its_word, held.dims)):
            continue
        parts = [fn(*own) for own in zip(*map(shards, arrays, specs), strict=True)]
        found = whole(parts, held.type, held.parts)
        torch.testing.assert_close(found.double(), fn(*arrays).double(), msg=f"{call} of {specs}: {held}")


# what the judge says first of x[I, J_X]
BROKEN = named("""
call                                   why
x.roll(1, -1)                          roll runs along a dim that is split over X
x.triu()                               triu runs along a dim that is split over X
x.cummax(1)[0]                         cummax runs along a dim that is split over X
x.diagonal()                           diagonal runs along a dim that is split over X
x.unfold(1, 2, 1)                      unfold runs along a dim that is split over X
F.pad(x, (1, 1))                       constant_pad_nd runs along a dim that is split over X
# each element and its copy stay on their device
x.repeat_interleave(2, 1)
gathered(x.flatten())                  its blocks are interleaved
gathered(x.T.flatten())
gathered(torch.cat([x[0], x[0, :2]]))  its blocks are interleaved
""")


@pytest.mark.parametrize("call", BROKEN)
def test_what_runs_along_a_split_dim_is_refused(call):
    gathered = lambda x: all_gather("r[R_X] -> r[R]", x, MESH)  # noqa: E731
    report = judge(eval(f"lambda x: {call}", {"F": F, "torch": torch, "gathered": gathered}), "x[I, J_X]", mesh=MESH)
    assert [BROKEN[call] in str(found) for found in report.findings] == [True] * bool(BROKEN[call])
    assert not report.unjudged


@pytest.mark.parametrize("call", ["x.sort(1)[0]", "x.argsort(1)", "x.topk(2, 1)[0]", "x.T[0]", "x.unbind(1)[0]"])
def test_what_a_device_does_with_its_own_part_is_named(call):
    report = judge(eval(f"lambda x: {call}"), "x[I, J_X]", mesh=MESH)
    assert not report.findings
    assert ["its own part" in why for _, why in report.unjudged] == [True]


PAGE = text_of("docs/rules.md")
REASONS = re.findall(r"^\| `(\w+)` \|", PAGE.partition("in these cases:")[2], re.M)
REFUSED = "refused"


def type_by_the_judge(fn, specs):
    """Return (the axes of each dim, those of the sum), or what the judge says instead; None stands for unknown axes."""
    judge, given = declared_shards(specs)
    try:
        with watching(judge):
            held = judge.held(fn(*given))
    except RuntimeError:
        return REFUSED if judge.report.findings else "shapes"
    if judge.report.findings or judge.report.unjudged:
        return REFUSED if judge.report.findings else "named"
    return tuple(map(axes_along, held.dims)), held.unreduced


def type_in_explicit_mode(fn, specs):
    arrays = [explicit.array(torch.empty(SHAPE, dtype=torch.float64, device="meta"), spec, MESH) for spec in specs]
    try:
        found = fn(*arrays).layout
    except ShardingError as error:
        return "unknown" if "not a function whose sharding is known" in str(error) else REFUSED
    return found.dims, frozenset(found.unreduced)


def type_in_shard_map(fn, specs) -> str:
    """Return whether a result is split (it varies), a sum or whole; a whole operand is reduced, as JAX says."""
    found = []

    def program(*shards):
        given = []
        for x, spec in zip(shards, specs, strict=True):
            kind = "unreduced" if spec.unreduced else "" if spec.axes else "reduced"
            given.append(pcast(x, "X", to=kind) if kind else x)
        y = fn(*given)
        over = varying(y, bound_axes("the result", ())[0])
        found.append("sum" if marks(y).unreduced else "split" if over - marks(y).axes else "whole")
        return torch.zeros(())

    rows = [torch.ones(SHAPE[0] * 2, SHAPE[1]) if spec.unreduced else torch.ones(SHAPE) for spec in specs]
    types = tuple("x[I_X, J]" if spec.unreduced else str(spec) for spec in specs)
    try:
        shard_map(program, {"X": 2}, types, "z[]", in_process=True)(*rows)
    except ShardingError:
        return REFUSED
    except RuntimeError:
        return "shapes"
    return found[0]


def agree(a, b) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    dims = zip(a[0], b[0], strict=True)
    return (a[1] is None or a[1] == b[1]) and all(None in (x, y) or x == y for x, y in dims)


def reason(call: str, judged, typed) -> str:
    """Return the row of the table that says why the judge and explicit mode differ."""
    if typed == "unknown":
        return "unknown"
    if judged == "named":
        return "own" if any(name in call for name in ("sort", "topk")) else "unknown"
    if judged in (REFUSED, "shapes"):
        return "slices" if judged == REFUSED else "shapes"
    return "max" if "max" in call else "unknown" if "kron" in call else ""


def reason_of_shard_map(mapped: str, typed, specs) -> str:
    """Return the row that says why shard_map differs from explicit mode."""
    if typed == "unknown" or mapped == "shapes":
        return mapped if mapped == "shapes" else "unknown"
    parts = any(spec.axes for spec in specs) and not any(spec.unreduced for spec in specs)
    return "varies" if mapped == "split" and parts else ""


@pytest.mark.slow
def test_the_three_agree_or_differ_for_a_reason():
    reasons, alike, mapped_alike = set(), 0, 0
    for call, operands in CALLS:
        fn = function_of(call)
        for specs in itertools.product(TYPES, repeat=operands):
            judged, typed, mapped = (
                f(fn, specs) for f in (type_by_the_judge, type_in_explicit_mode, type_in_shard_map)
            )
            words = typed if isinstance(typed, str) else "sum" if typed[1] else "split" if any(typed[0]) else "whole"
            why = []
            if not agree(judged, typed):
                why.append(reason(call, judged, typed))
                if why == ["slices"]:  # one operand is whole where the other is split
                    assert not all(spec.axes for spec in specs)
                    assert any(spec.axes for spec in specs)
            if mapped != words:
                why.append(reason_of_shard_map(mapped, typed, specs))
            alike, mapped_alike = alike + agree(judged, typed), mapped_alike + (mapped == words)
            assert {*why} <= {*REASONS}, f"{call} of {specs}: {judged=}, explicit mode: {typed}, shard_map: {mapped}"
            reasons |= {*why}
    assert reasons == set(REASONS), "a row of the table that no call needs"
    assert alike > 420
    assert mapped_alike > 290


def test_the_page_prints_the_table_of_operations():
    for kind, row in OP_KINDS.items():
        assert f"| `{kind}` | {row.does} | {row.keeps or 'none'} | {row.names} |\n" in PAGE
