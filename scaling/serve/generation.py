"""Tokens from prompts: the engine with all requests at once, in the policy "static". Batches are ragged.

In fp32 a request gives the same tokens whatever runs beside it, since its random numbers depend on its seed and its
position alone (`sampling`). In bf16 the logits round differently in a batch of another shape, and some answers differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.common.arguments import whole, whole_numbers
from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.cache import divisible, share_of
from scaling.serve.engine import Engine, Given
from scaling.serve.paged import PagedModel
from scaling.serve.requests import Draw, Request, Sampling, prompt_ids, request_seeds
from scaling.serve.states import Arrive, Options, Work
from scaling.serve.types import ONE, check_mesh


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
    "ngram"; it proposes so many tokens a step. In fp32 it changes the speed alone and not the tokens; in bf16 it may
    change some, as another batch may. `page`: cache in pages of so many.
    ValueError for an empty prompt, ids outside the vocabulary, and options that leave no token.
    """
    how = Sampling(temperature, top_k, top_p, min_p)
    out: dict[int, list[int]] = {}
    for given in _steps(params, prompts, config, max_new_tokens, how, seed, stop, mesh, draft, proposals, page, form):
        for row, own in given.items():
            out.setdefault(row, []).extend(own.tokens)
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
    for given in _steps(params, prompts, config, max_new_tokens, how, seed, stop, mesh, draft, proposals, page, form):
        yield _with_logprobs([(row, own.tokens, own.logits) for row, own in given.items()])


def _steps(
    params, prompts, config: Config, max_new_tokens, how, seed, stop, mesh, draft, proposals, page, form
) -> Iterator[dict[int, Given]]:
    """What each row is given, step by step."""
    rows = _rows("prompt", prompts, config)
    whole(0, max_new_tokens=max_new_tokens)
    whole(proposals=proposals, page=1 if page is None else page)
    seeds = request_seeds(rows, seed)
    if not rows or not max_new_tokens:
        return
    stops = frozenset(whole_numbers("stop", [stop] if isinstance(stop, int) else stop))
    options = _options(rows, max_new_tokens, config, mesh, page, form)
    options = replace(options, proposals=0 if draft is None else proposals)
    engine = Engine(params, config, options, mesh=mesh, draft=draft, form=form, paged=page is not None)
    requests = [Request(row, tuple(ids), max_new_tokens, stops, Draw(how, seeds[row])) for row, ids in enumerate(rows)]
    state, events = scheduler.initial(options), [*map(Arrive, requests)]
    while True:
        state, actions = scheduler.step(state, events)
        given, events = engine.carry_out(actions)
        if not events:
            return
        yield given


def _options(rows: list[list[int]], room: int, config: Config, mesh, page: int | None, form: str) -> Options:
    """For all rows at once, each with `room` for new tokens. Without a `page`, one page is all that a row has."""
    mesh = ONE if mesh is None else mesh
    check_mesh(config, mesh, form)
    groups, (B, length) = share_of(mesh, form).groups, divisible(len(rows), max(map(len, rows)) + room, form, mesh)
    size = page or length
    return Options(B // groups * -(-length // size), size, len(rows), policy="static", prefix=False, groups=groups)


def _rows(what: str, texts: Sequence[Any], config: Config) -> list[list[int]]:
    """The texts as lists of ids of the vocabulary, none of them empty. ValueError that names the one that is not."""
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        raise ValueError(f"{what}s={texts!r:.40}: must be lists of ids\n  fix: encode each, tokenizer.encode(text)")
    return [prompt_ids(f"{what} {i}", text, config.V) for i, text in enumerate(texts)]


def _with_logprobs(given: Sequence[tuple[int, Sequence[int], Tensor]]) -> list[Token]:
    """Of (row, tokens, logits[n, V] at their places)."""
    logits = torch.cat([own for _, _, own in given])
    ids = torch.tensor([id for _, tokens, _ in given for id in tokens], dtype=torch.int64, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = iter((wide.gather(1, ids[:, None])[:, 0] - wide.logsumexp(-1)).tolist())
    return [Token(row, id, next(found)) for row, tokens, _ in given for id in tokens]


def score(params: dict, texts: Sequence[Any], config: Config, *, mesh=None, form: str = "heads") -> list[list[float]]:
    """The log-probability, in nats, of each token of each text after its first, given those before it."""
    rows = _rows("text", texts, config)
    if not rows:
        return []
    options = _options(rows, 0, config, mesh, None, form)
    model, works = PagedModel(params, config, options, mesh, form=form, paged=False), []
    for i, row in enumerate(rows):
        page, group = divmod(i, options.groups)
        works.append(Work(Request(i, tuple(row), 1), 0, tuple(row), (page,), False, group=group))
    logits = model.logits("engine", works, every=True)
    given = [(i, row[1:], logits[i, : len(row) - 1]) for i, row in enumerate(rows)]
    return [[token.logprob for token in _with_logprobs([own])] for own in given]
