"""`python -m scaling.train --model tiny --data FOLDER --out RUN --mesh X=2,Y=2`: train a Transformer on your text.

Stop it with Ctrl-C: it saves, then ends; --resume goes on, on this mesh or another. Under torchrun with several ranks
each process is one of them; otherwise the ranks of the mesh are started here.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from scaling import launch
from scaling.common.arguments import of_type, read_table
from scaling.common.console import Parser, complaining, integer, number
from scaling.common.torchrun import first_rank, world_size
from scaling.configs.sources import HELP, MODEL, RUN
from scaling.cost.units import significant
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models.ends import NO_END
from scaling.models.text import NAME
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer
from scaling.train import compare, dry, elastic, evaluate, export, flight, tokenize, verify
from scaling.train.documents import add_options, check_options
from scaling.train.durable import LATEST, oddities, replaced
from scaling.train.loop import STOP, run
from scaling.train.origin import begun_from, end_for, keep_origin, tokenizer_for, weights_to_begin_with
from scaling.train.progress import METRICS, NORMS, check_installed, describe
from scaling.train.record import check_options_kept, check_unchanged, first_recorded, record_of, resumable
from scaling.train.settings import Settings, add_flags
from scaling.train.step import options_of_adapters

NOT_KEPT = ("model", "weights", "resume", "new_data", "step", "out")  # run.toml has these in another form, or not
LOCK = "lock"  # a file in a run's folder, which is locked by the run that writes there
OTHERS = {module.__name__.split(".")[-1]: module.main for module in (tokenize, compare, export, flight, verify)}


def arguments(argv=None) -> argparse.Namespace:
    """Read the options, from --config and a resumed run's run.toml too; flags override both."""
    parser = Parser(prog="python -m scaling.train", description=(__doc__ or "").partition(": ")[2])
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
    if before and "eos_id" not in read_table(before):
        flags += [f"--eos-id={NO_END}", "--no-template"]  # an older run keeps reading documents as it did
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
    sizes, (config, weights) = parse_mesh(args.mesh), begun_from(args.model, args.dry_run)
    args.model = weights or args.model  # a model of the hub or of a GGUF file has been written into a folder
    own = {f.name: getattr(args, f.name) for f in fields(Settings) if f.name not in ("model", "weights")}
    config = config if args.dropout is None else config.with_(dropout=args.dropout)
    weights = "" if args.from_scratch else weights_to_begin_with(args.out, args.weights, weights)
    if not args.dry_run:
        resumed = Path(args.out) if args.resume and (Path(args.out) / RUN).is_file() else None
        own["tokenizer"] = tokenizer_for(config, args.model, weights, args.tokenizer, args.data, resumed)
    own["tokenizer"] = "bytes" if own["tokenizer"] is None else own["tokenizer"]
    own |= options_of_adapters(args.lora_from, config)
    settings = Settings(model=config, weights=weights, **own)
    if not args.dry_run:
        settings = replace(settings, eos_id=end_for(settings, args))
    if args.plan is not None:
        sizes, settings = chosen(settings, args.plan or AbstractMesh(sizes).size(), args, given)
    declared = sizes
    if args.chip:
        chip(args.chip)
    if (world := world_size()) > 1:
        sizes = elastic.fitted(declared, world)
    asked, settings = settings, elastic.shared(settings, declared, sizes)
    if first_rank() and (note := elastic.loss_note(asked, settings)):
        print(f"warning: {note}", file=sys.stderr, flush=True)
    transformer.specs(config, AbstractMesh(sizes), zero=settings.zero, lora=settings.adapters)
    if args.dry_run:
        backend = "gloo" if args.device == "cpu" else "abstract"
        print(describe(settings, sizes) + "\n" + dry.table(dry.fullest(settings, sizes, backend), sizes))
        return 0
    check_installed(settings)
    if first_rank() and not elastic.fits_as_before(declared, sizes):
        room = dry.memory_of_rank(args.device, ranks := AbstractMesh(sizes).size())
        counts = dry.refuse_too_large(settings, sizes, room)
        evaluate.check_sample(settings, ranks, counts.params + counts.state, room)
    try:
        with prepared(asked, args) as keep:
            return trained(settings, sizes, args, keep)
    except launch.RankError as error:
        last = flight.told(args.out)
        told = f"\npython -m scaling.train flight {args.out}: each rank's last collectives:\n{last}"
        raise launch.RankError(f"{error}{told if last else ''}") from None


def chosen(settings: Settings, ranks: int, args, given: list[str]) -> tuple[dict[str, int], Settings]:
    """Plan the mesh for `ranks` ranks, and ZeRO, remat and microbatches if not given; return it and the settings.

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
        said = "".join(f"  {why}\n" for why in refused[:8])
        raise ValueError(f"no mesh suits\n{said}  fix: use another number of ranks, or give --mesh")
    if first_rank():
        print(f"{choose.table(found, refused)}\nrun: {choose.command_line(given, found[0])}\n", flush=True)
    args.mesh = ",".join(f"{axis}={size}" for axis, size in found[0].sizes.items())
    return found[0].sizes, found[0].settings


def trained(settings: Settings, sizes: dict[str, int], args, keep: Callable[[], None]) -> int:
    """Train on torchrun's ranks or on ranks started here; rank 0 calls `keep` when the run has been checked."""
    if first_rank():
        print(describe(settings, sizes), flush=True)
    options = {"device": args.device, "checked": not args.unchecked}
    if world_size() > 1:
        launch.start(run, sizes, settings, keep, **options)
        return 0
    launch.keep_freed_memory()
    result = launch.run(run, sizes, settings, keep, **options)[0]
    stopped = result["step"] < settings.steps
    print(f"{'stopped' if stopped else 'done'} at step {result['step']}: loss {result['loss']:.4f}, valid "
          f"{result['valid']:.4f}; {significant(result['sequences'] * settings.seq)} tokens seen; saved in "
          f"{settings.out}" + (", --resume goes on" if stopped else ""))  # fmt: skip
    return 0


@contextmanager
def prepared(settings: Settings, args) -> Iterator[Callable[[], None]]:
    """Lock and check the run's folder; yield a function that writes the options there after the ranks' own checks.

    Ctrl-C and SIGTERM ask the run to save and end, and a second Ctrl-C ends it at once.
    ValueError if the folder is in use, or if this run can neither begin in it nor go on from it.
    """
    out, asked = Path(settings.out), False
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is not a folder\n  fix: give another --out")
    if (out / "config.json").is_file():
        raise ValueError(f"{out}: is a model's folder: it has a config.json\n  fix: give another --out")

    def ask(signum, frame):
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        with suppress(OSError):
            (out / STOP).touch()

    before = [(which, signal.signal(which, ask)) for which in (signal.SIGINT, signal.SIGTERM)]
    try:
        with locked(out) if first_rank() else nullcontext():
            if first_rank():
                check_startable(out, settings)
            yield partial(keep_options, out, settings, args.model, args.mesh, _touched(out / STOP))
    finally:
        for which, handler in before:
            signal.signal(which, handler)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock a run's folder, creating it if needed; after an error, remove what was created unless it holds files.

    ValueError if another run has locked it.
    """
    new = [path for path in (out / STOP, out / LOCK, out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock.fileno()).st_nlink  # 0: the run that held the lock has just deleted the file
        except OSError:
            held = 0
        if not held:
            raise ValueError(f"{out}: another run writes here\n  fix: give this one another --out")
        try:
            yield
        except BaseException:
            for path in new:
                with suppress(OSError):  # a folder that is not empty stays
                    path.rmdir() if path.is_dir() else path.unlink()
            raise


def check_startable(out: Path, settings: Settings) -> None:
    """Check that a run with these settings can begin in this folder, or go on from its checkpoints.

    Raises:
        ValueError: The folder does not suit this run, or was begun with other settings.
        OSError: A file in it cannot be read.
    """
    for path in (out / name for name in (RUN, METRICS, NORMS, LATEST, STOP)):
        if path.is_dir():
            raise ValueError(f"{path}: is a folder, where a run has a file\n  fix: move it away, or give another --out")
    if not settings.resume:
        if any(out.glob("step-*")):
            what = f"{out}: holds checkpoints already"
            raise ValueError(f"{what}\n  fix: give --resume to go on from them, or another --out")
        return
    for odd in oddities(out):
        print(f"warning: {odd}", file=sys.stderr, flush=True)
    steps = resumable(settings)
    step, before = first_recorded(out, steps)
    if steps:
        check_options_kept(out, before)
    check_unchanged(settings, before, record_of(settings))
    if step is None:
        print(f"{out}: there is no checkpoint yet: starting at step 1", flush=True)
    elif step >= settings.steps:
        raise ValueError(f"{out}: is at step {step} of {settings.steps}\n  fix: give --steps above {step}")


def keep_options(out: Path, settings: Settings, model: str, mesh: str, stop: int) -> None:
    """Write the model's files, then run.toml; remove the stop file if it was touched at `stop`, before this run."""
    if _touched(out / STOP) == stop:
        (out / STOP).unlink(missing_ok=True)
    flight.keep_earlier(out)
    kept = {k: v for k, v in asdict(settings).items() if k not in NOT_KEPT}
    kept |= {"mesh": mesh, "dropout": settings.model.dropout} | keep_origin(out, model, settings)
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in sorted(kept.items())]
    replaced(out / RUN, "".join(lines))  # atomic, because ranks that start later may be reading it


def _touched(path: Path) -> int:
    """Return when a file was touched, in nanoseconds, or 0 if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else 0
