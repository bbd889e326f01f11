"""The library's own programs, as the judge runs them: each strategy, the Transformer, serving, on small meshes.

    for name, sizes, run in programs(): run(AbstractMesh(sizes))

Sizes are such that every shard has two elements along each dim at least: a dim of one element shows no split.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from scaling import serve, tree
from scaling.check.strategy import place_of_function, run_layers
from scaling.collectives.watch import who_watches
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.strategies import transformer as strategy

LAYERS = {"data_parallel": "X", "fsdp": "X", "tensor_parallel": "Y", "fsdp_tp": "XY", "pods": "PXY", "zero": "X"}


def programs() -> Iterator[tuple[str, Mapping[str, int], Callable[[Any], Any]]]:
    for name, axes in LAYERS.items():
        for keep in (True, False):
            sizes = dict(zip(axes, (2, 3, 2), strict=False))
            yield f"{name}, keep={keep}", sizes, lambda mesh, name=name, keep=keep: run_layers(name, keep, mesh)
    for sizes in ({"X": 2, "Y": 2}, {"P": 2, "X": 2}):
        for kind in ("plain", "tied", "experts"):
            yield f"transformer, {kind}", sizes, lambda mesh, kind=kind: _transformer(kind, mesh)
    for form in ("heads", "heads_batch", "sequence", "2d"):
        sizes = {"X": 2, "Y": 2, "Z": 2} if form == "2d" else {"Y": 2, "Z": 2}
        yield f"serving, {form}", sizes, lambda mesh, form=form: _serving(form, mesh)


def _config(kind: str) -> Any:

    config = Config("tiny", 2, 32, 64, 8, 4, 4, 16).with_(window=(3, 3), attention_bias=True, output_bias=True)
    return {"plain": config, "tied": config.with_(tied=True), "experts": config.with_(E=2, k=1)}[kind]


def _transformer(kind: str, mesh: Any) -> None:
    """The loss and gradients of a tiny Transformer, typed as its params."""

    config, watch = _config(kind), who_watches()
    assert watch is not None
    types = strategy.specs(config, mesh)
    params = strategy.shard(model.init(config, 0, torch.float32, "meta"), config, mesh)
    tokens, targets, weights = tree.shard([torch.zeros(32, 16).long()] * 2 + [torch.ones(32, 16)], ["t[B_PX, T]"] * 3
                                          if mesh.sizes.get("P") else ["t[B_X, T]"] * 3, mesh)  # fmt: skip
    options = {"weights": weights, "label_smoothing": 0.1, "z_loss": 0.01}
    _, grads = strategy.loss_and_grads(params, tokens, targets, config, mesh, **options)
    for where, dW, spec in tree.paired(grads, types, "grads"):
        watch("said", dW, spec, f"{where} of loss_and_grads is {spec}", place_of_function(strategy.loss_and_grads))


def _serving(form: str, mesh: Any) -> None:
    """The logits of a prompt and of a token after it."""

    for kind in ("plain", "tied"):
        config = _config(kind)
        params = tree.shard(model.init(config, 0, torch.float32, "meta"), serve.specs(config, mesh, form=form), mesh)
        tokens = torch.zeros(8, 6, dtype=torch.long, device="meta")
        cache = serve.init_cache(config, 8, 8, mesh=mesh, form=form)
        _, cache = serve.prefill(params, tokens, cache, config, mesh, form=form)
        serve.decode(params, tokens[:, 0], cache, config, mesh, form=form)
