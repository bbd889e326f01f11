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
from scaling.serve.sampling import Sampling, request_seeds, sample
from scaling.serve.speculative import as_proposed, ngram
from scaling.serve.step import decode, extend, prefill
from scaling.serve.types import ONE, ROWS, check_mesh
from scaling.spec import parse
from scaling.strategies.axes import present


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
    seeds = request_seeds(rows, seed)
    if not rows or not max_new_tokens:
        return
    stops = frozenset(whole_numbers("stop", [stop] if isinstance(stop, int) else stop))
    batch = _Batch(params, rows, config, max_new_tokens + (proposals if draft is not None else 0), mesh, page, form)
    left = dict.fromkeys(range(len(rows)), max_new_tokens)
    source = _plain(batch, how, seeds) if draft is None else _drafted(batch, how, seeds, left, draft, proposals)
    for step in source:
        given = []
        for token in step:
            if left.get(token.row, 0):
                given.append(token)
                left[token.row] -= 1
                batch.rows[token.row].append(token.id)
                if token.id in stops or not left[token.row]:
                    del left[token.row]
        yield given
        if not left:
            return


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
    """The rows' tokens and their cache, with `room` for new ones; `more` rows of no prompt let the batch divide."""

    def __init__(self, params: dict, rows: list[list[int]], config: Config, room: int, mesh, page, form: str):
        self.params, self.config, self.rows = params, config, rows
        self.options: dict[str, Any] = {"mesh": mesh, "form": form, "donate": True}
        mesh = ONE if mesh is None else mesh
        check_mesh(config, mesh, form)
        spec = parse(present(f"l[{ROWS[form]}]", mesh))
        self.more = -len(rows) % mesh.size(spec.dims[0][1])
        self.device, self.room = params["norm"].device, room
        B, length = len(rows) + self.more, max(map(len, rows)) + room
        length += -length % mesh.sizes.get("Z", 1)
        self.cache = init_cache(config, B, length, mesh=mesh, page=page, form=form)

    def prefill(self) -> Tensor:
        """Logits[B, V] at the end of every prompt."""
        return self.run(prefill, [*self.rows, *self.rows[:1] * self.more])[: len(self.rows)]

    def run(self, call, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The logits of `call`, prefill or extend, of some more tokens of each row."""
        lengths = torch.tensor([len(some) for some in tokens], device=self.device)
        T = max(1, int(lengths.max()))
        padded = torch.tensor([[*some, *[0] * (T - len(some))] for some in tokens], device=self.device)
        logits, self.cache = call(self.params, padded, self.cache, self.config, lengths=lengths, **self.options)
        return logits

    def decode(self, tokens: list[int]) -> Tensor:
        """Logits[B, V] after one more token of each row."""
        all_rows = torch.tensor([*tokens, *[0] * self.more], device=self.device)
        logits, self.cache = decode(self.params, all_rows, self.cache, self.config, **self.options)
        return logits[: len(tokens)]

    def keep(self, lengths: Sequence[int]) -> None:
        """Roll the cache back to so many tokens of each row."""
        kept = torch.tensor(lengths, device=self.device)
        self.cache = self.cache | {"lengths": kept}


def _plain(batch: _Batch, how: Sampling, seeds: list[int]) -> Iterator[list[Token]]:
    logits = batch.prefill()
    while True:
        ids = sample(logits, how, seeds, [len(row) for row in batch.rows])
        yield _with_logprobs(ids[:, None].tolist(), logits[:, None])
        logits = batch.decode([row[-1] for row in batch.rows])  # of rows that have ended too: nobody looks at it


def _drafted(batch: _Batch, how: Sampling, seeds: list[int], left: dict, draft: Any, k: int) -> Iterator[list[Token]]:
    """A step: k proposals of each row, one pass of the target over them, the rule, and the cache rolled back."""
    small = _proposer(batch, draft, k)
    logits = batch.prefill()
    ids = sample(logits, how, seeds, [len(row) for row in batch.rows])
    yield _with_logprobs(ids[:, None].tolist(), logits[:, None])
    while True:
        live = [i in left for i in range(len(batch.rows))]
        first = [len(row) for row in batch.rows]
        proposed = small.propose(how, seeds, live) if small else [ngram(row, k) for row in batch.rows]
        rows = [[row[-1], *some] if on else [] for row, some, on in zip(batch.rows, proposed, live, strict=True)]
        logits = batch.run(extend, [*rows, *[[]] * batch.more])[: len(rows)]
        on = [i for i in range(len(batch.rows)) if live[i]]
        at = [(seeds[i], first[i] + n) for i in on for n in range(k + 1)]
        drawn = sample(logits[on].flatten(0, 1), how, [seed for seed, _ in at], [place for _, place in at])
        own = dict(zip(on, drawn.view(len(on), k + 1).tolist(), strict=True))
        taken = [as_proposed(some, own[i]) if i in own else [] for i, some in enumerate(proposed)]
        yield _with_logprobs(taken, logits)
        batch.keep([*(len(row) - 1 if on else 0 for row, on in zip(batch.rows, live, strict=True)), *[0] * batch.more])


class _Model(_Batch):
    """A draft model: what it holds of each row may lag behind by a token or two."""

    def __init__(self, target: _Batch, config: Config, params: dict, k: int):
        check_draft(config, target.config)
        mesh, form = target.options["mesh"], target.options["form"]
        try:
            super().__init__(params, target.rows, config, target.room, mesh, None, form)
        except ValueError as error:
            what, _, fix = str(error).partition("\n  fix: ")
            fix = fix or "give params of the draft's own config, sharded by serve.specs(config, mesh)"
            raise type(error)(f"the draft {config.name}: {what}\n  fix: {fix}") from None
        self.k = k

    def propose(self, how: Sampling, seeds: list[int], live: list[bool]) -> list[list[int]]:
        """The k proposals of each row. Rows that have ended get any."""
        held = self.cache["lengths"].tolist()
        new = [row[n:] if on else row[-1:] for row, n, on in zip(self.rows, held, live, strict=False)]
        starts = [n if on else 0 for n, on in zip(held, live, strict=False)]
        self.keep([*starts, *[0] * self.more])
        logits = self.run(prefill, [*new, *[[0]] * self.more])[: len(self.rows)]
        proposed: list[list[int]] = []
        for j in range(self.k):
            proposed.append(sample(logits, how, seeds, [len(row) + j for row in self.rows]).tolist())
            if j + 1 < self.k:
                logits = self.decode(proposed[-1])
        known = [len(row) if on else 0 for row, on in zip(self.rows, live, strict=True)]
        self.keep([*known, *[0] * self.more])
        return [list(row) for row in zip(*proposed, strict=True)]


def _proposer(batch: _Batch, draft: Any, k: int) -> _Model | None:
    if draft == "ngram":
        return None
    return _Model(batch, *draft_model(draft), k)


def draft_model(draft: Any) -> tuple[Config, dict]:
    """(config, params) of a draft that is a model; the two may come in either order. ValueError for anything else."""
    if isinstance(draft, tuple) and {type(part) for part in draft} == {Config, dict}:
        return draft if isinstance(draft[0], Config) else draft[::-1]
    raise ValueError(f'draft={draft!r:.40} is neither (config, params) nor "ngram"\n  fix: give one of these')


def check_draft(config: Config, target: Config) -> None:
    """ValueError for a draft of another vocabulary."""
    if config.V != target.V:
        raise ValueError(
            f"the draft {config.name} has V={config.V}, {target.name} has V={target.V}\n"
            "  fix: choose a draft with the same vocabulary"
        )


def _with_logprobs(ids: list[list[int]], logits: Tensor) -> list[Token]:
    """Of ids[B][n] and logits[B, T, V] at their places."""
    places = [(row, n, id) for row, some in enumerate(ids) for n, id in enumerate(some)]
    if not places:
        return []
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    row, n, id = torch.tensor(places, device=logits.device).T
    found = (wide[row, n, id] - wide.logsumexp(-1)[row, n]).tolist()
    return [Token(row, id, logprob) for (row, _, id), logprob in zip(places, found, strict=True)]


def score(params: dict, texts: Sequence[Any], config: Config, *, mesh=None, form: str = "heads") -> list[list[float]]:
    """The log-probability, in nats, of each token of each text after its first, given those before it."""
    rows = _rows("text", texts, config)
    if not rows:
        return []
    batch = _Batch(params, rows, config, 0, mesh, None, form)
    logits = batch.run(extend, [*rows, *rows[:1] * batch.more])
    return [[token.logprob for token in _with_logprobs([row[1:]], logits[i : i + 1])] for i, row in enumerate(rows)]
