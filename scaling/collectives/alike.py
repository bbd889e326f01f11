"""Calls above the collectives whose arguments all ranks must give alike, though no message shows them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from scaling.collectives.checked import agree
from scaling.spec import Spec

SHOWN = 160  # letters of an argument; of a longer one its beginning and a digest


def alike(mesh, call: str, along: Sequence[str] | None = None, **arguments: Any) -> None:
    """ShardingError on every rank of a checked mesh unless all make this call with these arguments.

    `along`: the axes whose ranks make it together; all by default. A layer gives its own: stages call it in turn.
    Of a tensor, shape and dtype are compared, of a tree those of each leaf, of a config what is not its default, and of
    a function nothing but that it is one: what a rank would have to send is compared nowhere.
    """
    if torch.compiler.is_compiling() or not mesh.checked:
        return
    axes = tuple(axis for axis in mesh.sizes if along is None or axis in along)
    if mesh.size(axes) > 1:
        said = ", ".join(f"{name}={_shown(value)}" for name, value in arguments.items())
        agree(mesh.group(axes), f"{call} with {said}")


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
        if (own := getattr(value, field.name)) != field.default:
            yield f"{field.name}={_text(own)}"
