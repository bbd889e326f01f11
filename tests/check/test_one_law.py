"""The judge and explicit mode give a call the same type, or differ for a reason that docs/rules.md has in a table."""

import itertools
import re

import pytest
import torch
from mutants import text_of
from test_ops_on_shards import CALLS, MESH, SHAPE, SIZES, TYPES
from torch.nn import functional as F

from scaling import explicit
from scaling.check.findings import Judgement
from scaling.check.held import axes_along
from scaling.check.mode import Judge
from scaling.check.watched import watching
from scaling.spec import ShardingError

TABLE = re.findall(r"^\| `(\w+)` \|", text_of("docs/rules.md"), re.M)
REFUSED = "refused"


def type_by_the_judge(fn, specs):
    """Return (the axes of each dim, those of the sum), or what the judge says instead; None stands for unknown axes."""
    report = Judgement()
    judge = Judge(report, MESH.sizes)
    given = [torch.empty(spec.local_shape(SIZES, MESH), dtype=torch.float64, device="meta") for spec in specs]
    for x, spec in zip(given, specs, strict=True):
        judge.declare(x, spec, "")
    try:
        with watching(judge):
            held = judge.held(fn(*given))
    except RuntimeError:
        return REFUSED if report.findings else "shards"
    if report.findings or report.unjudged:
        return REFUSED if report.findings else "named"
    return tuple(map(axes_along, held.dims)), held.unreduced


def type_in_explicit_mode(fn, specs):
    arrays = [explicit.array(torch.empty(SHAPE, dtype=torch.float64, device="meta"), spec, MESH) for spec in specs]
    try:
        found = fn(*arrays).layout
    except ShardingError as error:
        return "unknown" if "not a function whose sharding is known" in str(error) else REFUSED
    return found.dims, frozenset(found.unreduced)


def agree(a, b) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    dims = zip(a[0], b[0], strict=True)
    return (a[1] is None or a[1] == b[1]) and all(None in (x, y) or x == y for x, y in dims)


def reason(call: str, judged, typed) -> str:
    """Return the row of the table that says why the two differ."""
    if typed == "unknown":
        return "unknown"
    if judged == "named":
        return "own" if any(name in call for name in ("sort", "topk")) else "unknown"
    if judged == "shards":
        return "shapes"
    if judged == REFUSED:
        return "slices"
    return next((row for row in ("max", "interleave", "lerp") if row in call), "unknown" if "kron" in call else "")


@pytest.mark.slow
def test_the_judge_and_explicit_mode_agree_or_differ_for_a_reason():
    reasons, alike = set(), 0
    for call, operands in CALLS:
        fn = eval(f"lambda x, y=None: {call.strip()}", {"torch": torch, "F": F})
        for specs in itertools.product(TYPES, repeat=operands):
            judged, typed = type_by_the_judge(fn, specs), type_in_explicit_mode(fn, specs)
            if agree(judged, typed):
                alike += 1
                continue
            why = reason(call, judged, typed)
            assert why in TABLE, f"{call} of {specs}: the judge: {judged}, explicit mode: {typed}"
            if why == "slices":  # one operand is whole where the other is split
                assert not all(spec.axes for spec in specs)
                assert any(spec.axes for spec in specs)
            reasons.add(why)
    assert reasons == set(TABLE), "a row of the table that no call needs"
    assert alike > 400
