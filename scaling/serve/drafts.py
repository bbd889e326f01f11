"""A step of what generates: the tokens that each request is given, with a draft or without; and what proposes them.

The same step serves `generate`, the engine and the server: they differ in where a model keeps what it has computed.
A draft is the request's own text by n-grams, or a smaller model.

The rule: at each place the model draws as it would without a draft, by the request's seed and the place; a proposal is
kept if it is that token. So what is proposed changes no token, greedy or sampled: not how much is proposed either, or
where a step begins. A draft draws with the same uniform numbers, and so often the same token. The book's rule
(`scaling.book.speculative`) has the same distribution and keeps more of a draft that is unlike the model, but what it
gives depends on where a step begins: a request that is preempted would go on with other tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from scaling.configs import Config
from scaling.serve.sampling import Draw, sample
from scaling.serve.states import Work


class CachedModel(Protocol):
    """A model with its cache."""

    def logits(self, worker: str, works: Sequence[Work], every: bool = False) -> Tensor:
        """Logits[B, V] after each work's last token, or of `every` token, [B, T, V]; all are written to the cache."""
        ...


class Draft(Protocol):
    def propose(self, worker: str, works: Sequence[Work], draws: Mapping[int, Draw]) -> dict[int, list[int]]:
        """So many tokens as each work wants, by id. It sees the works of every step, prompts too."""
        ...


class NGrams:
    """What followed the request's last tokens when they stood there before."""

    def propose(self, worker: str, works: Sequence[Work], draws: Mapping[int, Draw]) -> dict[int, list[int]]:
        return {w.id: ngram((*w.before, *w.tokens), w.proposals) if w.proposals else [] for w in works}


class SmallModel:
    """A model that holds of each request what the model itself holds, prefix hits included."""

    def __init__(self, model: CachedModel):
        self.model = model

    def propose(self, worker: str, works: Sequence[Work], draws: Mapping[int, Draw]) -> dict[int, list[int]]:
        proposed: dict[int, list[int]] = {w.id: [] for w in works}
        logits, live = self.model.logits(worker, works), list(works)
        while rows := [i for i, w in enumerate(live) if len(proposed[w.id]) < w.proposals]:
            live = [live[i] for i in rows]
            places = [w.start + len(w.tokens) for w in live]
            drawn = sample(logits[rows], [draws.get(w.id, Draw()) for w in live], places)
            for w, token in zip(live, drawn, strict=True):
                proposed[w.id].append(token)
            live = [w._replace(start=at, tokens=(id,)) for w, at, id in zip(live, places, drawn, strict=True)]
            logits = self.model.logits(worker, live)  # of the last proposal as well: if all are kept, it is held
        return proposed


def as_proposed(proposed: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens of a step: of those drawn at the k proposed places and the one after, up to the first that is not what
    was proposed."""
    same = next((n for n, (a, b) in enumerate(zip(proposed, drawn, strict=False)) if a != b), len(proposed))
    return list(drawn[: same + 1])


def ngram(tokens: Sequence[int], k: int, longest: int = 3) -> list[int]:
    """k proposals out of the request's own tokens: what followed the last n tokens when they stood there before.

    The longest n up to `longest` that is found, at its latest place; the last token again where nothing is found.
    """
    tokens = list(tokens)
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                after = tokens[start + n : start + n + k]
                return after + [after[-1]] * (k - len(after))
    return tokens[-1:] * k


class Given(NamedTuple):
    """The tokens that a request is given, and the logits[n, V] at their places."""

    id: int
    tokens: tuple[int, ...]
    logits: Tensor


def advance(
    model: CachedModel, draft: Draft | None, worker: str, works: Sequence[Work], draws: Mapping[int, Draw]
) -> list[Given]:
    """Of each work that samples: those of its proposals that are right, and the token after them. `draws`, by id: how
    they are drawn, greedily where it does not say."""
    proposed = draft.propose(worker, works, draws) if draft else {}
    every = any(w.proposals for w in works)
    longer = [w._replace(tokens=(*w.tokens, *proposed.get(w.id, ()))) for w in works] if every else works
    logits = model.logits(worker, longer, every)
    logits = logits if every else logits[:, None]
    sampled = [(b, w) for b, w in enumerate(works) if w.sample]
    at = [(b, w, n) for b, w in sampled for n in range(1 + w.proposals)]
    if not at:
        return []
    logits = logits[[b for b, _, _ in at], [len(w.tokens) - 1 + n if every else 0 for _, w, n in at]]
    places = [w.start + len(w.tokens) + n for _, w, n in at]
    drawn, given, first = sample(logits, [draws.get(w.id, Draw()) for _, w, _ in at], places), [], 0
    for _, work in sampled:
        tokens = as_proposed(proposed.get(work.id, ()), drawn[first : first + 1 + work.proposals])
        given.append(Given(work.id, tuple(tokens), logits[first : first + len(tokens)]))
        first += 1 + work.proposals
    return given


def drafting(draft: Any, target: Config, hold: Callable[[dict, Config], CachedModel]) -> Draft | None:
    """What `draft` names: (config, params), in either order, "ngram" or None; `hold` gives these params a cache.

    ValueError for anything else, and for a draft that does not fit to its target.
    """
    if draft in (None, "ngram"):
        return NGrams() if draft else None
    if not isinstance(draft, tuple) or {type(part) for part in draft} != {Config, dict}:
        raise ValueError(f'draft={draft!r:.40} is neither (config, params) nor "ngram"\n  fix: give one of these')
    config, params = draft if isinstance(draft[0], Config) else draft[::-1]
    check_draft(config, target)
    try:
        return SmallModel(hold(params, config))
    except ValueError as error:
        what, _, fix = str(error).partition("\n  fix: ")
        fix = fix or "give params of the draft's own config, sharded by serve.specs(config, mesh)"
        raise type(error)(f"the draft {config.name}: {what}\n  fix: {fix}") from None


def check_draft(config: Config, target: Config) -> None:
    """ValueError for a draft of another vocabulary."""
    if config.V != target.V:
        raise ValueError(
            f"the draft {config.name} has V={config.V}, {target.name} has V={target.V}\n"
            "  fix: choose a draft with the same vocabulary"
        )
