"""Drafts propose tokens for the engine to check (Part 7, "Speculative Sampling").

A draft proposes tokens. It is the request's own text, by n-grams, or a smaller model. At each place the model draws as
it would without a draft, by the request's seed and the place, and a proposal is kept if it equals that token. So greedy
and sampled tokens depend on the proposals, on their number and on where a step begins only by the rounding of logits,
which changes about one token in a million in fp32 (`sampling`). A draft draws with the same uniform numbers, so it
often gets the same token. The book's rule (chapters/07_speculative.py) has the same distribution, and it keeps more
proposals of a draft that is unlike the model. But its tokens depend on where a step begins, so a request that is
preempted would go on with other tokens.
"""

from collections.abc import Callable, Iterable, Sequence

from scaling.configs import Config
from scaling.serve.fixed import PagedModel
from scaling.serve.requests import Request
from scaling.serve.sampling import sample
from scaling.serve.states import Work

LONGEST = 3  # the most tokens of an n-gram
Draft = Callable[[str, Sequence[Work]], dict[int, list[int]]]  # (worker, works) -> each work's proposals, by its id


class NgramIndex:
    """A request's text, and the latest place at which each of its n-grams of up to `LONGEST` tokens ended.

    The n-grams at the end of the text are added with the next token, so a look-up finds an earlier place. A token adds
    `LONGEST` entries, about 400 bytes, and a look-up reads at most `LONGEST` of them, however long the text is.
    """

    def __init__(self, request: Request):
        self.request = request
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for n in range(1, min(LONGEST, len(self.tokens)) + 1):
                self.ends[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def proposals(self, k: int) -> list[int]:
        """Return k tokens: those after the latest earlier place of the last n tokens, for the longest n that has one.

        If fewer than k tokens follow that place, or if no n has an earlier place, the text's last token fills up the k.
        """
        for n in range(min(LONGEST, len(self.tokens)), 0, -1):
            if end := self.ends.get(tuple(self.tokens[-n:])):
                after = self.tokens[end : end + k]
                return after + after[-1:] * (k - len(after))
        return self.tokens[-1:] * k


def by_ngrams(texts: dict[int, NgramIndex], worker: str, works: Sequence[Work]) -> dict[int, list[int]]:
    """Return proposals for each work, as a draft: what followed the request's last tokens earlier in its text.

    `texts` has the index of each request by its id, and is updated.
    """
    proposed: dict[int, list[int]] = {w.id: [] for w in works}
    for w in works:
        if w.proposals:
            if w.id not in texts or texts[w.id].request is not w.request:
                texts[w.id] = NgramIndex(w.request)
            known = len(texts[w.id].tokens)
            texts[w.id].extend((*w.before[known:], *w.tokens[max(0, known - w.start) :]))
            proposed[w.id] = texts[w.id].proposals(w.proposals)
    return proposed


def by_model(model: PagedModel, worker: str, works: Sequence[Work]) -> dict[int, list[int]]:
    """Return proposals for each work, as a draft: a smaller model draws them one by one.

    Its cache holds the same tokens of each request as the model's cache, prefix hits included.
    """
    proposed: dict[int, list[int]] = {w.id: [] for w in works}
    logits, live = model.logits(worker, works), list(works)
    while rows := [i for i, w in enumerate(live) if len(proposed[w.id]) < w.proposals]:
        live = [live[i] for i in rows]
        places = [w.start + len(w.tokens) for w in live]
        drawn = sample(logits[rows], [w.request.draw for w in live], places).read()
        live = [w._replace(start=at, tokens=(id or 0,)) for w, at, id in zip(live, places, drawn, strict=True)]
        for w in live:
            proposed[w.id] += w.tokens
        logits = model.logits(worker, live)  # caches the last proposal too, which is needed if all are kept
    return proposed


def check_draft(config: Config, target: Config) -> None:
    """Raise ValueError if the draft has another vocabulary."""
    if config.V != target.V:
        raise ValueError(
            f"the draft {config.name} has V={config.V}, {target.name} has V={target.V}\n"
            "  fix: choose a draft with the same vocabulary"
        )
