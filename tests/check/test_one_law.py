"""The judge, explicit mode and shard_map give a call the same type, or differ for a reason that docs/rules.md has in a
table. The page prints the table of operations, too."""

import itertools
import re

import pytest
import torch
from mutants import text_of
from test_ops_on_shards import CALLS, MESH, SHAPE, TYPES, declared_shards, function_of

from scaling import explicit
from scaling.algebra.ops import OP_KINDS
from scaling.check.held import axes_along
from scaling.check.watched import watching
from scaling.shard_map import pcast, shard_map
from scaling.shard_map.names import bound_axes
from scaling.shard_map.types import marks, varying
from scaling.spec import ShardingError

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
