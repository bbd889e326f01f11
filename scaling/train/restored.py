"""Load the params of a run's checkpoint, with adapters merged into the params to which they belong."""

from pathlib import Path

from scaling.configs import Config
from scaling.models import adapters, hf
from scaling.models import transformer as model
from scaling.models.lora import Lora, adapter_specs
from scaling.models.params import IN_ORDER, Places
from scaling.train import checkpoint
from scaling.train.origin import options_of
from scaling.train.record import recorded, weights_digest
from scaling.train.settings import DTYPES


def lora_of_run(run: Path) -> Lora:
    """Return the adapters that a run trains; ValueError if it trains all of its params."""
    if not (options := options_of(run)).get("lora"):
        raise ValueError(f"{run}: trains all params, and has no adapters\n  fix: export it without --adapters")
    return Lora(options["lora"], tuple(options["lora_on"].split(",")), float(options["lora_alpha"]))


def params_of_run(
    run: Path, config: Config, types: dict, mesh, step: int | None = None, places: Places = IN_ORDER
) -> dict:
    """Return this rank's shards of a checkpoint's params, by default of the latest; adapters are merged into them.

    Raises:
        ValueError: The weights to which the adapters belong have changed or been removed.
    """
    options = options_of(run)
    lora = lora_of_run(run) if options.get("lora") else None
    saved = types if lora is None else {"lora": adapter_specs(config, lora, types)}
    state, step = checkpoint.load(run, {"params": saved}, mesh, step, places=places, among=True)
    if lora is None:
        return state["params"]
    dtype, weights = DTYPES[options["dtype"]], Path(options["weights"])
    if not options["weights"]:
        base = model.init(config, options["seed"], dtype, mesh=mesh, specs=types, places=places)
    elif weights_digest(weights) != recorded(run, step).get("base model"):
        raise ValueError(
            f"{run}: its adapters belong to other weights than those that {weights} holds now\n  fix: put them back"
        )
    else:
        _, base = hf.load_sharded(weights, types, mesh, dtype, places=places)
    return adapters.merged(base, state["params"]["lora"], lora, config, types)
