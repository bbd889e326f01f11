"""Tokens as batches: which sequences a step sees follows from the seed and its number alone, never from the mesh.

A corpus is one long run of tokens: bytes of text files, or token ids from .npy files, mapped into memory. It is cut
into sequences of T tokens, each with the next token of every one as its target; sequence i of an epoch is the i-th of a
permutation drawn from (seed, epoch). So a run that resumes, on any mesh, repeats and skips nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

TEXT = (".txt", ".md", ".py", ".rst", ".json", ".csv", "")


@dataclass(frozen=True)
class Corpus:
    """`tokens`: integers, perhaps a memory map; `starts`: where each document begins."""

    tokens: numpy.ndarray
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def load(path) -> Corpus:
    """The corpus of a file or a folder of files, sorted by name: *.npy of token ids, or text as bytes.

    ValueError that names the path if there is nothing to read, or if ids and text stand side by side.
    """
    path = Path(path)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    ids = [p for p in files if p.suffix == ".npy"]
    files = ids or [p for p in files if p.suffix in TEXT or p == path]
    if not files or not path.exists():
        raise ValueError(f"{path}: no text and no .npy of tokens to read")
    try:
        parts = [numpy.load(p, mmap_mode="r") if ids else numpy.fromfile(p, numpy.uint8) for p in files]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if wrong := [p for p, part in zip(files, parts, strict=True) if part.ndim != 1 or part.dtype.kind not in "iu"]:
        raise ValueError(f"{wrong[0]}: not a row of token ids")
    starts = numpy.cumsum([0, *(len(part) for part in parts)]).tolist()
    whole = parts[0] if len(parts) == 1 else numpy.concatenate(parts)
    return Corpus(whole, tuple(starts[:-1]))


@dataclass(frozen=True)
class Batches:
    """Batches of `batch` sequences of `length` tokens of the part of a corpus from `first` to `last`."""

    corpus: Corpus
    batch: int
    length: int
    seed: int
    first: int
    last: int

    def __post_init__(self):
        if self.sequences < 1:
            raise ValueError(
                f"{self.last - self.first:,} tokens hold no sequence of {self.length} and its next token\n"
                "  fix: give more text, or a shorter --seq"
            )

    @property
    def sequences(self) -> int:
        """The sequences of one epoch."""
        return (self.last - self.first - 1) // self.length

    def chosen(self, seen: int) -> list[int]:
        """Which sequences come after so many, by their number."""
        found = []
        for at in range(seen, seen + self.batch):
            epoch, place = divmod(at, self.sequences)
            found.append(int(_order(self.seed, epoch, self.sequences)[place]))
        return found

    def at(self, seen: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, targets, segments) int64[batch, length] of the batch that comes after so many sequences."""
        return self.rows(self.chosen(seen))

    def rows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The sequences of these numbers; segments number the documents."""
        starts = numpy.array([self.first + i * self.length for i in numbers])
        places = starts[:, None] + numpy.arange(self.length + 1)
        rows = torch.from_numpy(self.corpus.tokens[places].astype(numpy.int64))
        documents = numpy.searchsorted(self.corpus.starts, places[:, :-1], side="right")
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.from_numpy(documents.astype(numpy.int64))


_orders: dict[tuple[int, int, int], Tensor] = {}


def _order(seed: int, epoch: int, count: int) -> Tensor:
    """The permutation of an epoch's sequences; the latest two are kept."""
    key = seed, epoch, count
    if key not in _orders:
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        while len(_orders) > 1:
            _orders.pop(next(iter(_orders)))
        _orders[key] = torch.randperm(count, generator=generator)
    return _orders[key]


def split(corpus: Corpus, batch: int, length: int, seed: int, valid: float = 0.05) -> tuple[Batches, Batches]:
    """(training, validation): the end of the corpus is held out, with no token in both."""
    at = len(corpus) - max(length + 1, round(len(corpus) * valid))
    return (
        Batches(corpus, batch, length, seed, 0, at),
        Batches(corpus, batch, length, seed, at, len(corpus)),
    )
