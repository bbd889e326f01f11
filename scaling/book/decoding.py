"""Run a prompt and the tokens after it through `scaling.serve`, by any form on any mesh."""

import torch

from scaling import serve
from scaling.trace import Log, trace


def decoded(params, tokens, lengths, steps: int, config, mesh=None, form="heads") -> tuple[torch.Tensor, list[Log]]:
    """Return (Logits[B, 1 + steps, V], a log of each step) for the rows of tokens[B, S].

    The first `lengths[B]` tokens of each row are its prompt; the next `steps` are decoded one by one.
    """
    cache = serve.init_cache(config, *tokens.shape, mesh=mesh, form=form)
    logits, cache = serve.prefill(params, tokens, cache, config, mesh, lengths=lengths, form=form)
    seen, logs = [logits], []
    for step in range(steps):
        token = tokens[torch.arange(len(tokens)), lengths + step]
        with trace() as log:
            logits, cache = serve.decode(params, token, cache, config, mesh, form=form, donate=True)
        seen.append(logits)
        logs.append(log)
    return torch.stack(seen, 1), logs
