"""`python -m scaling.train export RUN --out FOLDER`: write a run's latest params as a Hugging Face folder.

With --mesh several ranks each read and write their shards, so that none holds the whole model. The folder also gets the
files that came with the model: the tokenizer (or one of the 256 bytes), the chat template, the generation config and
the ids that begin and end a text. `params_of_run` loads a run's params for this and for generation, with adapters
merged into the params to which they belong.
"""

import json
from pathlib import Path

from scaling import launch
from scaling.common.arguments import read_table, table_if_any
from scaling.common.console import Parser, complaining
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import adapters, hf
from scaling.models import transformer as model
from scaling.models.lora import Lora, adapter_specs
from scaling.models.params import IN_ORDER, Places
from scaling.models.template import ends_of
from scaling.models.text import (
    COMPANIONS,
    FILE,
    ID_KEYS,
    IDENTITY,
    NAME,
    Tokenizer,
    copy_companions,
    home_of,
    tokenizer_of,
    write_bytes,
)
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer
from scaling.strategies.transformer.types import stored_places
from scaling.train import checkpoint
from scaling.train.origin import config_of_run, options_of, short_name
from scaling.train.record import read_record, weights_digest
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
    elif weights_digest(weights) != read_record(run, step).get("base model"):
        raise ValueError(
            f"{run}: its adapters belong to other weights than those that {weights} holds now\n  fix: put them back"
        )
    else:
        _, base = hf.load_sharded(weights, types, mesh, dtype, places=places)
    return adapters.merged(base, state["params"]["lora"], lora, config, types)


def export(mesh, run: Path, step: int, config: Config, out: Path) -> None:
    """Write the params of a checkpoint as a Hugging Face folder; each rank reads and writes its shards."""
    types, places = transformer.specs(config, mesh), stored_places(config, mesh)
    params = params_of_run(run, config, types, mesh, step, places)
    hf.save_sharded(out, config, params, types, mesh, single=mesh.size() == 1, places=places)


def export_adapters(mesh, run: Path, step: int, config: Config, out: Path) -> None:
    """Write the adapters of a checkpoint as a PEFT folder, on one rank."""
    lora = lora_of_run(run)
    types = {"params": {"lora": adapter_specs(config, lora)}}
    state, _ = checkpoint.load(run, types, mesh, step, among=True)
    adapters.save(out, config, lora, state["params"]["lora"], options_of(run)["weights"])


def check_folder(run: Path, out: Path, by: Tokenizer) -> None:
    """Check that no file of another model would remain in the folder.

    Raises:
        ValueError: The folder holds such a file, which none of this run's files would replace.
    """
    ours = {name for name in COMPANIONS if (home_of(run) / name).is_file()}
    ours |= {FILE, "tokenizer_config.json"} if by.identity == "bytes" else set()
    if left := [name for name in COMPANIONS if (out / name).exists() and name not in ours]:
        raise ValueError(f"{out / left[0]}: is another model's\n  fix: remove it, or give another --out")


def add_companions(run: Path, out: Path, config: Config) -> None:
    """Write the tokenizer, chat template and ids of begin and end of the run's model next to the weights."""
    by, home = tokenizer_of(run, config.V), home_of(run)
    if by.identity == "bytes":
        write_bytes(out)
    elif by.identity and not (home / FILE).is_file():
        copy_companions(Path(by.name), out)
    copy_companions(home, out)
    there = table_if_any(home / "config.json")
    table = read_table(out / "config.json") | {key: there[key] for key in ID_KEYS if key in there}
    if not ends_of(home) and (ends := ends_of(run)):
        table["eos_token_id"] = ends[0]
    table |= {"tokenizer": options_of(run).get(NAME, short_name(by)), IDENTITY: by.identity} if by.identity else {}
    (out / "config.json").write_text(json.dumps(table, indent=2) + "\n")


@complaining(ValueError, OSError, launch.RankError)
def main(argv=None) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="python -m scaling.train export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
    parser.add_argument("--adapters", action="store_true", help="write the adapters alone, as a PEFT folder")
    parser.add_argument("--mesh", default="X=1", help="mesh of the ranks that share the work (default X=1)")
    args = parser.parse_args(argv)
    config = config_of_run(args.run)
    check_folder(args.run, args.out, tokenizer_of(args.run, config.V))
    step = checkpoint.latest(args.run) if args.step is None else args.step
    if args.adapters:
        launch.run(export_adapters, {"X": 1}, args.run, step, config, args.out)
        print(f"step {step}: {args.out}")
        return 0
    sizes = parse_mesh(args.mesh)
    for refuses in (transformer.specs, stored_places):  # they raise if the model does not divide over the mesh
        refuses(config, AbstractMesh(sizes))
    launch.run(export, sizes, args.run, step, config, args.out)
    add_companions(args.run, args.out, config)
    print(f"step {step}: {args.out}")
    return 0
