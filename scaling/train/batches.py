"""Cut a corpus into batches of token sequences, in an order that depends on the seed and never on the mesh.

A corpus is cut into sequences of T tokens, or its documents are packed into them (`scaling.train.packing`) if some of
its tokens do not count. Each token's target is the token that follows it. The i-th sequence of an epoch is the i-th of
a permutation that (seed, epoch) choose, so a run that resumes on any mesh repeats and skips nothing. The permutation is
not stored; its values are computed for the sequences of a batch. A mixture takes sequences from several corpora by
weight: every 1,000 sequences hold an exact number from each.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from scaling.train.corpus import Corpus, open_corpus
from scaling.train.origin import tokenizer_in, weighted_paths
from scaling.train.packing import Packing, pack
from scaling.train.settings import Settings

IGNORED = -100  # a target that does not count
HEAD = 64  # tokens whose digest identifies held-out text in a later run
ROUND = 1000  # sequences in a mixture's round, within which each source has its exact share
ORDER, DRAWN = "feistel", "randperm"  # how an epoch's order is made; earlier versions drew it, and held it
PASSES = 8  # rounds of the Feistel network
Batch = tuple[Tensor, Tensor, Tensor]  # tokens, targets, segments, int64[batch, length]; segments number the documents


@dataclass(frozen=True)
class Batches:
    """Batches of sequences from one range of a corpus.

    Attributes:
        corpus: The tokens.
        batch: The sequences in a batch.
        length: The tokens in a sequence.
        seed: The seed of the order.
        first: The first token of the range.
        last: The end of the range, exclusive.
        without: The (first, last) ranges of text that no sequence may touch.
        order: How the order of an epoch is made: `ORDER`, or `DRAWN` as in runs of earlier versions.
        packing: The pieces of documents in each sequence, or None if the corpus is cut into sequences.
    """

    corpus: Corpus
    batch: int
    length: int
    seed: int
    first: int
    last: int
    without: tuple[tuple[int, int], ...] = ()
    order: str = ORDER
    packing: Packing | None = None

    def __post_init__(self):
        if self.sequences < 1 and self.packing and self.last > self.first:
            raise ValueError(
                f"no token that counts is among the first {self.length} of its document\n"
                "  fix: give a longer --seq, or shorter prompts"
            )
        if self.sequences < 1:
            raise ValueError(
                f"{max(0, self.last - self.first):,} tokens hold no sequence of {self.length} and its next token\n"
                "  fix: give more text, or a shorter --seq"
            )

    @cached_property
    def places(self) -> numpy.ndarray | None:
        """int64[n], the indices of one epoch's sequences in the order of the corpus; None if no text is left out."""
        if not self.without:
            return None
        if self.packing:
            return self.packing.without(self.without)
        starts = self.first + self.length * numpy.arange((self.last - self.first - 1) // self.length)
        meets = [(starts < last) & (starts + self.length >= first) for first, last in self.without]
        return numpy.flatnonzero(~numpy.logical_or.reduce(meets))

    @property
    def sequences(self) -> int:
        """The number of sequences in one epoch."""
        if self.places is not None:
            return len(self.places)
        return len(self.packing.bounds) - 1 if self.packing else (self.last - self.first - 1) // self.length

    def numbers(self, places: numpy.ndarray) -> numpy.ndarray:
        """places[n] in the endless order of epochs -> int64[n], the index of the sequence at each place."""
        epochs, at = numpy.divmod(places, self.sequences)
        found = numpy.empty_like(at)
        for epoch in {*epochs.tolist()}:
            here = epochs == epoch
            if self.order == DRAWN:
                found[here] = epoch_order(self.seed, epoch, self.sequences).numpy()[at[here]]
            else:
                found[here] = permuted(at[here], self.seed, epoch, self.sequences)
        return found if self.places is None else self.places[found]

    def rows(self, numbers: "Sequence[int] | numpy.ndarray") -> Batch:
        """Return the sequences with these indices [n]: tokens, targets, segments [n, length].

        A target does not count if the corpus excludes it, or if it belongs to another document than its token.
        Attention hides documents from each other, so the first token of a document cannot be predicted. The unused end
        of a packed sequence is one more document, and none of its tokens count.
        """
        if self.packing:
            return self._packed_rows(self.packing, numbers)
        starts = self.first + self.length * numpy.asarray(numbers, numpy.int64)
        tokens, targets = (numpy.empty((len(starts), self.length), numpy.int64) for _ in range(2))
        for row, start in enumerate(starts.tolist()):
            ids, counted = self.corpus.between(start, start + self.length + 1)
            tokens[row], targets[row] = ids[:-1], ids[1:]
            if counted is not None:
                targets[row, ~counted[1:]] = IGNORED
        documents = self._documents(starts[:, None] + numpy.arange(self.length + 1))
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORED
        return torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(documents[:, :-1])

    def several_documents(self, numbers: numpy.ndarray) -> bool:
        """Return whether one of the sequences with these indices [n] has tokens of several documents.

        The unused end of a packed sequence does not count, because no token before it sees it.
        """
        if self.packing:
            return bool((self.packing.bounds[numbers + 1] - self.packing.bounds[numbers] > 1).any())
        starts = self.first + self.length * numbers
        return bool((self._documents(starts) != self._documents(starts + self.length - 1)).any())

    def _packed_rows(self, packing: Packing, numbers: "Sequence[int] | numpy.ndarray") -> Batch:
        shape = len(numbers), self.length
        tokens, targets = numpy.zeros(shape, numpy.int64), numpy.full(shape, IGNORED)
        segments = numpy.full(shape, len(self.corpus.starts) + 1)
        for row, number in enumerate(numbers):
            place = 0
            for start, size in packing.row(int(number)):
                ids, counted = self.corpus.between(start, start + size + 1)
                part = row, slice(place, place + size)
                tokens[part], targets[part] = ids[:-1], ids[1:]
                if counted is not None:
                    targets[part][~counted[1:]] = IGNORED
                segments[part], place = self._documents(numpy.array(start)), place + size
        return torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(segments)

    def _documents(self, positions: numpy.ndarray) -> numpy.ndarray:
        """Return the number of the document, from 1, that the token at each position belongs to."""
        return numpy.searchsorted(self.corpus.starts, positions, side="right")


@dataclass(frozen=True)
class Mixture:
    """Batches of sequences from one or several sources, in proportion to their weights."""

    sources: tuple[Batches, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        if (least := min(self.weights)) * ROUND < (total := sum(self.weights)):
            raise ValueError(
                f"--data: the weight {least:g} of {total:g} is less than 1 in {ROUND:,} sequences\n"
                f"  rule: every {ROUND:,} sequences hold a whole number from each source\n"
                "  fix: give it a greater weight, or leave it out"
            )

    @cached_property
    def round_order(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(source[ROUND], before[ROUND]): the sources in a shuffled order, and how often each has come before."""
        total = sum(self.weights)
        exact = [ROUND * w / total for w in self.weights]
        counts = [int(x) for x in exact]
        late = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in late[: ROUND - sum(counts)]:
            counts[i] += 1
        shuffled = epoch_order(self.sources[0].seed, -1, ROUND)
        sources, before = torch.repeat_interleave(torch.tensor(counts))[shuffled].numpy(), numpy.empty(ROUND, int)
        for source, count in enumerate(counts):
            before[sources == source] = numpy.arange(count)
        return sources, before

    def sequence_numbers(self, seen: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return (source[B], index[B]) of the sequences in the batch that follows the first `seen` sequences."""
        turns, before = self.round_order
        rounds, at = numpy.divmod(numpy.arange(seen, seen + self.sources[0].batch), ROUND)
        sources = turns[at]
        places = rounds * numpy.bincount(turns)[sources] + before[at]
        numbers = numpy.empty_like(places)
        for source in {*sources.tolist()}:
            numbers[sources == source] = self.sources[source].numbers(places[sources == source])
        return sources, numbers

    def batch_at(self, seen: int, rows: slice = slice(None)) -> Batch:
        """Return these rows of the batch that follows the first `seen` sequences, reading no others."""
        sources, numbers = (x[rows] for x in self.sequence_numbers(seen))
        tokens, targets, segments = torch.empty(3, len(numbers), self.sources[0].length, dtype=torch.int64)
        for source in {*sources.tolist()}:
            here = torch.from_numpy(sources == source)
            tokens[here], targets[here], segments[here] = self.sources[source].rows(numbers[sources == source])
        return tokens, targets, segments

    def several_documents(self, seen: int) -> bool:
        """Return whether a row of the batch that follows `seen` sequences has tokens of several documents."""
        sources, numbers = self.sequence_numbers(seen)
        return any(self.sources[i].several_documents(numbers[sources == i]) for i in {*sources.tolist()})


def prefetch(source: Mixture, seen: int, batch: int, rows: slice = slice(None)) -> Iterator[tuple[Batch, bool]]:
    """Yield these rows of the batches that follow the first `seen` sequences, while a thread prefetches the next.

    Each comes with whether a row of the whole batch has tokens of several documents, which is equal on all ranks.
    """

    def read(seen: int) -> tuple[Batch, bool]:
        return source.batch_at(seen, rows), source.several_documents(seen)

    with ThreadPoolExecutor(1, "batches") as reader:
        coming = reader.submit(read, seen)
        while True:
            here, seen = coming.result(), seen + batch
            coming = reader.submit(read, seen)
            yield here


def hold_out(
    corpus: Corpus, batch: int, length: int, seed: int, valid: float, whole: bool = False
) -> tuple[Batches, Batches]:
    """Split a corpus into (training, validation) batches that share no token.

    The share `valid` of the tokens, at the corpus's end and at least one sequence, is held out.

    `whole`: whether documents are packed whole where some tokens of the corpus do not count. The split is then between
    two documents, and more of them are held out if those at the end hold no target that counts.
    """
    at = len(corpus) - max(length + 1, round(len(corpus) * valid))
    packed = whole and bool(corpus.counted)
    if packed and len(corpus.starts) > 1:
        at = first_of_document(corpus, at)
        if not len(pack(corpus, at, len(corpus), length).starts):
            at = first_of_document(corpus, pack(corpus, 0, at, length).starts.max(initial=0))
    train, held = (
        Batches(corpus, batch, length, seed, *ends, packing=pack(corpus, *ends, length) if packed else None)
        for ends in ((0, at), (at, len(corpus)))
    )
    return train, held


def first_of_document(corpus: Corpus, position: int) -> int:
    """Return the first position of the document at a position, but never of the corpus's first document."""
    return int(corpus.starts[max(1, numpy.searchsorted(corpus.starts, position, side="right") - 1)])


def leave_out(
    train: Mixture, valid: Sequence[Batches], before: Sequence[Sequence[Any]]
) -> tuple[Mixture, list[list[Any]], int]:
    """Exclude from training all text that the run holds out now or held out earlier.

    Text that was held out earlier is recognized only where the data still hold it at the same position.

    Args:
        train: The batches to train on.
        valid: The held-out end of each source.
        before: The earlier held-out ranges, as this function returned them, perhaps for other data.

    Returns:
        (the batches without the sequences that touch text held out earlier, the held-out ranges from now on, the number
        of earlier ranges that were not found). A range is [its first token, its end, a digest of its first tokens].
    """
    out, there = [], set()
    held = [_digest_of_range(ends.corpus, ends.first, ends.last) for ends in valid]
    for source in train.sources:
        still = [each for each in map(list, before) if _digest_of_range(source.corpus, each[0], each[1]) == each]
        there |= {tuple(each) for each in still}
        held += [each for each in still if each not in held]
        out.append(replace(source, without=tuple((first, last) for first, last, _ in still if first < source.last)))
    missing = len({*map(tuple, before)} - there)
    return replace(train, sources=tuple(out)), held, missing


def _digest_of_range(corpus: Corpus, first: int, last: int) -> list[Any]:
    """Return [first, last, a digest of up to HEAD tokens from `first` on], which identifies a range of the corpus."""
    ids, _ = corpus.between(first, min(first + HEAD, last)) if last <= len(corpus) else (numpy.empty(0), None)
    return [first, last, hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()]


def open_batches(settings: Settings, whole: bool = True) -> tuple[Mixture, tuple[Batches, ...]]:
    """Open a run's data and return (the batches to train on, the held-out end of each corpus).

    `whole` is as in `hold_out`.

    Raises:
        ValueError: A corpus has tokens outside the model's vocabulary.
    """
    by, parts, weights = tokenizer_in(settings), [], []
    for path, weight in weighted_paths(settings.data):
        read = open_corpus(path, by, settings.eos_id, not settings.no_template, not settings.no_bos)
        if read.top >= (V := settings.model.V):
            raise ValueError(
                f"{path}: token {read.top} lies outside the vocabulary of {settings.model.name}, 0..{V - 1}\n"
                "  fix: a model with a greater vocabulary, or the tokenizer that belongs to this one (--tokenizer)"
            )
        parts.append(hold_out(read, settings.batch, settings.seq, settings.seed, settings.valid, whole))
        weights.append(weight)
    train, valid = zip(*parts, strict=True)
    return Mixture(train, tuple(weights)), valid


def permuted(places: numpy.ndarray, seed: int, epoch: int, count: int) -> numpy.ndarray:
    """places[n] in 0..count-1 -> int64[n], their images under a permutation of 0..count-1 that (seed, epoch) choose.

    A Feistel network permutes 0..4^k-1, the next power of 4. Where it leads to a number that is not below `count`, it
    is applied again until it does not (cycle walking; Black and Rogaway, CT-RSA 2002), at most 4 times on average.
    """
    half = numpy.uint64(((count - 1).bit_length() + 1) // 2)
    low = (numpy.uint64(1) << half) - numpy.uint64(1)
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * PASSES).digest()
    keys = numpy.frombuffer(digest, "<u8")
    found, walking = places.astype(numpy.uint64), numpy.arange(len(places))
    while len(walking):
        left, right = found[walking] >> half, found[walking] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        found[walking] = left << half | right
        walking = walking[found[walking] >= count]
    return found.astype(numpy.int64)


def _mixed(x: numpy.ndarray) -> numpy.ndarray:
    """Return a hash of each uint64: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ x >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    return x ^ x >> numpy.uint64(31)


@lru_cache(maxsize=16)
def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """Return int64[count], the permutation of an epoch's sequences, drawn from (seed, epoch)."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
