"""The checked mode: the ranks of a group compare their next call before they make it.

Ranks that call different collectives hang, abort, or get wrong numbers without an error, depending on the backend. They
meet (`scaling.mesh.meeting`) in shared memory, or by messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling.collectives.op import LOCAL
from scaling.common.torch_private import process_group
from scaling.mesh.meeting import Intent, agree, intent_on
from scaling.spec import Spec, refuse

SHOWN = 160  # letters of an argument; a longer one is shown as its beginning and a digest


def compared(op) -> bool:
    """Return whether the ranks compare their calls of an op first."""
    return op.checked and op.size > 1 and op.kind not in LOCAL and not torch.compiler.is_compiling()


@lru_cache(maxsize=4096)
def call_of(op, shape: torch.Size, dtype: torch.dtype, how: str) -> Intent:
    """Return the Intent by which a rank announces an op; it leaves out the number of ragged rows."""
    call = f"{op.kind} {op.line}"
    if op.kind == "Ragged":
        shape = torch.Size((*shape[: op.dim], 0, *shape[op.dim + 1 :]))
    if op.kind == "CollectivePermute":
        call += f" by {op.pairs}"
    if op.root is not None:
        call += f" with root {op.root}"
    if op.by != "sum":
        call += f" by {op.by}"
    return intent_on(call, shape, dtype, how)


def compare_counts(op, device) -> None:
    """Raise a ShardingError on every rank unless each sends the counts that the others expect; all must have met."""
    mine = torch.tensor([op.sends, op.receives], device=device)
    counts = [torch.empty_like(mine) for _ in range(op.size)]
    dist.all_gather(counts, mine, group=process_group(op.group))
    table = torch.stack([counts[op.member(block)] for block in range(op.size)])
    if not torch.equal(table[:, 0].T, table[:, 1]):
        what = f"the ranks send {table[:, 0].tolist()}, but expect {table[:, 1].tolist()}"
        rule = "what rank i sends to j is what j receives from i"
        refuse(op.line, what, rule, "exchange the counts by an AllToAll first")


# Calls above the collectives: all ranks must give the same arguments, though no message shows them


def alike(mesh, call: str, along: Sequence[str] | None = None, **arguments: Any) -> None:
    """Raise a ShardingError on every rank of a checked mesh unless all make this call with these arguments.

    Args:
        mesh: the mesh whose ranks make the call.
        call: the call's name.
        along: the axes whose ranks make it together; all by default. A layer gives its own axes, since stages call it
            in turn.
        **arguments: the arguments to compare: for a tensor its shape and dtype, for a tree the shapes and dtypes of its
            leaves, for a config the fields that are not default, and for a function only that it is one. Values that
            would have to be sent are not compared.
    """
    if torch.compiler.is_compiling() or not mesh.checked:
        return
    axes = tuple(axis for axis in mesh.sizes if along is None or axis in along)
    if mesh.size(axes) > 1:
        agree(mesh.group(axes), spoken(call, arguments))


def spoken(call: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the text that `alike` compares."""
    return f"{call} with {', '.join(f'{name}={_shown(value)}' for name, value in arguments.items())}"


def _shown(value: Any) -> str:
    text = _text(value)
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 30]}... (digest {digest})"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Spec):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_changed(value))})"
    return "a function" if callable(value) and not isinstance(value, type) else repr(value)


def _changed(value: Any) -> Iterator[str]:
    for field in fields(value):
        if (given := getattr(value, field.name)) != field.default:
            yield f"{field.name}={_text(given)}"
