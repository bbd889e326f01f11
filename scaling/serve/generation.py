"""Tokens from prompts: `generate` runs one batch by prefill and decode; `stream` and `score` use the engine.

The engine gets all requests at once, with the policy "static". Batches are ragged.

A request's random numbers depend on its seed and its position alone. Its logits round differently in a batch of another
shape, so other requests change a token: in fp32 about one in a million, in bf16 more (`sampling`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.common.arguments import whole, whole_numbers
from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.cache import divisible, init_cache, share_of
from scaling.serve.engine import Engine
from scaling.serve.fixed import Steps
from scaling.serve.requests import NOT_FINITE, Draw, Request, Sampling, prompt_ids, request_seeds
from scaling.serve.sampling import sample
from scaling.serve.states import Arrive, Options
from scaling.serve.step import extend, prefill
from scaling.serve.types import ONE, check_mesh, plain_leaf


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
    dtype: torch.dtype | None = None,
    compile: Any = None,
    capture: bool = True,
) -> list[list[int]]:
    """Return the new token ids of each prompt, at most max_new_tokens; a stop id ends a completion and is its last.

    One prefill is followed by decode steps of the whole batch, until the last row has ended. The result is the same on
    every rank. A draft changes the speed, and tokens only as seldom as another batch does, by rounding (`sampling`).

    Args:
        params: This rank's params, typed as in `serve.specs`.
        prompts: Lists of ids, of any lengths.
        config: The model.
        max_new_tokens: The most tokens of a completion.
        temperature: Divides the logits before a token is drawn; 0 takes the most probable token.
        top_k: If given, draw from the `top_k` most probable tokens.
        top_p: If given, draw from the fewest tokens whose probabilities add up to at least this.
        min_p: If given, draw from the tokens whose probability is at least this times the largest.
        seed: One seed, from which each prompt gets its own, or one for each prompt.
        stop: The id or ids that end a completion.
        mesh: The mesh, or None for one device.
        draft: (config, params) of a smaller model with the same vocabulary, its params typed as in `serve.specs` of its
            config, or "ngram". It proposes tokens, and the engine verifies them.
        proposals: How many tokens the draft proposes in a step.
        page: If given, the cache is in pages of this number of tokens.
        form: How params and cache are sharded, one of `serve.types.FORMS`.
        dtype: The dtype of the cache, as in `init_cache`.
        compile: A backend of torch.compile for decode steps, such as "inductor".
        capture: Whether to capture decode steps as CUDA graphs where that is possible (`scaling.serve.fixed`).

    Raises:
        ValueError: An empty prompt, ids outside the vocabulary, options that leave no token, or logits that are not
            finite.
    """
    how = Sampling(temperature, top_k, top_p, min_p)
    rows, stops = check_prompts(prompts, config, max_new_tokens, stop, proposals, page)
    new: list[list[int]] = [[] for _ in rows]
    if draft is not None:  # the engine runs the draft and verifies its proposals
        for step in stream(
            params, prompts, config, max_new_tokens, how, seed=seed, stop=stop, mesh=mesh, draft=draft,
            proposals=proposals, page=page, form=form, dtype=dtype, compile=compile, capture=capture,
        ):  # fmt: skip
            for token in step:
                new[token.row].append(token.id)
        return new
    draws = [Draw(how, each) for each in request_seeds(rows, seed)]
    if not rows or not max_new_tokens:
        return new
    tokens, held, cache = _batch(params, rows, max_new_tokens, config, mesh, form=form, dtype=dtype, page=page)
    logits, cache = prefill(params, tokens, cache, config, mesh, lengths=held, form=form, donate=True)
    decode = Steps(params, config, cache, mesh, form, compile=compile, capture=capture)
    pages, starts, live = cache["pages"].tolist() if page else (), held.tolist(), {*range(len(rows))}
    for step in range(max_new_tokens):
        drawn = sample(logits[: len(rows)], draws, [len(row) + step for row in rows]).read()
        for row in live:
            if (token := drawn[row]) is None:
                raise ValueError(f"prompt {row}: {NOT_FINITE}\n  fix: mend the params")
            new[row].append(token)
        live = {row for row in live if drawn[row] not in stops}
        if not live or step + 1 == max_new_tokens:
            break
        following = [[id or 0] for id in drawn + [0] * (len(starts) - len(rows))]
        logits = decode(following, [start + step for start in starts], pages)
    return new


def _batch(
    params: dict, rows: list[list[int]], room: int, config: Config, mesh, **cache
) -> tuple[Tensor, Tensor, dict]:
    """Return (tokens[B, T], lengths[B], an empty cache) of the rows, each with `room` for new tokens.

    Rows of one token are added, so that the batch divides over the mesh.
    """
    on, device, T = ONE if mesh is None else mesh, plain_leaf(params).device, max(map(len, rows))
    check_mesh(config, on, cache["form"])
    B, S = divisible(len(rows), T + room, cache["form"], on)
    rows = rows + [[0]] * (B - len(rows))
    tokens = torch.tensor([row + row[-1:] * (T - len(row)) for row in rows], device=device)
    lengths = torch.tensor([*map(len, rows)], device=device)
    return tokens, lengths, init_cache(config, B, S, mesh=mesh, **cache)


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
    slots: int | None = None,
    form: str = "heads",
    **more,
) -> Iterator[list[Token]]:
    """Yield the tokens that `generate` returns as the engine finds them: each step's, in the order of the prompts.

    The cache has room for `slots` prompts at a time, by default for all; the next one begins when one has ended. The
    other arguments are as in `Engine`.

    Raises:
        ValueError: As in `generate`; logits that are not finite end their prompt, and are raised after all others.
    """
    rows, stops = check_prompts(prompts, config, max_new_tokens, stop, proposals, page)
    seeds = request_seeds(rows, seed)
    if not rows or not max_new_tokens:
        return
    on = ONE if mesh is None else mesh
    check_mesh(config, on, form)
    at_once, longest = len(rows) if slots is None else min(slots, len(rows)), max(map(len, rows))
    groups, (B, S) = share_of(on, form).groups, divisible(at_once, longest + max_new_tokens, form, on)
    size, ahead = page or S, 0 if draft is None else proposals  # without pages, a row is one page
    pages, policy = B // groups * -(-S // size), "static" if at_once == len(rows) else "chunked"
    budget = longest + at_once * (1 + ahead)
    options = Options(pages, size, at_once, budget, policy, prefix=False, proposals=ahead, groups=groups)
    paged = page is not None
    engine = Engine(params, config, options, mesh=mesh, draft=draft, form=form, paged=paged, **more)
    requests = [Request(row, tuple(ids), max_new_tokens, stops, Draw(how, seeds[row])) for row, ids in enumerate(rows)]
    state, events, failed = scheduler.initial(options), [*map(Arrive, requests)], list[int]()
    while True:
        state, actions = scheduler.step(state, events)
        given, events = engine.carry_out(actions)
        failed += [row for row, own in given.items() if own.failed]
        if not events and failed:
            raise ValueError(f"prompt {min(failed)}: {NOT_FINITE}\n  fix: mend the params")
        if not events:
            return
        yield _with_logprobs([(row, own.tokens, own.logits) for row, own in given.items()])


def check_prompts(
    prompts: Sequence[Any],
    config: Config,
    max_new_tokens: int,
    stop: "int | Sequence[int]",
    proposals: int,
    page: int | None,
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the prompts as lists of ids, and the stop ids. Raise ValueError for illegal prompts or options."""
    rows = _rows("prompt", prompts, config)
    whole(0, max_new_tokens=max_new_tokens)
    whole(proposals=proposals, page=1 if page is None else page)
    return rows, frozenset(whole_numbers("stop", [stop] if isinstance(stop, int) else stop))


def _rows(what: str, texts: Sequence[Any], config: Config) -> list[list[int]]:
    """Return the texts as lists of ids. Raise ValueError that names the first empty or illegal one."""
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        raise ValueError(f"{what}s={texts!r:.40}: must be lists of ids\n  fix: encode each, tokenizer.encode(text)")
    return [prompt_ids(f"{what} {i}", text, config.V) for i, text in enumerate(texts)]


def _with_logprobs(given: Sequence[tuple[int, Sequence[int], Tensor]]) -> list[Token]:
    """Return the tokens of each (row, tokens, logits[n, V] that predicted them), with their log-probabilities."""
    logits = torch.cat([own for _, _, own in given])
    ids = torch.tensor([id for _, tokens, _ in given for id in tokens], dtype=torch.int64, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = iter((wide.gather(1, ids[:, None])[:, 0] - wide.logsumexp(-1)).tolist())
    return [Token(row, id, next(found)) for row, tokens, _ in given for id in tokens]


def score(
    params: dict,
    texts: Sequence[Any],
    config: Config,
    *,
    mesh=None,
    dtype: torch.dtype | None = None,
    form: str = "heads",
) -> list[list[float]]:
    """Return the log-probability, in nats, of each text's tokens after its first, given the tokens before each."""
    rows = _rows("text", texts, config)
    if not rows:
        return []
    tokens, lengths, cache = _batch(params, rows, 0, config, mesh, form=form, dtype=dtype)
    logits, _ = extend(params, tokens, cache, config, mesh, lengths=lengths, form=form, donate=True)
    given = [(i, row[1:], logits[i, : len(row) - 1]) for i, row in enumerate(rows)]
    return [[token.logprob for token in _with_logprobs([own])] for own in given]
