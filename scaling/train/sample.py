"""What a model in training makes of a prompt: a look at it, beside its loss."""

import torch

from scaling import tree
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train.origin import tokenizer_in
from scaling.train.settings import DTYPES, Settings

LENGTH, TEMPERATURE = 64, 0.8  # of what is drawn: tokens


def check_sample(settings: Settings, ranks: int, held: float, available: float) -> None:
    """ValueError for a prompt that is no tokens of the model, or if one of so many ranks has no room for the whole
    params beside the bytes that it holds."""
    if not settings.sample:
        return
    ids, V = tokenizer_in(settings).encode(settings.sample), settings.model.V
    if not len(ids) or int(max(ids)) >= V:
        raise ValueError(
            f"--sample {settings.sample!r}: its tokens do not lie in 0..{V - 1}, {settings.model.name}'s"
            "\n  fix: give token ids of this vocabulary"
        )
    whole = tree.nbytes(model.init(settings.model, 0, DTYPES[settings.dtype], "meta"))
    if ranks > 1 and held + whole > available:
        raise ValueError(
            f"--sample gathers the whole params on each rank: {whole / 1e9:.2f} GB beside "
            f"{held / 1e9:.2f}, and there are {available / 1e9:.2f} GB\n"
            f"  fix: leave it out, and run python -m scaling.generate --model {settings.out} --mesh Y=... beside it"
        )


@torch.no_grad()
def continuation(params, settings: Settings, mesh) -> str:
    """How the model goes on from `settings.sample`, drawn by the run's seed; on rank 0, "" on the others.

    The params are gathered on every rank, whatever the mesh; then rank 0 runs them as on one device.
    """
    whole, by = transformer.unshard(params, settings.model, mesh), tokenizer_in(settings)
    if mesh.rank:
        return ""
    generator = torch.Generator().manual_seed(settings.seed)
    prompt = ids = torch.tensor(by.encode(settings.sample), device=mesh.device)
    for _ in range(LENGTH):  # without a cache: together as much work as one small batch
        logits = model.forward(whole, ids[None], config=settings.model)[0, -1, : by.vocabulary]
        drawn = torch.multinomial((logits.double() / TEMPERATURE).softmax(-1).cpu(), 1, generator=generator)
        ids = torch.cat([ids, drawn.to(ids.device)])
    return by.decode(ids[len(prompt) :].tolist())
