"""A run's state: params, the optimizer's, and how many sequences it has seen, which with the seed decides the rest."""

from pathlib import Path

from scaling import optim, tree
from scaling.models import hf
from scaling.models import transformer as model
from scaling.strategies.transformer.stages import slots_of
from scaling.train import checkpoint
from scaling.train.settings import DTYPES, Settings


def begun(settings: Settings, mesh, optimizer: optim.Optimizer, types: dict) -> tuple[dict, int]:
    """(state, step) that a run begins with: of the latest checkpoint, an HF folder's weights, or drawn by the seed.

    No rank holds more than its shards.
    """
    config, out, dtype = settings.model, Path(settings.out), DTYPES[settings.dtype]
    slots = slots_of(config, mesh, None)
    if settings.resume and checkpoint.complete(out):
        specs = state_specs(optimizer, types)
        state, step = checkpoint.load(out, specs, mesh, places={"L": slots})
        tree.check(state["params"], types, config.sizes | {"L": len(slots)}, mesh)
        if (seed := state["data"]["seed"]) != settings.seed:
            raise ValueError(
                f"{out}: was begun with --seed {seed}, not {settings.seed}\n  fix: give the same, or another --out"
            )
        return state, step
    if settings.weights:
        _, params = hf.load_sharded(settings.weights, types, mesh, dtype, slots=slots)
    else:
        params = model.init(config, settings.seed, dtype, mesh=mesh, specs=types, slots=slots)
    return {"params": params, "optimizer": optimizer.init(params), "data": {"sequences": 0, "seed": settings.seed}}, 0


def state_specs(optimizer: optim.Optimizer, types: dict) -> dict:
    """The types of a run's state; what is not a tensor has none."""
    return {"params": types, "optimizer": optimizer.state_specs(types)}
