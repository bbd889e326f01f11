"""The judge: the types of a program, found by running it on an abstract mesh.

    report = judge(forward, {"W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]"}, "In[B_X, D]", mesh=mesh)
    with judged() as report: ...                     unchanged code, on an AbstractMesh
    report.findings, report.unjudged, report.result

Each text among the arguments becomes a shard of that type, on the meta device. A typed line is judged at its call, also
in the derivatives of torch.func and autograd. All other ops are judged by the table that explicit mode reads. An array
made without typed arrays (torch.randn, a batch of tokens) gets the type that its first line declares.
`report.unjudged` names the rest: an op that is not in the table, a number that is read and may decide what follows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from scaling.check.findings import Judgement, fault_text, place_of_call, place_of_error, place_of_function
from scaling.check.mode import Judge
from scaling.check.typed import check_abstract
from scaling.collectives.linear import watcher
from scaling.spec import ShardingError, Spec, mesh_sizes, parse


@contextmanager
def judged(mesh: Any = None, values: "dict[str, Tensor] | None" = None) -> Iterator[Judgement]:
    """Judge the code that runs inside the block.

    Args:
        mesh: an AbstractMesh, or None if the code makes its own.
        values: the types of tensors that it begins with, {"In[B_X, D]": In, ...}.

    Raises:
        ShardingError: the mesh moves data. A judged program has shapes and types only.
    """
    check_abstract("judged", mesh)
    report = Judgement()
    judge = Judge(report, mesh_sizes(mesh) if mesh is not None else None)
    for text, x in (values or {}).items():
        judge.declare(x, parse(text), place_of_call())
    with watching(judge):
        yield report


@contextmanager
def watching(judge: Judge) -> Iterator[None]:
    """Let a judge watch typed calls and torch's ops inside the block, and report at its end."""
    token = watcher.set(judge)
    try:
        with judge:
            yield
    except ShardingError as error:
        judge.find("illegal-line", str(error), "", place_of_error(error), place_of_error(error, judge.files))
    finally:
        watcher.reset(token)
        judge.end()


def shard_of(spec: Spec, mesh: Any, sizes: dict[str, int]) -> Tensor:
    """Return a float32 shard of this type. `sizes` has each dim's size; a dim that it lacks gets a new one."""
    for dim in spec.dim_names:
        sizes.setdefault(dim, int(dim) if dim.isdigit() else prod(mesh_sizes(mesh).values()) * (len(sizes) + 5))
    return torch.empty(spec.local_shape(sizes, mesh), device="meta")


def judge(fn: Callable, *args: Any, mesh: Any, returns: Any = None) -> Judgement:
    """Judge `fn(*args)` on an abstract mesh.

    Args:
        fn: the function.
        args: its arguments. A text in them, also in dicts, lists and tuples, becomes a float32 shard of that type; all
            dims differ in size.
        mesh: the mesh.
        returns: the types of the result.
    """
    check_abstract("judge", mesh)
    report, sizes = Judgement(), {}
    judge = Judge(report, mesh_sizes(mesh))

    def shard(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        x = shard_of(parse(text), mesh, sizes)
        judge.declare(x, parse(text), "the arguments")
        return x

    tree: Any = args
    for arg in args:
        judge.params |= {str(key) for key in arg} if isinstance(arg, dict) else set()
    given = optree.tree_map(shard, tree, none_is_leaf=True)
    result: Any = None
    place = place_of_function(fn)
    with watching(judge):
        result = fn(*given)
        report.result = optree.tree_map(
            lambda x: judge.held(x).type if isinstance(x, Tensor) else None, result, none_is_leaf=True
        )
        if returns is not None:
            wanted, structure = optree.tree_flatten(returns, none_is_leaf=True)
            found, ours = optree.tree_flatten(result, none_is_leaf=True)
            if structure != ours:
                judge.find(
                    "result",
                    fault_text(f"it returns {ours}, not {structure}", "result", "return what it says"),
                    "",
                    place,
                )
            else:
                for x, text in [each for each in zip(found, wanted, strict=True) if isinstance(each[0], Tensor)]:
                    judge.compare(judge.held(judge.meta(x)), parse(text), f"result {text}", "", place)
    return report
