"""Tokens from prompts: prefill once, then decode; with a draft, speculative sampling. Batches are ragged.

What a request gives does not depend on what is beside it: its randomness is of its seed and position (`sampling`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.arguments import whole, whole_numbers
from scaling.configs import Config
from scaling.serve.cache import init_cache
from scaling.serve.drafts import Given, advance, drafting
from scaling.serve.sampling import Draw, Sampling, request_seeds
from scaling.serve.states import Work
from scaling.serve.step import decode, extend, prefill
from scaling.serve.types import ONE, check_mesh, divisible


class Token(NamedTuple):
    """A new token of prompt `row`; `logprob` is that of the model, before temperature and filters."""

    row: int
    id: int
    logprob: float


def generate(
    params: dict,
    prompts: Sequence[Any],
    config: Config,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: "int | Sequence[int]" = 0,
    stop: "int | Sequence[int]" = (),
    mesh=None,
    draft: Any = None,
    proposals: int = 4,
    page: int | None = None,
    form: str = "heads",
) -> list[list[int]]:
    """The new token ids of each prompt, at most max_new_tokens; a stop id ends a completion and is its last.

    Prompts are lists of ids, of any lengths. Params are this rank's, typed as `serve.specs`; the result is the same on
    every rank. `seed`: one, from which each prompt gets its own, or one for each. `draft`: (config, params) of a
    smaller model with the same vocabulary, its params typed as `serve.specs` of its own config, as this model's are, or
    "ngram"; it proposes so many tokens a step, and changes the speed alone: the tokens are the same. `page`: cache in
    pages of so many.
    ValueError for an empty prompt, ids outside the vocabulary, and options that leave no token.
    """
    how = Sampling(temperature, top_k, top_p, min_p)
    out: dict[int, list[int]] = {}
    for tokens in stream(
        params, prompts, config, max_new_tokens, how,
        seed=seed, stop=stop, mesh=mesh, draft=draft, proposals=proposals, page=page, form=form,
    ):  # fmt: skip
        for token in tokens:
            out.setdefault(token.row, []).append(token.id)
    return [out.get(row, []) for row in range(len(prompts))]


def stream(
    params: dict,
    prompts: Sequence[Any],
    config: Config,
    max_new_tokens: int,
    how: Sampling,
    *,
    seed: "int | Sequence[int]" = 0,
    stop: "int | Sequence[int]" = (),
    mesh=None,
    draft: Any = None,
    proposals: int = 4,
    page: int | None = None,
    form: str = "heads",
) -> Iterator[list[Token]]:
    """What `generate` returns, step by step as it is known: each step's new tokens, in the order of the prompts."""
    rows = _rows("prompt", prompts, config)
    whole(0, max_new_tokens=max_new_tokens)
    whole(proposals=proposals)
    draws = {row: Draw(how, own) for row, own in enumerate(request_seeds(rows, seed))}
    if not rows or not max_new_tokens:
        return
    stops = frozenset(whole_numbers("stop", [stop] if isinstance(stop, int) else stop))

    def hold(params: dict, config: Config, page: int | None = None) -> _Batch:
        return _Batch(params, rows, config, max_new_tokens, mesh, page, form)

    model, small = hold(params, config, page), drafting(draft, config, hold)
    left = dict.fromkeys(range(len(rows)), max_new_tokens)
    works = [Work(row, 0, tuple(ids), (), True) for row, ids in enumerate(rows)]
    while left:
        given = []
        for row, tokens, logits in advance(model, small, "", works, draws):
            end = next((n for n, id in enumerate(tokens, 1) if id in stops), len(tokens))
            given.append(Given(row, tokens[:end], logits[:end]))
            rows[row].extend(tokens[:end])
            left[row] -= end
            if tokens[end - 1] in stops or not left[row]:
                del left[row]
        yield _with_logprobs(given)
        works = [_next(row, rows[row], min(proposals, count - 1) if small else 0) for row, count in left.items()]


def _next(row: int, ids: list[int], proposals: int) -> Work:
    """The step that follows: of the ids all but the last are in the cache."""
    return Work(row, len(ids) - 1, (ids[-1],), (), True, proposals, tuple(ids[:-1]) if proposals else ())


def _rows(what: str, texts: Sequence[Any], config: Config) -> list[list[int]]:
    """The texts as lists of ids of the vocabulary, none of them empty. ValueError that names the one that is not."""
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        raise ValueError(f"{what}s={texts!r:.40}: must be lists of ids\n  fix: encode each, tokenizer.encode(text)")
    rows = [whole_numbers(f"{what} {i}", text) for i, text in enumerate(texts)]
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"{what} {i} is empty: a {what} has at least one token\n  fix: leave it out")
        if wrong := [t for t in row if not 0 <= t < config.V]:
            lies = f"token {wrong[0]} lies outside the vocabulary of {config.name}, 0..{config.V - 1}"
            raise ValueError(f"{what} {i}: {lies}\n  fix: encode it by this model's tokenizer")
    return rows


class _Batch:
    """A model and its cache of the rows, with `room` for new tokens; `more` rows, copies, let the batch divide."""

    def __init__(self, params: dict, rows: list[list[int]], config: Config, room: int, mesh, page, form: str):
        self.params, self.config, self.options = params, config, {"mesh": mesh, "form": form, "donate": True}
        mesh = ONE if mesh is None else mesh
        check_mesh(config, mesh, form)
        B, length = divisible(len(rows), max(map(len, rows)) + room, form, mesh)
        self.device, self.held, self.more = params["norm"].device, [0] * len(rows), B - len(rows)
        self.cache = init_cache(config, B, length, mesh=mesh, page=page, form=form)

    def logits(self, worker: str, works: Sequence[Work], every: bool = False) -> Tensor:
        """As `drafts.CachedModel`; a work's id is its row. Others get a token behind what they hold, or none."""
        T = max(len(work.tokens) for work in works)
        tokens = [[] if every else [0] for _ in self.held]
        for work in works:
            tokens[work.id], self.held[work.id] = list(work.tokens), work.start
        tokens, held = tokens + tokens[:1] * self.more, self.held + self.held[:1] * self.more
        lengths = torch.tensor([len(some) for some in tokens], device=self.device)
        padded = torch.tensor([[*some, *[0] * (T - len(some))] for some in tokens], device=self.device)
        cache = self.cache | {"lengths": torch.tensor(held, device=self.device)}
        if T == 1 and not every:
            logits, self.cache = decode(self.params, padded[:, 0], cache, self.config, **self.options)
        else:
            call = extend if every else prefill
            logits, self.cache = call(self.params, padded, cache, self.config, lengths=lengths, **self.options)
        for work in works:
            self.held[work.id] += len(work.tokens)
        return logits if len(works) == len(logits) else logits[[work.id for work in works]]


def _with_logprobs(given: Sequence[Given]) -> list[Token]:
    logits = torch.cat([own.logits for own in given])
    ids = torch.tensor([id for own in given for id in own.tokens], dtype=torch.int64, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = iter((wide.gather(1, ids[:, None])[:, 0] - wide.logsumexp(-1)).tolist())
    return [Token(own.id, id, next(found)) for own in given for id in own.tokens]


def score(params: dict, texts: Sequence[Any], config: Config, *, mesh=None, form: str = "heads") -> list[list[float]]:
    """The log-probability, in nats, of each token of each text after its first, given those before it."""
    rows = _rows("text", texts, config)
    if not rows:
        return []
    batch = _Batch(params, rows, config, 0, mesh, None, form)
    logits = batch.logits("", [Work(i, 0, tuple(row), (), False) for i, row in enumerate(rows)], every=True)
    given = (Given(i, tuple(row[1:]), logits[i, : len(row) - 1]) for i, row in enumerate(rows))
    return [[token.logprob for token in _with_logprobs([own])] for own in given]
