"""Evaluate a model in training, by the loss on held-out sequences and by a sampled continuation of a prompt."""

import math
from collections.abc import Callable, Sequence

import torch

from scaling import tree
from scaling.models import transformer as model
from scaling.models.template import chosen_end
from scaling.strategies import transformer
from scaling.train import guards
from scaling.train.batches import IGNORED, Batches
from scaling.train.origin import tokenizer_in
from scaling.train.settings import DTYPES, Settings
from scaling.train.step import batch_slices, to_mesh, with_adapters

LENGTH, TEMPERATURE = 64, 0.8  # the most tokens of a continuation; the temperature at which they are drawn


def evaluate(
    params, valid: Sequence[Batches], settings: Settings, mesh, ask_to_stop: Callable[[], torch.Tensor]
) -> float | None:
    """Return the mean loss, in nats, over the counted targets of the first `eval_batches` batches of each corpus.

    With `eval_batches` 0, all batches are evaluated. The perplexity is exp of the result. An incomplete last batch
    is filled up with rows that do not count. The experts' auxiliary terms, label smoothing and z-loss are left out,
    and no gradient is computed.

    `ask_to_stop` is called before each batch. Once it returns a value that is not 0, the evaluation ends and returns
    None.
    """
    config, B = settings.model.with_(aux_coef=0.0, z_coef=0.0), settings.batch // settings.microbatches
    rows, part = batch_slices(B, settings.seq, mesh)
    replicas = mesh.size() // (B // (rows.stop - rows.start))
    total, count = 0.0, 0
    for held in valid:
        last = min(held.sequences, settings.eval_batches * settings.batch or held.sequences)
        for first in range(0, last, B):
            if ask_to_stop().any():
                return None
            numbers = [i for i in range(first, first + B)[rows] if i < last]
            tokens, targets, segments = (_filled(x, rows.stop - rows.start) for x in held.rows(numbers))
            targets[len(numbers) :] = IGNORED
            counts = guards.gather_over_ranks((targets != IGNORED).sum()[None], mesh)
            if counted := int(counts.sum()) // replicas:
                tokens, targets, segments = (to_mesh(x[:, part], mesh) for x in (tokens, targets, segments))
                given = settings.layout(mesh.sizes) | {"segments": segments, "context": settings.context}
                loss = transformer.loss(params, tokens, targets, config, mesh, **given)
                total, count = total + loss.item() * counted, count + counted
    return total / count if count else math.nan


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x[b, T] -> x[rows, T], padded with rows of zeros."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def check_sample(settings: Settings, ranks: int, held: float, available: float) -> None:
    """Check that `--sample` can be run, if it is given.

    Args:
        settings: The settings of the run.
        ranks: The number of ranks.
        held: The bytes that a rank holds already.
        available: The bytes of memory that a rank has.

    Raises:
        ValueError: The prompt is empty, too long or not of the model's vocabulary, or a rank has no room to gather the
            params.
    """
    if not settings.sample:
        return
    ids, V = sample_prompt(settings), settings.model.V
    if not len(ids) or int(max(ids)) >= V:
        raise ValueError(
            f"--sample {settings.sample!r}: its tokens do not lie in 0..{V - 1}, {settings.model.name}'s"
            "\n  fix: give token ids of this vocabulary"
        )
    if (J := settings.model.learned_positions) and len(ids) >= J:
        raise ValueError(
            f"--sample of {len(ids)} tokens\n  rule: {settings.model.name}'s positions are learned, and there are {J}"
            "\n  fix: give a shorter text"
        )
    whole = tree.nbytes(model.init(settings.model, 0, DTYPES[settings.dtype], "meta"))
    if ranks > 1 and held + whole > available:
        raise ValueError(
            f"--sample gathers the whole params on each rank: {whole / 1e9:.2f} GB beside "
            f"{held / 1e9:.2f}, and there are {available / 1e9:.2f} GB\n"
            f"  fix: leave it out, and run python -m scaling.generate --model {settings.out} --mesh Y=... beside it"
        )


def sample_prompt(settings: Settings) -> list[int]:
    """Return the ids of `settings.sample`, which begins as the run's documents do."""
    by = tokenizer_in(settings)
    return [*(() if settings.no_bos else by.prefix), *by.encode(settings.sample)]


@torch.no_grad()
def continuation(params, settings: Settings, mesh) -> str:
    """Return a continuation of `settings.sample` up to the end of a document, on rank 0; other ranks return "".

    The params are gathered on every rank, and rank 0 then runs the model as on one device. Tokens are drawn by the
    run's seed.
    """
    layout = {"zero": settings.zero, "schedule": settings.pipeline_on(mesh.sizes)}
    whole = transformer.unshard(with_adapters(params, settings, mesh), settings.model, mesh, **layout)
    by = tokenizer_in(settings)
    if mesh.rank:
        return ""
    generator, end = torch.Generator().manual_seed(settings.seed), chosen_end(by, settings.eos_id)
    prompt = ids = torch.tensor(sample_prompt(settings), device=mesh.device)
    left = (settings.model.learned_positions or len(ids) + LENGTH) - len(ids)
    for _ in range(min(LENGTH, left)):  # without a cache, because the whole text costs no more than one small batch
        logits = model.forward(whole, ids[None], config=settings.model)[0, -1, : max(by.vocabulary, end + 1)]
        drawn = torch.multinomial((logits.double() / TEMPERATURE).softmax(-1).cpu(), 1, generator=generator)
        if int(drawn) == end:
            break
        ids = torch.cat([ids, drawn.to(ids.device)])
    return by.decode(ids[len(prompt) :].tolist())
