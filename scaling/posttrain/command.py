"""`python -m scaling.posttrain --model FOLDER --prompts FILE --reward FILE.py --out run`: learn from rewards (GRPO).

The model answers each prompt several times, and a function that you write says how good each answer is. Training makes
answers more likely that are better than the other answers to their prompt. `--train-mesh` and `--serve-mesh` say where
each half runs: by default on the same ranks in turn, with `--apart` on separate ranks. `--resume` goes on from the
newest checkpoint. `--check` compares the log-probabilities of the two sides, changes nothing, and fails if they differ.
"""

import argparse
import sys
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from scaling import launch
from scaling.common.console import Parser, complaining, integer, number
from scaling.configs.sources import HELP
from scaling.launch.ranks import on_signals
from scaling.mesh import AbstractMesh
from scaling.models.template import NO_END, chosen_end, ends_of
from scaling.models.text import tokenizer, tokenizer_of
from scaling.posttrain.loop import LoopOptions, check_same_options, options_at, run
from scaling.posttrain.losses import Clip
from scaling.posttrain.rewards import RewardError, read_prompts, reward_of
from scaling.serve.types import check_mesh
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer
from scaling.train.durable import newest_first
from scaling.train.folder import already_begun_error, check_steps_left, keep_options, locked, stopper, touched
from scaling.train.loop import STOP
from scaling.train.origin import config_and_weights
from scaling.train.settings import Settings, add_flags
from scaling.train.step import options_of_adapters

STEP = (  # the options that this command shares with `scaling.train`
    "seq", "steps", "microbatches", "lr", "warmup", "schedule", "weight_decay", "clip", "seed", "dtype", "remat",
    "save_every", "keep", "resume", "lora", "lora_on", "lora_alpha", "lora_from",
)  # fmt: skip
FREE = ("steps", "save_every", "keep", "resume", "out", "check", "train_mesh", "serve_mesh", "apart", "device")
FREE += ("reward_seconds", "reward_threads", "slots")
PEAKS = {"all params": 1e-6, "adapters": 1e-5}  # default learning rates, of TRL's GRPOConfig and of its guides
GAPS = {"fp64": 1e-9, "fp32": 1e-3}  # the largest difference, in nats, between the two sides that `--check` allows


def arguments(argv=None) -> argparse.Namespace:
    """Read the options."""
    parser = Parser(prog="python -m scaling.posttrain", description=__doc__)
    parser.add_argument("--model", required=True, help=HELP)
    parser.add_argument(
        "--prompts", required=True, type=Path, help='.jsonl of {"prompt": ...} or {"messages": ...}, or a prompt a line'
    )
    parser.add_argument("--reward", required=True, help="FILE.py with def score(prompt, answer, row), or FILE.py:NAME")
    parser.add_argument("--tokenizer", help="bytes, a tokenizer.json, or a folder with one (default: the model's own)")
    parser.add_argument("--out", default="run", help="folder of checkpoints and metrics.jsonl (default run)")
    parser.add_argument("--train-mesh", default="X=1", help="mesh that trains: axes of P, X, C, Y, E (default X=1)")
    parser.add_argument("--serve-mesh", default="Y=1", help="mesh that draws: axes of Y, Z, C, E (default Y=1)")
    parser.add_argument("--apart", action="store_true", help="give the serving mesh ranks of its own")
    parser.add_argument("--staleness", type=integer(0, 100), default=0, help="updates that the weights that draw lag")
    parser.add_argument("--prompts-per-step", type=integer(1), default=8, help="prompts of a step (default 8)")
    parser.add_argument("--group", type=integer(2, 4096), default=8, help="answers to each prompt (default 8)")
    parser.add_argument("--max-new-tokens", type=integer(1), default=32, help="longest answer (default 32)")
    parser.add_argument("--eos-id", type=integer(0), help="the id that ends an answer (default: the model's own)")
    parser.add_argument(
        "--clip-low", type=number(0, 1), default=0.2, help="ratios are clipped at 1 - this (default 0.2)"
    )
    parser.add_argument("--clip-high", type=number(0, 100), default=0.2, help="and at 1 + this (default 0.2)")
    parser.add_argument(
        "--beta", type=number(0, 100), default=0.0, help="weight of KL(policy || first model) (default 0)"
    )
    parser.add_argument(
        "--mean", choices=("token", "sequence"), default="token",
        help="the loss is a mean over all tokens, or over answers of each one's mean over its tokens (default token)",
    )  # fmt: skip
    parser.add_argument("--no-std", action="store_true", help="advantages are rewards minus their mean: REINFORCE")
    parser.add_argument("--reward-seconds", type=number(0.001, 1e6), default=60.0, help="for one reward (default 60)")
    parser.add_argument(
        "--reward-threads", type=integer(1, 1024), default=1,
        help="rewards computed at the same time, by threads: score must allow it (default 1)",
    )  # fmt: skip
    parser.add_argument("--slots", type=integer(1), help="answers drawn at a time, which the cache has room for (all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the ranks (default cpu)")
    parser.add_argument("--check", action="store_true", help="compare both sides' log-probabilities at learning rate 0")
    add_flags(parser, STEP)
    return parser.parse_args(argv)


@complaining(ValueError, ArithmeticError, OSError, launch.RankError)
def main(argv=None) -> int:
    """Run the command; return the exit code."""
    args = arguments(argv)
    config, weights = config_and_weights(args.model)
    folder = weights or args.model
    by = tokenizer(args.tokenizer or "bytes")
    if weights and not args.tokenizer:
        by = tokenizer_of(folder, config.V)
    given = {name: getattr(args, name) for name in STEP}
    given |= options_of_adapters(args.lora_from, config)
    if args.lr is None:  # a run keeps the rate that it was begun with
        before = begun_with(Path(args.out))[1] if args.resume else {}
        args.lr = given["lr"] = float(before.get("lr", PEAKS["adapters" if given["lora"] else "all params"]))
    given |= {"lr": 0.0, "steps": 1, "save_every": 0} if args.check else {}
    end = chosen_end(by, args.eos_id)
    ends = ends_of(folder, by) if weights and args.eos_id is None else ()
    ends = ends or tuple(id for id in (end,) if id != NO_END)
    by_name = by.name if by.identity else ""
    given |= {"batch": args.prompts_per_step * args.group, "weights": weights, "tokenizer": by_name, "eos_id": end}
    settings = Settings(config, str(args.prompts), args.out, **given)
    clip = Clip(args.clip_low, args.clip_high, args.beta)
    asked = LoopOptions(
        parse_mesh(args.train_mesh), parse_mesh(args.serve_mesh), args.apart, args.group, args.max_new_tokens, ends,
        clip, args.mean, not args.no_std, args.staleness, args.reward_seconds, args.reward_threads,
        args.slots, args.reward.partition(":")[0],
    )  # fmt: skip
    check_meshes(settings, asked)
    prompts, score = read_prompts(args.prompts, by, args.seq - args.max_new_tokens), reward_of(args.reward)
    kept = {name: value for name, value in vars(args).items() if name not in FREE}
    files = {
        name: blake2b(Path(path).read_bytes()).hexdigest()
        for name, path in (("prompts", args.prompts), ("reward", asked.reward))
    }
    made_with = {"posttrain": {name: str(value) for name, value in (kept | files).items()}}
    train, serve = asked.ranks()
    world = {"W": max(train.stop, serve.stop)}
    out = Path(args.out)
    if args.check:
        return report_gap(run_on_ranks(world, args.device, settings, asked, prompts, score, by, None), args.dtype)
    with on_signals(stopper(out)), locked(out):
        stop = touched(out / STOP)
        check_resumable(out, settings, made_with["posttrain"])
        keep_options(out, settings, folder, args.train_mesh, stop)
        print(f"{config.name}: {settings.batch} answers a step, peak learning rate {settings.peak:g}", flush=True)
        record = run_on_ranks(world, args.device, settings, asked, prompts, score, by, made_with)
    stopped = record["step"] < settings.steps
    end = f"{'stopped' if stopped else 'done'} at step {record['step']}: reward {record['reward']:.4g}; saved in {out}"
    print(end + (", --resume goes on" if stopped else ""))
    return 0


def run_on_ranks(world: dict[str, int], device: str, settings: Settings, asked: LoopOptions, *args: Any) -> dict:
    """Run the loop on the ranks and return the last step's record; a RewardError becomes a ValueError."""
    try:
        return launch.run(run, world, settings, asked, *args, device=device, timeout=asked.wait(settings.batch))[0]
    except launch.RankError as error:
        if wrong := str(error).partition(f"{RewardError.__name__}: ")[2]:
            raise ValueError(wrong.strip()) from None
        raise


def check_meshes(settings: Settings, asked: LoopOptions) -> None:
    """Check that the meshes and sizes fit each other and the model, before ranks are started.

    Raises:
        ValueError: The sizes do not fit the mesh or the model.
        ShardingError: The model does not divide over a mesh.
    """
    config, train, serve = settings.model, AbstractMesh(asked.train), AbstractMesh(asked.serve)
    transformer.specs(config, train, lora=settings.adapters)
    check_mesh(config, serve, "heads")
    rows, parts = settings.batch, train.size([axis for axis in "PXE" if axis in train.sizes]) * settings.microbatches
    columns = train.size([axis for axis in "CY" if axis in train.sizes])
    if "Z" in train.sizes or rows % parts or settings.seq % columns:
        raise ValueError(
            f"{rows} answers of --seq {settings.seq} on --train-mesh with {settings.microbatches} microbatches\n"
            f"  rule: answers divide over P, X, E and microbatches, tokens over C and Y, and there are no stages Z\n"
            f"  fix: give prompts times answers a multiple of {parts}, and --seq one of {columns}"
        )
    if 0 < config.max_positions < settings.seq:
        what = f"--seq {settings.seq}: {config.name} has {config.max_positions} positions"
        raise ValueError(f"{what}\n  fix: give at most --seq {config.max_positions}")
    if any(end >= config.V for end in asked.ends):
        raise ValueError(
            f"--eos-id {asked.ends[0]}: {config.name} has the ids 0..{config.V - 1}\n  fix: give one of these"
        )


def check_resumable(out: Path, settings: Settings, now: dict[str, str]) -> None:
    """Check that a run can begin in this folder, or go on from its newest checkpoint that can be read.

    Raises:
        ValueError: The folder holds another run's checkpoints, or this run has no steps left.
    """
    if newest_first(out) and not settings.resume:
        raise already_begun_error(out)
    step, before = begun_with(out)
    if step:
        check_same_options(out, before, now)
        check_steps_left(settings, step)


def begun_with(out: Path) -> tuple[int, dict[str, str]]:
    """Return the newest step of a run that can be read, and the options that it was made with; (0, {}) without one."""
    for step in newest_first(out):
        with suppress(ValueError, OSError):  # a damaged step: the ranks go on from the one before
            return step, options_at(out, step)
    return 0, {}


def report_gap(record: dict, dtype: str) -> int:
    """Print how far the two sides differ, and return 1 if they differ by more than rounding."""
    allowed = GAPS.get(dtype, float("inf"))
    wrong = record["gap_max"] > allowed
    print(f"decode and trainer: log-probabilities differ by {record['gap_mean']:.3g} nats in the mean, "
          f"{record['gap_max']:.3g} at most (K3 {record['k3']:.3g})")  # fmt: skip
    if wrong:
        print(f"that is more than {allowed:g}, the rounding of {dtype}", file=sys.stderr)
    return int(wrong)
