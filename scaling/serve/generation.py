"""Tokens from prompts: prefill once, then decode; with a draft, speculative sampling. Batches are ragged.

What a request gives does not depend on what is beside it: its randomness is of its seed and position (`sampling`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.common.arguments import whole, whole_numbers
from scaling.configs import Config
from scaling.serve.cache import init_cache
from scaling.serve.drafts import Given, advance, drafting
from scaling.serve.requests import prompt_ids
from scaling.serve.sampling import Draw, Sampling, request_seeds
from scaling.serve.states import Work
from scaling.serve.step import run_rows
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
    return [prompt_ids(f"{what} {i}", text, config.V) for i, text in enumerate(texts)]


class _Batch:
    """A model and its cache of the rows, with `room` for new tokens; `more` rows, copies, let the batch divide."""

    def __init__(self, params: dict, rows: list[list[int]], config: Config, room: int, mesh, page, form: str):
        self.params, self.config, self.options = params, config, {"mesh": mesh, "form": form}
        mesh = ONE if mesh is None else mesh
        check_mesh(config, mesh, form)
        B, length = divisible(len(rows), max(map(len, rows)) + room, form, mesh)
        self.held, self.more = [0] * len(rows), B - len(rows)
        self.cache = init_cache(config, B, length, mesh=mesh, page=page, form=form)

    def logits(self, worker: str, works: Sequence[Work], every: bool = False) -> Tensor:
        """As `drafts.CachedModel`; a work's id is its row. Others get a token behind what they hold, or none."""
        tokens: list[tuple[int, ...]] = [() if every else (0,)] * len(self.held)
        for work in works:
            tokens[work.id], self.held[work.id] = work.tokens, work.start
        tokens, starts = tokens + tokens[:1] * self.more, self.held + self.held[:1] * self.more
        logits, self.cache = run_rows(self.params, tokens, starts, self.cache, self.config, every=every, **self.options)
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
