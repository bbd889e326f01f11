"""What proposes tokens inside the engine: the request's own text by n-grams, or a smaller model with pages of its own.

Which are kept is the rule of `speculative`. Where pages are few, the scheduler asks for less.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from scaling.serve.paged import PagedModel
from scaling.serve.speculative import ngram
from scaling.serve.states import Move, Work

DrawTokens = Callable[[Sequence[tuple[Work, int]], Tensor], list[int]]  # ([(work, place)], logits[n, V]) -> n tokens


class Draft(Protocol):
    def propose(self, worker: str, works: Sequence[Work], draw: DrawTokens) -> dict[int, list[int]]:
        """So many tokens as each work wants, by id. It sees the works of every step, prompts too."""
        ...

    def move(self, move: Move) -> None: ...


class NGrams:
    """What followed the request's last tokens when they stood there before."""

    def propose(self, worker: str, works: Sequence[Work], draw: DrawTokens) -> dict[int, list[int]]:
        return {w.id: ngram((*w.before, *w.tokens), w.proposals) if w.proposals else [] for w in works}

    def move(self, move: Move) -> None:
        pass


class SmallModel:
    """A model with the same page table: it holds of each request what the model itself holds, prefix hits included."""

    def __init__(self, model: PagedModel):
        self.model = model

    def propose(self, worker: str, works: Sequence[Work], draw: DrawTokens) -> dict[int, list[int]]:
        proposed: dict[int, list[int]] = {w.id: [] for w in works}
        logits, live = self.model.logits(worker, works), list(works)
        while rows := [i for i, w in enumerate(live) if len(proposed[w.id]) < w.proposals]:
            live = [live[i] for i in rows]
            places = [w.start + len(w.tokens) for w in live]
            for w, token in zip(live, draw(list(zip(live, places, strict=True)), logits[rows]), strict=True):
                proposed[w.id].append(token)
            live = [
                w._replace(start=place, tokens=(proposed[w.id][-1],)) for w, place in zip(live, places, strict=True)
            ]
            logits = self.model.logits(worker, live)  # of the last proposal as well: if all are kept, it is held
        return proposed

    def move(self, move: Move) -> None:
        self.model.move(move)
