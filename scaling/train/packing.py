"""Pack documents whole into rows, for text in which some tokens, such as prompts, do not count in the loss.

Plain text is cut at the end of a row, and goes on in another row that does not see its beginning. An answer that is cut
from its prompt would be trained as an answer to nothing. So each document here is whole in one row, best fit first, and
the rest of a row is filled with tokens that do not count. A document that is longer than a row is cut at its end,
and the rest is left out; only a document all of whose tokens count goes on in other rows.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy

from scaling.train.corpus import Corpus


@dataclass(frozen=True)
class Packing:
    """Rows of pieces of documents. A piece of n tokens has n targets: the token after each.

    Attributes:
        starts: int64[pieces], the position of each piece's first token in the corpus, row by row.
        sizes: int64[pieces], the number of its tokens.
        bounds: int64[rows + 1], where the pieces of each row begin.
        lost: The number of targets that count and are in no row.
    """

    starts: numpy.ndarray
    sizes: numpy.ndarray
    bounds: numpy.ndarray
    lost: int

    def row(self, number: int) -> list[tuple[int, int]]:
        """Return (start, size) of each piece of a row, in the order of the corpus."""
        pieces = slice(self.bounds[number], self.bounds[number + 1])
        return list(zip(self.starts[pieces].tolist(), self.sizes[pieces].tolist(), strict=True))

    def without(self, ranges: tuple[tuple[int, int], ...]) -> numpy.ndarray:
        """Return int64[n], the rows that touch none of the (first, last) ranges of the corpus."""
        touched = numpy.zeros(len(self.starts), bool)
        for first, last in ranges:
            touched |= (self.starts < last) & (self.starts + self.sizes >= first)
        return numpy.flatnonzero(~numpy.logical_or.reduceat(touched, self.bounds[:-1]))


def pack(corpus: Corpus, first: int, last: int, length: int) -> Packing:
    """Pack the documents from position `first` to `last` of a corpus into rows of `length` tokens.

    A document that lies in this range only in part counts as longer than a row. Pieces without a target that counts
    are left out.
    """
    ends = numpy.append(corpus.starts[1:], len(corpus))
    begin, end = numpy.maximum(corpus.starts, first), numpy.minimum(ends, last)
    pieces = numpy.maximum(0, -(-(end - begin - 1) // length))
    document = numpy.repeat(numpy.arange(len(begin)), pieces)
    number = numpy.arange(len(document)) - numpy.repeat(pieces.cumsum() - pieces, pieces)
    starts = begin[document] + number * length
    sizes = numpy.minimum(length, end[document] - 1 - starts)
    counted = _counted(corpus, starts + 1, starts + sizes + 1)
    all_count = _counted(corpus, corpus.starts, ends) == ends - corpus.starts
    seen = (starts == corpus.starts[document]) | all_count[document]
    kept, lost = seen & (counted > 0), int(counted[~seen].sum())
    starts, sizes = starts[kept], sizes[kept]
    rows = best_fit(sizes, length)
    order = numpy.lexsort((starts, rows))
    bounds = numpy.searchsorted(rows[order], numpy.arange(rows.max(initial=-1) + 2))
    return Packing(starts[order], sizes[order], bounds, lost)


def best_fit(sizes: numpy.ndarray, length: int) -> numpy.ndarray:
    """Return int64[n], the row of each piece of these sizes: the longest first, each into the fullest row with room."""
    rows, count = numpy.empty(len(sizes), numpy.int64), 0
    rooms: list[int] = []  # the numbers of unused tokens in rows, sorted, each once
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    for piece in numpy.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if (place := bisect_left(rooms, size)) < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        else:
            room, row, count = length, count, count + 1
        rows[piece] = row
        if left := room - size:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
    return rows


def _counted(corpus: Corpus, first: numpy.ndarray, last: numpy.ndarray) -> numpy.ndarray:
    """Return int64[n], the number of tokens that count from each position in `first` to that in `last`."""
    edges = numpy.unique(numpy.concatenate([[0], first, last]))
    edges = edges[edges < len(corpus)]
    between = numpy.add.reduceat(numpy.concatenate(corpus.counted), edges, dtype=numpy.int64)
    before = numpy.concatenate([[0], between.cumsum()])
    return before[numpy.searchsorted(edges, last)] - before[numpy.searchsorted(edges, first)]
