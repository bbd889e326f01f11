"""Edits of the strategies' own lines: the mistakes that silently give wrong numbers elsewhere are ShardingErrors here.

Each edit changes one line of a strategy's source text. The edited module then runs on an `AbstractMesh`, where nothing
can be sent: the error comes before any communication. (The fourth mistake, a dropped ReduceScatter, leaves only legal
lines: `scaling.check` sees that they do not follow from each other.)
"""

import ast
import inspect
import re
from types import ModuleType

import pytest
import torch

from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, parse, parse_line
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel

STRATEGIES = {s.__name__.split(".")[-1]: s for s in (data_parallel, fsdp, tensor_parallel, fsdp_tp)}
MESH = AbstractMesh({"X": 4, "Y": 2})
SIZES = {"L": 3, "B": 16, "D": 64, "F": 128}


def lines_of(strategy) -> list[str]:
    """The typed lines of a strategy's source, in order."""
    found = ast.walk(ast.parse(inspect.getsource(strategy)))
    texts = [node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return sorted({text for text in texts if re.fullmatch(r"\w+\[.*\].* -> \w+\[.*[\]}]", text) and "\n" not in text})


def edited(strategy, old: str, new: str) -> ModuleType:
    source = inspect.getsource(strategy)
    assert f'"{old}"' in source
    module = ModuleType("edited")
    exec(compile(source.replace(f'"{old}"', f'"{new}"'), "edited", "exec"), module.__dict__)
    return module


def choices(fn, option: str, *values) -> list[dict]:
    """An option of fn not given, and given with each value if fn has it."""
    return [{}, *({option: value} for value in values if option in inspect.signature(fn).parameters)]


def run(strategy) -> None:
    """Forward and backward of a strategy on the abstract mesh, with all their options."""

    def meta(type_: str) -> torch.Tensor:
        return torch.empty(parse(type_).local_shape(SIZES, MESH), device="meta")

    params = {name: meta(strategy.SPECS[name].replace("[", "[L, ")) for name in ("W_in", "W_out")}
    keeps = choices(strategy.forward, "keep", False)
    buckets = choices(strategy.backward, "bucket_bytes", 4 * 4 * SIZES["D"] * SIZES["F"], 2**30)  # two layers, and all
    for keep in keeps:
        for bucket in buckets:
            _, saved = strategy.forward(params, meta(strategy.SPECS["In"]), MESH, **keep)
            strategy.backward(meta(strategy.SPECS["Out"]), saved, params, MESH, **bucket)


def unreduced_forgotten(strategy):
    """`{U_X}` left out of the result of a product, or of the operand of a reduction."""
    for line in lines_of(strategy):
        if "{U_" in line:
            yield line, re.sub(r" \{U_\w+\}", "", line), "rule: "


def gathered_over_the_wrong_axis(strategy):
    """`W[D_X, F_Y] -> W[D, F_Y]` made `-> W[D_X, F]`; where the type has no other axis, `W[D_Y, F] -> W[D, F]`.

    The line alone is legal: the shards that come of it do not meet those of the other operand. (On a mesh whose axes
    have one size they would: such a line is left to `scaling.check`.)
    """
    for line in lines_of(strategy):
        parsed = parse_line(line)
        before, after = parsed.operands[0], parsed.result
        if len(parsed.operands) == 1 and len(after.axes) < len(before.axes):
            kept = [axis for axis in before.axes if axis in after.axes]
            gone = [axis for axis in before.axes if axis not in after.axes]
            if kept:
                wrong = before
                for dim, axes in before.dims:
                    wrong = wrong.with_axes(dim, [axis for axis in axes if axis not in kept])
                yield line, f"{before} -> {wrong}", "they differ in the size of dim"
            else:
                other = {"X": "Y", "Y": "X"}[gone[0]]
                yield line, line.replace(f"_{gone[0]}", f"_{other}"), "they differ in the size of dim"


def sharded_against_unsharded(strategy):
    """A contracted dim of one operand typed as split where the other operand's is not, and the other way round."""
    for line in lines_of(strategy):
        parsed = parse_line(line)
        for i, spec in enumerate(parsed.operands if len(parsed.operands) == 2 else ()):
            for dim, axes in spec.dims:
                if dim in parsed.result.dim_names:
                    continue
                free = [axis for axis in "XY" if axis not in spec.axes]
                if axes or free:
                    wrong = list(parsed.operands)
                    wrong[i] = spec.with_axes(dim, () if axes else free[:1])
                    yield line, f"{wrong[0]} * {wrong[1]} -> {parsed.result}", "case 2"


EDITS = [
    pytest.param(name, old, new, words, id=f"{edit.__name__}-{name}-{new}")
    for edit in (unreduced_forgotten, gathered_over_the_wrong_axis, sharded_against_unsharded)
    for name, strategy in STRATEGIES.items()
    for old, new, words in edit(strategy)
]


@pytest.mark.parametrize("name", STRATEGIES)
def test_unedited_lines_run(name):
    strategy = STRATEGIES[name]
    line = lines_of(strategy)[0]
    run(edited(strategy, line, line))


@pytest.mark.parametrize(("name", "old", "new", "words"), EDITS)
def test_an_edited_line_is_refused(name, old, new, words):
    with pytest.raises(ShardingError, match=words):
        run(edited(STRATEGIES[name], old, new))
