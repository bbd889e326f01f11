"""Which page of a cache holds what: reference counts, a trie of full pages for prefix hits, LRU eviction. No torch.

A page is free, held (by one request or more) or cached (in the trie, held by nobody, to be evicted when there is need):
    free + held + cached = total
The trie's nodes are pages, its edges the `size` tokens of a page: a node's parent holds the tokens before its own.
A request that holds a page holds all its ancestors, so that what nobody holds can always be evicted from the leaves up.
"""

from collections.abc import Sequence
from copy import copy

ROOT = -1


class Pool:
    """`total` pages of `size` tokens. The methods change it; `copy` is what the scheduler's pure step starts from.

    `prefix`: whether full pages stay in the trie for others. Ticks are the scheduler's steps: a page's last use.
    """

    def __init__(self, total: int, size: int, prefix: bool = True):
        self.total, self.size, self.prefix = total, size, prefix
        self.free = list(range(total - 1, -1, -1))  # the next to be taken stands last
        self.refs: dict[int, int] = {}  # held page -> holders
        self.children: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> page
        self.edges: dict[int, tuple[int, tuple[int, ...], int]] = {}  # page in the trie -> (parent, tokens, depth)
        self.used: dict[int, int] = {}  # page in the trie -> tick of its last use

    def copy(self) -> "Pool":
        new = copy(self)
        new.free, new.refs, new.children = self.free[:], self.refs.copy(), self.children.copy()
        new.edges, new.used = self.edges.copy(), self.used.copy()
        return new

    def count(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.size)

    @property
    def held(self) -> int:
        return len(self.refs)

    @property
    def cached(self) -> int:
        return sum(page not in self.refs for page in self.edges)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest prefix of whole pages that is there, always less than all the tokens.

        At least one token is left to be computed, whose logits are wanted: a prompt that is cached whole has its last
        page computed again, into a page of its own, and no shared page is written.
        """
        found, parent = [], ROOT
        for end in range(self.size, len(tokens), self.size):
            page = self.children.get((parent, tuple(tokens[end - self.size : end])))
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def room(self, besides: Sequence[int] = ()) -> int:
        """Pages that can be taken while those `besides` stay: free ones, and cached ones that can be evicted."""
        return len(self.free) + self.cached - sum(page not in self.refs for page in besides)

    def hold(self, pages: Sequence[int], tick: int) -> None:
        """One holder more of pages that are held already or in the trie."""
        for page in pages:
            self.refs[page] = self.refs.get(page, 0) + 1
            self.used[page] = tick

    def take(self, count: int) -> list[int]:
        """Pages for one holder, free ones first, then those least lately used. The caller has asked `room`."""
        if count > len(self.free):
            self._evict(count - len(self.free))
        pages = [self.free.pop() for _ in range(count)]
        self.refs.update(dict.fromkeys(pages, 1))
        return pages

    def _evict(self, count: int) -> None:
        """Out of the trie, the least lately used first. A parent is used when its child is, and is less deep."""
        unheld = [page for page in self.edges if page not in self.refs]
        unheld.sort(key=lambda page: (self.used[page], -self.edges[page][2]))
        for page in unheld[:count]:
            parent, tokens, _ = self.edges.pop(page)
            del self.children[parent, tokens], self.used[page]
            self.free.append(page)

    def release(self, pages: Sequence[int], tick: int) -> None:
        """One holder less. Who is held no longer is cached if it is in the trie, else free."""
        for page in pages:
            self.refs[page] -= 1
            if not self.refs[page]:
                del self.refs[page]
            if page in self.edges:
                self.used[page] = tick
            elif page not in self.refs:
                self.free.append(page)

    def share(self, pages: list[int], tokens: Sequence[int], first: int, tick: int) -> list[int]:
        """Put pages[first:] into the trie, full pages with these tokens; returns the request's pages from then on.

        Where another request has put the same tokens before, its page takes the place of this one, which is free again:
        so a request holds what stands in the trie, and all its ancestors.
        """
        pages = list(pages)
        for i in range(first, len(tokens) // self.size if self.prefix else 0):
            parent = pages[i - 1] if i else ROOT
            key = parent, tuple(tokens[i * self.size : (i + 1) * self.size])
            there = self.children.setdefault(key, pages[i])
            if there == pages[i]:
                self.edges[there] = (*key, i)
                self.used[there] = tick
            else:
                self.hold([there], tick)
                self.release([pages[i]], tick)
                pages[i] = there
        return pages
