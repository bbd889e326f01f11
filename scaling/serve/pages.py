"""The pages of a cache: reference counts, a trie of full pages for prefix hits, LRU eviction. No torch.

A page is free, held (by one request or more) or cached (in the trie, not held, and evicted when needed):

    free + held + cached = total

The trie's nodes are pages, and its edges the `size` tokens of a page: a node's parent holds the tokens before its own.
A request that holds a page holds all its ancestors, so the last holder of a page lets it go no later than its parent.
"""

import itertools
from collections.abc import Sequence
from copy import copy
from typing import Self

ROOT = -1


class Pool:
    """A pool of `total` pages of `size` tokens, which its methods change; the scheduler's pure step works on a `copy`.

    `prefix`: whether full pages stay in the trie for other requests. `windowed`: the pool of the layers with a window,
    if they keep only the pages within it.
    """

    def __init__(self, total: int, size: int, prefix: bool = True, windowed: "WindowPool | None" = None):
        self.total, self.size, self.prefix, self.windowed = total, size, prefix, windowed
        self.free = list(range(total - 1, -1, -1))  # the next one to take is the last
        self.refs: dict[int, int] = {}  # held page -> holders
        self.children: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> page
        self.edges: dict[int, tuple[int, tuple[int, ...]]] = {}  # page in the trie -> (parent, tokens)
        self.unheld: dict[int, None] = {}  # cached pages, the least recently used first, and each before its parent

    def copy(self) -> Self:
        """Return a copy that shares nothing that changes."""
        new = copy(self)
        new.free, new.refs, new.children = self.free[:], self.refs.copy(), self.children.copy()
        new.edges, new.unheld = self.edges.copy(), self.unheld.copy()
        new.windowed = self.windowed and self.windowed.copy()
        return new

    def count(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens need."""
        return -(-tokens // self.size)

    @property
    def held(self) -> int:
        """The number of held pages."""
        return len(self.refs)

    @property
    def cached(self) -> int:
        """The number of cached pages."""
        return len(self.unheld)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix of whole pages, which never covers all the tokens.

        At least one token must be computed for its logits. If a prompt is cached completely, its last page is computed
        again, into a new page, and no shared page is written.
        """
        found, parent = [], ROOT
        for end in range(self.size, len(tokens), self.size):
            page = self.children.get((parent, tuple(tokens[end - self.size : end])))
            if page is None:
                break
            found.append(page)
            parent = page
        return self.windowed.seen_whole(found) if self.windowed else found

    def room(self, besides: Sequence[int] = ()) -> int:
        """Return how many pages, free or cached, can be taken while the pages `besides` stay."""
        return len(self.free) + self.cached - sum(page not in self.refs for page in besides)

    def hold(self, pages: Sequence[int]) -> None:
        """Add one holder to pages that have holders already or are in the trie."""
        for page in pages:
            self.refs[page] = self.refs.get(page, 0) + 1
            self.unheld.pop(page, None)

    def take(self, count: int) -> list[int]:
        """Return pages for one holder, free ones first, then the least recently used; the caller has checked `room`."""
        if count > len(self.free):
            self._evict(count - len(self.free))
        pages = [self.free.pop() for _ in range(count)]
        self.refs.update(dict.fromkeys(pages, 1))
        return pages

    def _evict(self, count: int) -> None:
        """Evict the least recently used pages from the trie."""
        for page in [*itertools.islice(self.unheld, count)]:
            del self.children[self.edges.pop(page)], self.unheld[page]
            self.free.append(page)
            if self.windowed:
                self.windowed.forget(page)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page; a page without holders is cached if it is in the trie, else it is free."""
        for page in reversed(pages):
            self.refs[page] -= 1
            if not self.refs[page]:
                del self.refs[page]
                if page in self.edges:
                    self.unheld[page] = None
                else:
                    self.free.append(page)

    def share(self, pages: Sequence[int], tokens: Sequence[int], first: int) -> tuple[int, ...]:
        """Put pages[first:] into the trie as far as these tokens fill them; return the pages that the request holds.

        If another request has put the same tokens there before, its page replaces this one, which becomes free. So a
        request holds the trie's pages, with all their ancestors.
        """
        if len(tokens) < self.size:
            return tuple(pages)
        new = list(pages)
        for i, start in enumerate(range(0, len(tokens) - self.size + 1, self.size), first):
            parent = new[i - 1] if i else ROOT
            new[i] = self._entered((parent, tuple(tokens[start : start + self.size])), new[i])
        return tuple(new)

    def _entered(self, key: tuple[int, tuple[int, ...]], page: int) -> int:
        """Put a page into the trie; return the page that is there, which an earlier request may have put there."""
        there = self.children.setdefault(key, page)
        if there == page:
            self.edges[page] = key
        else:
            self.hold([there])
            self.release([page])
        return there


class WindowPool(Pool):
    """The pool of layers with a window, whose pages are twins of another pool's: each holds the tokens of its twin.

    A request holds the pages that its next token sees or is written to. In its list of pages, -1 replaces each page
    that it has given back. In the trie the edge of a page is its twin.
    """

    def __init__(self, total: int, size: int, prefix: bool, window: int):
        super().__init__(total, size, prefix)
        self.window = window

    def first(self, tokens: int) -> int:
        """Return the index of the first page that the next token of a row with `tokens` tokens sees."""
        return max(0, tokens - self.window + 1) // self.size

    def seen_whole(self, twins: list[int]) -> list[int]:
        """Return the longest prefix of these pages after which the next token finds all pages of its window here."""
        best = run = 0
        for n, twin in enumerate(twins, 1):
            run = run + 1 if (twin, ()) in self.children else 0
            best = n if run >= n - self.first(n * self.size) else best
        return twins[:best]

    def hit(self, twins: Sequence[int]) -> tuple[int, ...]:
        """Hold the pages that the token after a hit sees, and return the request's list of pages."""
        first = self.first(len(twins) * self.size)
        pages = [self.children[twin, ()] for twin in twins[first:]]
        self.hold(pages)
        return (-1,) * first + tuple(pages)

    def keep(self, pages: Sequence[int], twins: Sequence[int], start: int, tokens: int) -> tuple[int, ...]:
        """Put the full pages of pages[start:] into the trie, and give back the pages that fell out of the window."""
        new = list(pages)
        for i in range(start, tokens // self.size if self.prefix else 0):
            new[i] = self._entered((twins[i], ()), new[i]) if new[i] >= 0 else -1
        first = self.first(tokens)
        self.give_back(new[:first])
        return (-1,) * first + tuple(new[first:])

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one holder of each of a request's pages."""
        self.release([page for page in pages if page >= 0])

    def forget(self, twin: int) -> None:
        """Remove the page of this twin from the trie, since the other pool has evicted the twin."""
        if (page := self.children.pop((twin, ()), None)) is not None:
            del self.edges[page]
            if page not in self.refs:
                del self.unheld[page]
                self.free.append(page)
