"""Judge a function of shards: its types on an abstract mesh, its results on ranks, and the bytes that it sends."""

import math
from collections.abc import Callable
from typing import Any

import torch

from scaling import launch
from scaling.check import judge
from scaling.exercise.judge import described
from scaling.exercise.page import Exercise
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, block_index, parse
from scaling.spec.sizes import parse_mesh
from scaling.trace import trace
from scaling.trace.peak import peak_memory

NEAR = 1e-9  # relative tolerance of results in float64


def judge_shards(exercise: Exercise, fn: Callable, text: str) -> tuple[bool, str]:
    """Judge a function of shards: its types on an abstract mesh, its results on ranks in float64, and its bytes.

    The exercise's data has `fn`, the function's name; `mesh`; `args`: {name: type}, in the function's order, before the
    mesh; `sizes` of the dims; `returns`: {name: type}, in their order; `best`: the least bytes that a rank can send;
    `peak`: the bytes that a rank holds at its peak in the best known answer, which is reported with other answers;
    `typed = false` if types are not judged.
    """
    data = exercise.data
    sizes = parse_mesh(data["mesh"])
    if data.get("typed", True):
        returns = list(data["returns"].values())
        wanted = returns[0] if len(returns) == 1 else tuple(returns)
        try:
            mesh = AbstractMesh(sizes)
            report = judge(fn, *data["args"].values(), mesh, mesh=mesh, returns=wanted)
        except Exception as error:
            note = "" if isinstance(error, ShardingError) else "\n  types are judged with other sizes of the dims"
            return False, described(error, exercise.name) + note
        results = _tuple(report.result)
        if report.result is not None and len(results) != len(returns):
            return False, f"it returns {len(results)} results where {len(returns)} are asked for: {', '.join(returns)}"
        if report.findings:
            said = report.findings[0].message
            swapped = len(returns) > 1 and said.startswith("result ") and "the dims differ" in said
            return False, said + f"\n  results are returned in this order: {', '.join(data['returns'])}" * swapped
    try:
        seen = launch.run(on_rank, sizes, exercise, text, timeout=20)
    except Exception as error:
        return False, described(error, exercise.name)
    for i, name in enumerate(data["returns"]):
        if any(rank[0][i] for rank in seen):
            return False, _hint(exercise, name, [rank[0][i] for rank in seen])
    sent = max(rank[1] for rank in seen)
    if sent > data["best"]:
        return False, f"the results are right, but a rank sends {sent:,} bytes where {data['best']:,} are enough"
    held, least = peak_of(exercise, fn), data["peak"]
    known = "the least known" if held <= least else f"where {least:,} are enough: what could be gathered later?"
    return (
        True,
        f"as on one device. A rank sends {sent:,} bytes, the least known; at its peak it holds {held:,}, {known}",
    )


def peak_of(exercise: Exercise, fn: Callable) -> int:
    """Return the bytes that a rank holds at its peak, counted on an abstract mesh."""
    data = exercise.data
    mesh, shards = AbstractMesh(parse_mesh(data["mesh"]), backend="gloo"), []
    for spec in map(parse, data["args"].values()):
        dtype = torch.int64 if spec.name in data.get("whole", {}) else torch.float64
        shards.append(torch.empty(spec.local_shape(data["sizes"], mesh), dtype=dtype, device="meta"))
    with peak_memory() as memory:
        fn(*shards, mesh)
    return memory.peak


def on_rank(mesh, exercise: Exercise, text: str) -> tuple[list[str], int]:
    """Run an answer on one rank.

    Returns the mistake in each result ("" if it is right), and the bytes that the rank sends.
    """
    data = exercise.data
    here, names = dict[str, Any](), dict[str, Any](__name__=exercise.name)
    exec(compile(exercise.dense, "dense", "exec"), here)
    exec(compile(text, f"{exercise.name}.py", "exec"), names)
    rng = torch.Generator().manual_seed(0)
    specs = [parse(of) for of in data["args"].values()]
    terms = [_terms(spec, data, rng, mesh) for spec in specs]
    whole = [x.sum(0) for x in terms]
    own = [x[block_index(spec.unreduced, mesh.coord, mesh)] for x, spec in zip(terms, specs, strict=True)]
    shards = [_part(x, spec, data["sizes"], mesh) for x, spec in zip(own, specs, strict=True)]
    with trace() as log:
        results = names[data["fn"]](*shards, mesh)
    results, wanted = _tuple(results), _tuple(here["dense"](*whole))
    if len(results) != len(wanted):
        return [f"{len(results)} results where {len(wanted)} are asked for"] * len(wanted), log.wire_bytes
    slips: dict[str, Any] = {"torch": torch}
    exec(compile(exercise.slips, "slips", "exec"), slips)
    known = {fn.__doc__: _tuple(fn(*whole, mesh.rank)) for fn in slips.values() if hasattr(fn, "__code__")}
    wrong = []
    for i, (got, want, of) in enumerate(zip(results, wanted, data["returns"].values(), strict=True)):
        hints = {hint: values[i] for hint, values in known.items()}
        wrong.append(_wrong(got, want, hints, parse(of), data["sizes"], mesh))
    return wrong, log.wire_bytes


def _tuple(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def _terms(spec, data, rng, mesh) -> torch.Tensor:
    """Return the whole array's terms, one for each block along the axes that it is unreduced over."""
    count = math.prod(mesh.sizes[axis] for axis in spec.unreduced)
    shape = (count, *spec.global_shape(data["sizes"]))
    if below := data.get("whole", {}).get(spec.name):
        return torch.randint(below, shape, generator=rng)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def _part(x, spec, sizes, mesh, coord=None):
    return x[spec.slices(sizes, mesh, coord or mesh.coord)].clone()


def _wrong(got, whole, hints, spec, sizes, mesh) -> str:
    """Return the mistake in a rank's result, in words; `hints` is {hint: the result of a known slip}."""
    want = _part(whole, spec, sizes, mesh)
    if not isinstance(got, torch.Tensor):
        return "is None: does the function return it?" if got is None else f"is {type(got).__name__}, and no array"
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, where {spec} is {tuple(want.shape)} here"
    if torch.isnan(got).any():
        return "has NaN in it"
    if torch.allclose(got, want, rtol=NEAR, atol=NEAR * float(want.abs().max())):
        return ""
    known = {hint: _part(value, spec, sizes, mesh) for hint, value in hints.items() if value is not None}
    for hint, value in known.items():
        if torch.allclose(got, value):
            return f"differs: {hint}"
    if not got.any():
        return "is zero"
    if ratio := _multiple(got, want):
        return f"is {ratio:.4g} times what it should be"
    for rank in range(mesh.size()):
        if torch.allclose(got, _part(whole, spec, sizes, mesh, mesh.coord_of(rank))):
            return f"is the block that rank {rank} should have"
    for hint, value in known.items():
        if _multiple(got, value):
            return f"differs: {hint}"
    off = float((got - want).abs().max() / want.abs().max())
    return f"differs by {off:.2g} of its largest element"


def _multiple(got: torch.Tensor, of: torch.Tensor) -> float:
    """Return r if `got` is r times an array, 0.0 if it is no multiple of it."""
    ratio = float((got * of).sum() / (of * of).sum())
    return ratio if torch.allclose(got, ratio * of, rtol=1e-6, atol=1e-6 * float(of.abs().max())) else 0.0


def _hint(exercise: Exercise, name: str, wrong: list[str]) -> str:
    """Return the mistake that most ranks make in a result, and the ranks, in words, with the hint of a known slip."""
    word = max(filter(None, wrong), key=wrong.count)
    right = [str(rank) for rank, other in enumerate(wrong) if not other]
    where = f" on rank {wrong.index(word)}; ranks {', '.join(right)} are right" if right else " on every rank"
    what, colon, hint = word.partition(": ")
    for slip in exercise.data.get("slips", ()):
        if slip["name"] == name and slip["value"] in word:
            colon, hint = ": ", slip["hint"]
    return f"{name} {what}{where}{colon}{hint}"
