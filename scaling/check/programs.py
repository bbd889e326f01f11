"""The library's own programs for the judge: each strategy, the Transformer, and serving, on small meshes.

    for name, sizes, run in programs(): run(AbstractMesh(sizes))

Every shard has at least two elements along each dim, since a dim of one element shows no split. On one device the
gradients of each kind of Transformer are also compared with the slopes of its loss, since a line of its backward may
have a wrong array of the right type.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from scaling import serve, tree
from scaling.check.findings import fault_text, place_of_function
from scaling.check.strategy import run_layers, with_numbers
from scaling.collectives.linear import who_watches
from scaling.configs import Config, Latent, Linear
from scaling.mesh import AbstractMesh
from scaling.mesh.meshes import Mesh
from scaling.models import transformer as model
from scaling.spec import present
from scaling.strategies import transformer as strategy

TRANSFORMERS = {
    "XY": "plain tied experts latent normed parallel sinks linear",
    "PX": "plain tied experts",
    "CY": "plain capped chunks linear",
    "ZX": "tied",
    "EX": "experts sinks chunks",
    "XC": "plain linear",
    "CE": "sinks",
    "PXC": "latent",
    "PCY": "chunks",
}
FEW_ROWS = "PCY"  # a mesh on which each rank has one row of a microbatch
SERVING = ("YZ", "heads"), ("YC", "heads"), ("YZ", "heads_batch"), ("YZ", "sequence"), ("XYZ", "2d"), ("EY", "experts")
STEP = 1e-6  # by which params are moved for a slope
ROUNDING = 1e-8  # of a slope, relative to the sum of its terms
LAYERS = {"data_parallel": "X", "fsdp": "X", "tensor_parallel": "Y", "fsdp_tp": "XY", "pods": "PXY", "zero": "X"}


def programs() -> Iterator[tuple[str, Mapping[str, int], Callable[[Any], Any]]]:
    """Yield (name, the mesh's sizes, a function of the mesh) for each program."""
    for name, axes in LAYERS.items():
        for keep in (True, False):
            sizes = dict(zip(axes, (2, 3, 2), strict=False))
            yield f"{name}, keep={keep}", sizes, lambda mesh, name=name, keep=keep: run_layers(name, keep, mesh)
    for axes, kinds in TRANSFORMERS.items():
        for kind in kinds.split():
            yield (
                f"transformer, {kind}, {axes}",
                dict.fromkeys(axes, 2),
                lambda mesh, kind=kind, few=axes == FEW_ROWS: (
                    train_transformer(kind, mesh, 4, microbatches=2, remat="block", reduce="each")
                    if few
                    else train_transformer(kind, mesh)
                ),
            )
    for kind in dict.fromkeys(" ".join(TRANSFORMERS.values()).split()):
        yield f"transformer, {kind}, derivative", {}, lambda _, kind=kind: check_gradients(kind)
    for axes, form in SERVING:
        yield f"serving, {form}", dict.fromkeys(axes, 2), lambda mesh, form=form: _serving(form, mesh)
    yield "a cache from mesh to mesh", {"Y": 2}, _handover


def _config(kind: str) -> Any:
    config = Config("tiny", 2, 32, 64, 8, 4, 4, 16).with_(window=(3, 3), attention_bias=True, output_bias=True)
    linear = Linear(keys=4, values=8, key=8, value=8, width=3, layers=(0,))
    latent = Latent(q_rank=16, kv_rank=12, nope=6, rope=4, value=4)
    return {
        "plain": config, "tied": config.with_(tied=True), "experts": config.with_(E=2, k=1),
        "normed": config.with_(norms="both", qk_norm=True, qk_wide=True, score_cap=50.0, logit_cap=30.0),
        "capped": config.with_(score_cap=50.0, sinks=True),
        "parallel": config.with_(norms="shared", parallel=True, centered=True, norm_bias=True, mlp_bias=True),
        "sinks": config.with_(E=2, k=1, sinks=True, expert_bias=True, clamp=7.0),
        "chunks": config.with_(
            L=3, window=(3, None, 3), chunked=True, unrotated=(1,), qk_norm=True, qk_bare=True, query_growth=0.1, E=2,
            k=1, routing="inputs", shared=1, dense_layers=(1,), F_dense=64,
        ),
        "linear": config.with_(window=None, head_gate=True, attention_bias=False, output_bias=False, linear=linear),
        "latent": config.with_(K=8, attention_bias=False, output_bias=False, latent=latent),
    }[kind]  # fmt: skip


def train_transformer(kind: str, mesh: Any, rows: int = 32, documents: bool | None = None, **options: Any) -> None:
    """Compute the loss of a tiny Transformer, and its gradients, which are typed as its params.

    `documents` says whether segments are packed, by default if the mesh has C. `options` go to `loss_and_grads`.
    """
    config, watch = _config(kind), who_watches()
    assert watch is not None
    types, of_rows = strategy.specs(config, mesh), str(present("t[B_PXE, T_C]", mesh))
    params = strategy.shard(model.init(config, 0, torch.float32, "meta"), config, mesh)
    tokens, targets, segments, weights = tree.shard(
        [torch.zeros(rows, 16).long()] * 3 + [torch.ones(rows, 16)], [of_rows] * 4, mesh
    )
    options = {"weights": weights, "label_smoothing": 0.1, "z_loss": 0.01} | options
    documents = "C" in mesh.sizes if documents is None else documents
    options |= {"segments": segments} if documents else {}
    options |= {"context": "ring"} if config.linear else {}
    _, grads = strategy.loss_and_grads(params, tokens, targets, config, mesh, **options)
    for where, dW, spec in tree.paired(grads, types, "grads"):
        watch.check_declared(
            dW, spec, f"{where} of loss_and_grads is {spec}", place_of_function(strategy.loss_and_grads)
        )


def check_gradients(kind: str) -> None:
    """Compare a tiny Transformer's gradients with the slopes of its loss, on one device, in float64."""
    config, watch = _config(kind), who_watches()
    assert watch is not None
    with with_numbers() as generator:
        params, one = model.init(config, 0, torch.float64), Mesh({})
        tokens, targets = (torch.randint(config.V, (2, 8), generator=generator) for _ in range(2))
        options = {"weights": torch.rand(2, 8, generator=generator), "label_smoothing": 0.1, "z_loss": 0.01}
        grads = tree.named_leaves(strategy.loss_and_grads(params, tokens, targets, config, one, **options)[1], "grads")
        way = {name: torch.randn(dW.shape, generator=generator, dtype=dW.dtype) for name, dW in grads.items()}

        def loss(step: float, names: Collection[str]) -> Tensor:
            steps = [step * (name in names) * v for name, v in way.items()]
            moved = tree.map(torch.add, params, tree.unflatten(params, steps))
            return strategy.loss_and_grads(moved, tokens, targets, config, one, **options)[0]

        def differs(names: Collection[str]) -> bool:
            slope = (loss(STEP, names) - loss(-STEP, names)) / (2 * STEP)
            return bool((slope - sum((grads[name] * way[name]).sum() for name in names)).abs() > rounding)

        rounding = ROUNDING * sum((dW * way[name]).abs().sum() for name, dW in grads.items())
        wrong = [name for name in grads if differs([name])] if differs(grads) else []
    for name in wrong:
        text = f"loss_and_grads returns another {name} than the derivative of its loss, on one device"
        fix = f"see the lines that make {name}"
        watch.find("derivative", fault_text(text, "derivative", fix), "", place_of_function(strategy.loss_and_grads))


def _serving(form: str, mesh: Any) -> None:
    """Compute the logits of a prompt and of a token after it."""
    kinds = "experts sinks chunks" if form == "experts" else "plain tied normed parallel capped"
    kinds += " linear" if form == "heads" and "C" not in mesh.sizes else ""
    for kind in (kinds if form in ("experts", "2d") else f"{kinds} latent").split():
        config = _config(kind).with_(E=4) if _config(kind).moe else _config(kind)
        params = tree.shard(model.init(config, 0, torch.float32, "meta"), serve.specs(config, mesh, form=form), mesh)
        tokens = torch.zeros(8, 6, dtype=torch.long, device="meta")
        cache = serve.init_cache(config, 8, 8, mesh=mesh, form=form)
        _, cache = serve.prefill(params, tokens, cache, config, mesh, form=form)
        serve.decode(params, tokens[:, 0], cache, config, mesh, form=form)


def _handover(mesh: Any) -> None:
    """Move a cache from heads over Y to the sequence over Z."""
    config, there = _config("plain"), AbstractMesh({"Z": 2})
    cache = serve.init_cache(config, 8, 8, mesh=mesh, dtype=torch.float32)
    serve.move(cache, config, mesh, there, target_form="sequence", length=8)  # its own length is a number that is sent
