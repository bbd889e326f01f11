"""Read real text as bytes: the context is k consecutive bytes, and the target is the next byte.

A batch has `batch` rows over the whole mesh: `Tokens[B_X, K]` and `Targets[B_X]`, drawn without replacement in an order
that depends only on (seed, epoch). Device x reads the rows x B/X to (x+1) B/X of it. So every mesh trains on the same
batches in the same order, and devices that differ only along other axes (tensor parallelism) read the same rows.
`torch.utils.data.DistributedSampler` has the same epochs and parts but deals rows out in turn, so with it the batches
would depend on the number of devices.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from scaling import tree
from scaling.spec import Spec

MAX_BYTES = 4_000_000


def load_text(path: "str | os.PathLike | None" = None, max_bytes: int = MAX_BYTES) -> Tensor:
    """Return the first `max_bytes` of a file as uint8[N].

    Without a path, the text is that of Python's standard library, its top-level *.py files in sorted order.

    Raises:
        ValueError: The file does not exist or is empty.
    """
    if path is not None and not Path(path).is_file():
        raise ValueError(f"no text at {str(path)!r}\n  fix: give a file, or None for Python's standard library")
    files = [Path(path)] if path is not None else sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray()
    for file in files:
        with file.open("rb") as opened:
            text += opened.read(max_bytes - len(text))
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(
            f"{str(path) if path else 'the standard library'!r} holds no text\n  fix: give a file that holds some"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def split(tokens: Tensor, valid_fraction: float = 0.1) -> tuple[Tensor, Tensor]:
    """Split a text into (train, valid), where valid is its end, so that no window of one overlaps the other."""
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must lie between 0 and 1; got {valid_fraction}\n  fix: 0.1 is the default")
    end = len(tokens) - round(len(tokens) * valid_fraction)
    return tokens[:end], tokens[end:]


def order0_entropy(tokens: Tensor) -> float:
    """Return the bits per byte of the best guess that ignores the context; a model should be well below it."""
    share = torch.bincount(tokens.long()).double() / len(tokens)
    return -torch.special.xlogy(share, share).sum().item() / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()


def batches(
    tokens: Tensor, k: int, batch: int, mesh=None, axes: Sequence[str] = ("X",), seed: int = 0, epoch: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an iterator over one epoch of this device's (Tokens[B_X, K], Targets[B_X]), on the device of `tokens`.

    An epoch is a permutation of all windows of k + 1 bytes, cut into batches of `batch` rows; rows of an incomplete
    batch are dropped.

    Args:
        tokens: The text, uint8[N].
        k: The bytes of context.
        batch: B, the rows over the whole mesh.
        mesh: The mesh; without one, the batches have all rows.
        axes: The mesh axes that B is split over.
        seed: The seed of the order.
        epoch: The epoch of the order.

    Raises:
        ShardingError: B does not divide over the axes, or the mesh lacks one of them.
        ValueError: The text is too short.
    """
    if k < 1 or len(tokens) <= k:
        raise ValueError(
            f"a text of {len(tokens)} bytes has no context of k={k} bytes and a next byte\n"
            "  fix: choose a smaller k or a longer text"
        )
    windows = tokens.unfold(0, k + 1, 1)
    if not 1 <= batch <= (rows := len(windows)):
        raise ValueError(
            f"a batch of {batch} rows cannot be drawn from {rows}\n  fix: give a smaller batch or a longer text"
        )
    dims = (("B", tuple(axes)),)
    types = Spec("Tokens", (*dims, ("K", ()))), Spec("Targets", dims)
    part = slice(0, batch) if mesh is None else types[1].slices({"B": batch}, mesh, mesh.coord)[0]
    key = sha256(f"{seed} {epoch}".encode()).digest()  # keeps pairs apart that have the same sum
    rng = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    order = torch.randperm(rows, generator=rng, dtype=torch.int32)

    def at(first: int) -> tuple[Tensor, Tensor]:
        window = windows[order[first + part.start : first + part.stop].to(tokens.device)].long()
        Tokens, Targets = window[:, :-1], window[:, -1]
        if mesh is None:
            return Tokens, Targets
        return tree.declare(Tokens, types[0], mesh), tree.declare(Targets, types[1], mesh)

    return map(at, range(0, rows - batch + 1, batch))


def endless(
    tokens: Tensor, k: int, batch: int, mesh=None, axes: Sequence[str] = ("X",), seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the `batches` of epoch 0, then of epoch 1, and so on."""
    for epoch in count():
        yield from batches(tokens, k, batch, mesh, axes, seed, epoch)
