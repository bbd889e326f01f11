"""`python -m scaling.train --model tiny --data FOLDER --out RUN --mesh X=2,Y=2`: train a Transformer on your text.

Stop it with Ctrl-C: it saves, then ends; --resume goes on, on this mesh or another. Under torchrun with several ranks
each process is one of them; otherwise the ranks of the mesh are started here.
"""

# A run goes on with fewer devices: a lost node halves P, then X, and the global batch stays the same. Under `torchrun
# --nnodes 1:2 --max-restarts 3 ... -m scaling.train --resume` each start reads the number of ranks. Y, C, Z and E do
# not change, because the model is split over them so that it fits. Each remaining rank takes more microbatches of the
# same size, so that activations need no more memory than before.

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from math import prod
from pathlib import Path

from scaling import launch
from scaling.common.arguments import of_type, read_table
from scaling.common.console import Parser, complaining, fold, fold_command, integer, number, significant
from scaling.common.lazy import needing
from scaling.common.torchrun import first_rank, this_rank, world_size
from scaling.configs.sources import HELP, MODEL, RUN
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models.lora import rounding_note
from scaling.models.text import NAME
from scaling.spec.sizes import format_sizes, parse_mesh
from scaling.train import compare, corpus, dry, evaluate, export, flight
from scaling.train.documents import add_options, check_options
from scaling.train.folder import prepared
from scaling.train.loop import run
from scaling.train.origin import (
    config_and_weights,
    end_for,
    tokenizer_for,
    weights_to_begin_with,
    with_losses_of_experts,
)
from scaling.train.progress import describe
from scaling.train.settings import Settings, add_flags
from scaling.train.step import check_compiled, held_types, options_of_adapters

GIVE = ("P", "X")  # the axes that are halved, in this order
OTHERS = {
    "compare": compare.main, "export": export.main, "flight": flight.main, "tokenize": corpus.tokenize,
    "verify": compare.verify_run,
}  # fmt: skip


def arguments(argv=None) -> argparse.Namespace:
    """Read the options, from --config and a resumed run's run.toml too; flags override both."""
    parser = Parser(prog="python -m scaling.train", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a TOML file of these options; flags override it")
    parser.add_argument("--model", default="tiny", help=HELP)
    parser.add_argument(
        "--from-scratch", action="store_true", help="take only the sizes of a Hugging Face folder, not its weights"
    )
    parser.add_argument(
        "--data", help="text, .jsonl, .npy ids or token shards: a file, a folder, or a mixture by weight, A:3,B:1"
    )
    parser.add_argument("--weights", help=argparse.SUPPRESS)  # for a run that is resumed before its first checkpoint
    parser.add_argument(
        "--tokenizer", help="bytes, a tokenizer.json, or a folder with one (default: the model folder's own, or bytes)"
    )
    add_options(parser)
    parser.add_argument("--mesh", default="X=1", help="axes of P, Z, X, C, Y, E and sizes (default X=1)")
    parser.add_argument(
        "--plan", type=integer(1, 10**6), nargs="?", const=0, metavar="RANKS",
        help="choose the mesh for so many ranks (default: as many as --mesh has), by what --chip says",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the ranks (default cpu)")
    parser.add_argument("--out", default="run", help="folder of checkpoints and metrics.jsonl (default run)")
    add_flags(parser)
    parser.add_argument(
        "--dropout", type=number(0, 0.999), help="dropout rate of each block's output (default: the model's)"
    )
    parser.add_argument(
        "--aux-coef", type=number(0, 1e3),
        help="weight of the loss that evens out each layer's load of experts, 1 where even (default: the model's)",
    )  # fmt: skip
    parser.add_argument(
        "--z-coef", type=number(0, 1e3),
        help="weight of the loss that keeps each router's logits small (default: the model's)",
    )  # fmt: skip
    parser.add_argument("--unchecked", action="store_true", help="do not compare the ranks' collectives")
    parser.add_argument("--dry-run", action="store_true", help="count bytes, FLOPs and memory on an abstract mesh")
    options, flags = {action.dest: action for action in parser._actions}, []
    given, _ = parser.parse_known_args(argv)
    before = str(Path(given.out) / RUN) if given.resume and (Path(given.out) / RUN).is_file() else ""
    for file in filter(None, (before, given.config)):
        try:
            flags += flags_of(file, options)
        except ValueError as error:
            parser.error(str(error))
    if before and "no_bos" not in read_table(before):  # a run from before documents began with BOS keeps its data
        flags.append("--no-bos")
    words = [*flags, *(sys.argv[1:] if argv is None else argv)]
    args = parser.parse_args(words, argparse.Namespace(words=words))
    if (args.step or args.new_data) and not args.resume:
        parser.error("--step and --new-data say how --resume goes on: give it too")
    check_options(parser, given)
    if not args.data and not args.dry_run:
        parser.error("--data is needed: a text file, or a folder of them")
    return args


def flags_of(file: str, options: dict[str, argparse.Action]) -> list[str]:
    """Return a TOML file's options as flags, so that both are checked alike; ValueError for an unknown one."""
    found = []
    for key, value in read_table(file).items():
        if key in ("identity", NAME):  # they identify the tokenizer, and are no options
            continue
        if key in ("model", "tokenizer") and value == MODEL:
            value = str(Path(file).parent / MODEL)
        if (option := options.get(key.replace("-", "_"))) is None:
            raise ValueError(f"{file}: unknown option {key!r}\n  fix: leave it out; --help lists the options")
        of_type(f"{file}: {key}", value, *([bool] if option.nargs == 0 else [str, int, float]))
        if option.nargs != 0 or value:
            found.append(option.option_strings[0] + ("" if option.nargs == 0 else f"={value}"))
    return found


@complaining(ValueError, ArithmeticError, OSError, launch.RankError)
def main(argv=None) -> int:
    """Run the command, or the one of OTHERS that `argv` begins with; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] and given[0] in OTHERS:
        return OTHERS[given[0]](given[1:])
    args = arguments(argv)
    sizes, (config, weights) = parse_mesh(args.mesh), config_and_weights(args.model, args.dry_run)
    args.model = weights or args.model  # a model of the hub or of a GGUF file has been written into a folder
    own = {f.name: getattr(args, f.name) for f in fields(Settings) if f.name not in ("model", "weights")}
    config = config if args.dropout is None else config.with_(dropout=args.dropout)
    config = with_losses_of_experts(config, args.model, aux_coef=args.aux_coef, z_coef=args.z_coef)
    weights = "" if args.from_scratch else weights_to_begin_with(args.out, args.weights, weights)
    if not args.dry_run:
        resumed = Path(args.out) if args.resume and (Path(args.out) / RUN).is_file() else None
        own["tokenizer"] = tokenizer_for(config, args.model, weights, args.tokenizer, args.data, resumed)
    own["tokenizer"] = "bytes" if own["tokenizer"] is None else own["tokenizer"]
    own |= options_of_adapters(args.lora_from, config)
    settings = Settings(model=config, weights=weights, **own)
    settings = replace(settings, lr=settings.peak)
    if not args.dry_run:
        settings = replace(settings, eos_id=end_for(settings, args))
    if args.plan is not None:
        sizes, settings = plan_mesh(settings, args.plan or AbstractMesh(sizes).size(), args, given)
    declared = sizes
    if args.chip:
        chip(args.chip)
    if (world := world_size()) > 1:
        sizes = shrink_mesh(declared, world)
    asked, settings = settings, with_more_microbatches(settings, declared, sizes)
    unbalanced = unbalanced_note(settings) if args.aux_coef is None else ""
    notes = loss_note(asked, settings), unbalanced, rounding_note(settings.adapters, settings.dtype)
    for note in filter(None, notes if first_rank() else ()):
        print(f"warning: {note}", file=sys.stderr, flush=True)
    held_types(settings, AbstractMesh(sizes))  # for its refusals
    check_compiled(settings, sizes)
    _ = settings.balancing  # for its refusals, too
    if args.dry_run:
        backend = "gloo" if args.device == "cpu" else "abstract"
        print(fold(describe(settings, sizes)) + "\n" + dry.table(dry.fullest(settings, sizes, backend), sizes))
        return 0
    if settings.tensorboard:
        with needing("--tensorboard", "tensorboard"):
            import_module("tensorboard")
    if first_rank() and not fits_as_before(declared, sizes):
        room = launch.free_memory(args.device, ranks := AbstractMesh(sizes).size())
        counts = dry.refuse_too_large(settings, sizes, room)
        evaluate.check_sample(settings, ranks, counts.params + counts.state, room)
    try:
        with prepared(asked, args.model, args.mesh) as keep:
            return launch_training(settings, sizes, args, keep)
    except launch.RankError as error:
        last = flight.last_lines(args.out)
        told = f"\npython -m scaling.train flight {args.out}: each rank's last collectives:\n{last}"
        raise launch.RankError(f"{error}{told if last else ''}") from None


def plan_mesh(settings: Settings, ranks: int, args, given: list[str]) -> tuple[dict[str, int], Settings]:
    """Plan the mesh for `ranks` ranks, and ZeRO, remat and microbatches if not given; return (sizes, settings).

    Rank 0 prints the alternatives and the command that runs the plan. ValueError if no mesh suits.
    """
    if not args.chip:
        raise ValueError(
            "--plan needs to know the machine\n  fix: give --chip with a name, or with the file that python -m "
            f"scaling.measure --ranks {ranks} --out machine.toml writes"
        )
    from scaling.plan import choose  # the planner, which a restarted run need not import

    backend = "gloo" if args.device == "cpu" else "abstract"
    own = [name for name in choose.OPEN if not choose.is_said(name, args.words)]
    found, refused = choose.choices(settings, ranks, chip(args.chip), backend, chosen=own)
    if not found:
        reasons = "".join(f"  {why}\n" for why in refused[:8])
        raise ValueError(f"no mesh suits\n{reasons}  fix: use another number of ranks, or give --mesh")
    if first_rank():
        run = fold_command(f"run: {choose.command_line(given, found[0])}")
        print(f"{choose.table(found, refused)}\n{run}\n", flush=True)
    args.mesh = ",".join(f"{axis}={size}" for axis, size in found[0].sizes.items())
    return found[0].sizes, found[0].settings


def launch_training(settings: Settings, sizes: dict[str, int], args, keep: Callable[[], None]) -> int:
    """Train on torchrun's ranks or on ranks started here; rank 0 calls `keep` when the run has been checked."""
    if first_rank():
        print(fold(describe(settings, sizes)), flush=True)
    options = {"device": args.device, "checked": not args.unchecked}
    if world_size() > 1:
        launch.start(run, sizes, settings, keep, **options)
        return 0
    launch.keep_freed_memory()
    result = launch.run(run, sizes, settings, keep, **options)[0]
    stopped = result["step"] < settings.steps
    end = f"{'stopped' if stopped else 'done'} at step {result['step']}: loss {result['loss']:.4f}"
    valid = f", valid {result['valid']:.4f}" if "valid" in result and not stopped else ""
    tokens = f"{significant(result['sequences'] * settings.seq)} tokens seen"
    print(f"{end}{valid}; {tokens}; saved in {settings.out}" + (", --resume goes on" if stopped else ""))
    return 0


def shrink_mesh(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Shrink a mesh to `world` ranks: halve P until the mesh fits or P is odd, and then X.

    Raises:
        ValueError: No such mesh has `world` ranks.
    """
    found = dict(sizes)
    for axis in GIVE:
        while prod(found.values()) > world and found.get(axis, 1) % 2 == 0:
            found[axis] //= 2
    if prod(found.values()) != world:
        raise ValueError(
            f"the mesh {format_sizes(sizes)} does not fit {world} ranks (WORLD_SIZE): halving P, then X, leads to "
            f"{format_sizes(found)}\n  fix: start as many ranks as the mesh has, or half, or a quarter of them"
        )
    return found


def fits_as_before(sizes: Mapping[str, int], on: Mapping[str, int]) -> bool:
    """Return whether torchrun has restarted the run on a mesh `on` whose ranks need no more memory than before.

    The run began on the mesh `sizes`. If only P is shorter, each rank holds the same shards and the same rows of a
    microbatch.
    """
    again = this_rank().restarts > 0
    return again and all(on[axis] == size for axis, size in sizes.items() if axis != "P")


def with_more_microbatches(settings: Settings, sizes: Mapping[str, int], on: Mapping[str, int]) -> Settings:
    """Return the settings with the microbatches multiplied by the factor by which P and X shrank."""
    more = prod(sizes.get(axis, 1) // on.get(axis, 1) for axis in GIVE)
    return replace(settings, microbatches=settings.microbatches * more)


def unbalanced_note(settings: Settings) -> str:
    """Return a warning if routers are trained and nothing evens out their experts' load, or "" otherwise."""
    config = settings.model
    if not config.moe or config.routing == "sigmoid" or config.aux_coef or config.z_coef or settings.lora:
        return ""
    return (
        f"nothing evens out the load of {config.name}'s experts, so few of them may come to do all the work"
        "\n  fix: give --aux-coef, such as 0.01, and --z-coef, such as 0.001; or --aux-coef 0, if it is meant"
    )


def loss_note(before: Settings, after: Settings) -> str:
    """Return a warning if more microbatches change the loss, or "" if they do not.

    Experts are balanced, and filled up to their capacity, over the tokens of one microbatch on all ranks. Both are not
    linear in the tokens, so smaller microbatches give another loss.
    """
    config, fewer = before.model, after.microbatches > before.microbatches
    balanced = config.aux_coef > 0 and config.balance_by == "batch"
    if not fewer or config.E == 1 or not (balanced or config.capacity is not None):
        return ""
    what = " and ".join(["aux_coef"] * balanced + ["capacity"] * (config.capacity is not None))
    return (
        f"{after.microbatches} microbatches in place of {before.microbatches}: the experts' {what} hold for each of "
        "them, so losses differ a little from those of the mesh that was asked for"
    )
