"""Run GRPO over two meshes, one that trains and one that draws answers. The whole loop is `run`.

    rollouts   the serving mesh draws answers with the engine, from the full distribution, and scores them
    exchange   `transfer` sends each training rank the tokens and log-probabilities of its rows, and all rewards
    update     the training mesh computes its own log-probabilities of the same tokens, and the derivative of the loss
               by them; a cross entropy with minus this derivative as its weights has the loss's gradients
    push       one planned `transfer` per leaf sends it to the serving mesh, from its training type to its serving type

The answers for step n are drawn by the weights after n - 1 - staleness updates, and carry that version. If the meshes
have separate ranks and the staleness is at least 1, the serving ranks draw while the others train. Each random number
follows from the seed, the step and the answer's index, so all pairs of meshes give the same losses.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import optim, tree
from scaling.collectives import all_reduce, shard, transfer
from scaling.configs import Config
from scaling.mesh import TIMEOUT, AbstractMesh, Mesh
from scaling.optim.clipping import norm_and_squares
from scaling.posttrain import losses
from scaling.posttrain.losses import PLAIN, Clip, Rollouts
from scaling.posttrain.rewards import Prompt, number_of, prompts_of_step, score_answers
from scaling.serve import generation
from scaling.serve import types as served
from scaling.serve.requests import Sampling
from scaling.spec import parse, present
from scaling.strategies import transformer
from scaling.train import checkpoint, guards
from scaling.train.durable import newest_first, point_at
from scaling.train.loop import ask_to_stop, first_intact
from scaling.train.progress import METRICS, cut_records
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import initial_params, split_frozen, trained_types, with_adapters

WHOLE = Sampling(temperature=1.0)  # the full distribution, which is also the one that is trained
IN_ROWS = dict.fromkeys(("tokens", "targets", "mask", "old"), "t[R_PXE, T_C]")
TYPES = IN_ROWS | {"rewards": "r[R]", "version": "v[]"}
ELSEWHERE = Rollouts(*[torch.empty(0)] * len(TYPES))  # replaces the answers on ranks that do not train


@dataclass(frozen=True)
class LoopOptions:
    """The options of a run that are not settings of its step; the settings' `batch` counts the answers of a step.

    Attributes:
        train: The sizes of the training mesh.
        serve: The sizes of the serving mesh.
        apart: Whether the serving mesh has separate ranks; otherwise both meshes use the first ranks in turn.
        group: The number of answers to each prompt.
        new: The most tokens of an answer.
        ends: The ids that end an answer.
        clip: The clipping of the ratio, and the weight of the KL term.
        mean: How tokens share the loss, "token" or "sequence".
        divide: Whether advantages are divided by their group's standard deviation.
        staleness: The number of updates by which the weights that draw lag behind.
        seconds: The seconds that one reward may take.
        threads: The number of rewards that are computed at the same time.
        slots: The answers that are drawn at a time, for which the cache has room; None draws all of a step's at once.
        reward: The file of the reward function, for errors.
    """

    train: dict[str, int]
    serve: dict[str, int]
    apart: bool = False
    group: int = 8
    new: int = 32
    ends: tuple[int, ...] = ()
    clip: Clip = PLAIN
    mean: str = "token"
    divide: bool = True
    staleness: int = 0
    seconds: float = 60.0
    threads: int = 1
    slots: int | None = None
    reward: str = "reward.py"

    def ranks(self) -> tuple[range, range]:
        """Return (the ranks that train, the ranks that draw answers)."""
        n, m = (AbstractMesh(sizes).size() for sizes in (self.train, self.serve))
        return range(n), range(n, n + m) if self.apart else range(m)

    def wait(self, answers: int) -> float:
        """Return the seconds that ranks wait for each other where the rewards of `answers` may lie in between."""
        return TIMEOUT + self.seconds * math.ceil(answers / self.threads) * (self.staleness + 1)


class Meshes(NamedTuple):
    """The training mesh, the serving mesh, and a mesh of one rank: the serving mesh's first, which scores answers."""

    train: Any
    serve: Any
    judge: Any


def meshes_of(asked: LoopOptions, mesh) -> Meshes:
    """Make the meshes on the ranks of this run."""
    given = mesh.device, mesh.checked, TIMEOUT  # only the exchange, over all ranks, waits for rewards
    train, serve = asked.ranks()
    judge = Mesh({"W": 1}, *given, ranks=serve[:1])
    return Meshes(Mesh(asked.train, *given, ranks=train), Mesh(asked.serve, *given, ranks=serve), judge)


def run(
    mesh, settings: Settings, asked: LoopOptions, prompts: list[Prompt], score: Callable, by, made_with: dict | None
) -> dict:
    """Train on every rank of `mesh`; with `settings.resume`, go on from the newest checkpoint if there is one.

    Args:
        mesh: All ranks of the run, from which the training mesh and the serving mesh are made.
        settings: The settings of the training step.
        asked: The other options of the run.
        prompts: The prompts to answer.
        score: The reward function, score(prompt, answer, row).
        by: The tokenizer.
        made_with: What checkpoints record of the run's making; None writes no checkpoints and no metrics.

    Returns:
        The last step's record. On ranks that train it has the loss, the mean reward, the norm of gradients and the
        gap between the two meshes' log-probabilities; on all ranks it has the seconds of each part of the step.
    """
    meshes, out, first = meshes_of(asked, mesh), Path(settings.out), 0
    params: dict = {}
    state: dict = {}
    frozen: dict = {}
    steps = newest_first(out) if settings.resume and made_with else []
    queue = [ELSEWHERE] * (asked.staleness if steps else 0)
    if trains := meshes.train.member:
        optimizer, types = optimizer_of(settings), trained_types(settings, meshes.train)
        begun = initial_params(settings, meshes.train)
        frozen, params = split_frozen(settings, begun)
        reference = None
        if asked.clip.beta:
            reference = with_adapters(begun, settings, meshes.train) if frozen else tree.map(torch.clone, begun)
        state = optimizer.init(params)
        specs = {"params": types, "optimizer": optimizer.state_specs(types)}
        specs |= {"queue": [rollout_types(meshes.train) for _ in queue]}
    if steps and made_with:

        def load(step: int) -> dict:
            return checkpoint.load(out, specs, meshes.train, step)[0] if trains else {}

        check = partial(check_same_options, out, now=made_with["posttrain"])
        held, first, _ = first_intact(out, steps, mesh, partial(options_at, out), check, load)
        if trains:
            params, state = held["params"], held["optimizer"]
            queue = [Rollouts(**each) for each in held["queue"]]
    if mesh.rank == 0 and made_with:
        cut_records(out / METRICS, first)
        if first:
            point_at(out, first)
    weights = push_weights(frozen | params if trains else None, settings, meshes)
    record: dict[str, Any] = {"step": first}
    drawing = partial(draw_answers, settings=settings, asked=asked, prompts=prompts, score=score, by=by, meshes=meshes)
    for n in range(first + 1, settings.steps + 1):
        began, made = time.perf_counter(), []
        for due in range(n + len(queue), n + asked.staleness + 1):
            made.append(drawing(weights, due, version=n - 1))
        rolled = time.perf_counter()
        if not queue:  # this step needs these answers
            queue, made = [send_rollouts(each, meshes, settings) for each in made], []
        batch = queue.pop(0)
        if trains:
            update = (settings, asked, meshes.train, optimizer, frozen, reference)
            params, state, record = update_policy(params, state, batch, n, *update)
        trained = time.perf_counter()
        queue += [send_rollouts(each, meshes, settings) for each in made]
        weights = push_weights(frozen | params if trains else None, settings, meshes)
        ends = time.perf_counter()
        record |= {"seconds_rollout": rolled - began, "seconds_train": trained - rolled, "seconds_push": ends - trained}
        ends_here = bool(made_with) and bool(ask_to_stop(out, mesh).any())
        saves = n == settings.steps or ends_here or (settings.save_every and n % settings.save_every == 0)
        if made_with and trains and saves:
            held = {"params": params, "optimizer": state, "queue": [each._asdict() for each in queue]}
            specs["queue"] = [rollout_types(meshes.train) for _ in queue]
            checkpoint.save(out, held, specs, meshes.train, n, keep=settings.keep, made_with=made_with)
        if mesh.rank == 0 and made_with:
            write_record(record, out)
        if ends_here:
            break
    return record


def options_at(out: Path, step: int) -> dict[str, str]:
    """Return the options of this command with which a step was made; {} for a step of another command."""
    return checkpoint.index(out, step).get("made_with", {}).get("posttrain", {})


def check_same_options(out: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise a ValueError if a checkpoint's options, prompts or reward differ from those of this run."""
    if other := [name for name in now if before.get(name) != now[name]]:
        name = other[0]
        raise ValueError(
            f"{out}: was begun with {name} {before.get(name, 'unknown')}, not {now[name]}\n"
            "  fix: give the same options and files, or another --out"
        )


def rollout_types(mesh) -> dict[str, str]:
    """Return the types of `Rollouts` on a training mesh, where each rank has the rows and tokens that it trains on."""
    return {name: str(present(each, mesh)) for name, each in TYPES.items()}


def draw_answers(
    weights: dict | None, step: int, version: int, *, settings, asked: LoopOptions, prompts, score, by, meshes: Meshes
) -> dict[str, Tensor]:
    """Draw and score the answers of a step; return the fields of `Rollouts`, whole, on each rank of the serving mesh.

    Only the rank that scores has the rewards, and ranks outside the serving mesh have no field.
    """
    if not meshes.serve.member:
        return {}
    rows = prompts_of_step(prompts, settings.seed, step, settings.batch // asked.group)
    rows = [prompt for prompt in rows for _ in range(asked.group)]
    seeds = [number_of(settings.seed, step, i) for i in range(len(rows))]
    given: dict[str, Any] = {"seed": seeds, "stop": asked.ends, "slots": asked.slots}
    given |= {"mesh": meshes.serve if meshes.serve.size() > 1 else None}
    texts = [prompt.ids for prompt in rows]
    drawn: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    for tokens in generation.stream(weights or {}, texts, settings.model, asked.new, WHOLE, **given):
        for token in tokens:
            drawn[token.row].append(token.id)
            logprobs[token.row].append(token.logprob)
    shape = len(rows), settings.seq + 1
    ids, mask, old = (torch.zeros(shape, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.float64))
    for i, text in enumerate(texts):
        answer = slice(len(text), len(text) + len(drawn[i]))
        ids[i, : answer.stop] = torch.tensor([*text, *drawn[i]])
        old[i, answer] = torch.tensor(logprobs[i], dtype=torch.float64)
        mask[i, answer] = True
    found = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": mask[:, 1:], "old": old[:, 1:]}
    found["version"] = torch.tensor(version)
    if meshes.judge.member:
        how = asked.seconds, Path(asked.reward), asked.threads
        rewards = score_answers(score, rows, [*map(by.decode, drawn)], *how)
        found["rewards"] = torch.tensor(rewards, dtype=torch.float64)
    return {name: x.contiguous().to(meshes.serve.device) for name, x in found.items()}


def send_rollouts(made: dict[str, Tensor], meshes: Meshes, settings: Settings) -> Rollouts:
    """Send the answers of `draw_answers` to the training mesh; return this rank's part, and ELSEWHERE on other ranks.

    Raises:
        ValueError: An answer has ids outside the vocabulary.
    """
    found = {}
    for name, kind in rollout_types(meshes.train).items():
        source = meshes.judge if name == "rewards" else meshes.serve
        x = transfer(f"{parse(kind).whole()} -> {kind}", made.get(name), source, meshes.train)
        found |= {name: x} if x is not None else {}
    if not found:
        return ELSEWHERE
    if bool((torch.maximum(found["tokens"], found["targets"]) >= settings.model.V).any()):
        what = f"an answer has ids outside 0..{settings.model.V - 1}: padding of the vocabulary was drawn"
        raise ValueError(f"{what}\n  fix: report this; no option leads to it")
    return Rollouts(**found)


def update_policy(
    params: dict, state: dict, batch: Rollouts, n: int, settings: Settings, asked: LoopOptions, mesh, optimizer,
    frozen: dict, reference: dict | None,
) -> tuple[dict, dict, dict[str, Any]]:  # fmt: skip
    """Make one update on the training mesh; return (params, state, the record of step n).

    `frozen` has the params that are not trained, {} if all are. `reference` has the params of the KL term, or None.
    """
    config, types, lora, any_mesh = settings.model, trained_types(settings, mesh), settings.adapters, mesh.optional
    if (age := n - 1 - int(batch.version)) != min(asked.staleness, n - 1):
        what = f"step {n}: its answers are of weights {age} updates old, not of {asked.staleness}"
        raise ValueError(f"{what}\n  fix: report this; no option leads to it")
    tokens, targets, mask, old = batch[:4]
    A = losses.advantages(batch.rewards, asked.group, asked.divide)
    A = shard("A[R] -> A[R_PXE]", A, any_mesh)[:, None].expand(mask.shape)
    lengths = all_reduce("n[R_PXE] {U_C} -> n[R_PXE]", mask.sum(1).double(), any_mesh)
    drawn = all_reduce("n[] {U_PXE} -> n[]", lengths.sum(), any_mesh)
    share = losses.shares(mask, lengths, drawn if asked.mean == "token" else len(batch.rewards), asked.mean)
    logprobs = transformer.logprobs(frozen | params, tokens, targets, config, mesh, lora=lora).double()
    ref = torch.zeros_like(logprobs)
    if reference is not None:
        ref = transformer.logprobs(reference, tokens, targets, config, mesh).double()
    of = partial(losses.loss, old=old, reference=ref, A=A, share=share, clip=asked.clip)
    slope, loss = torch.func.grad_and_value(of)(logprobs)
    ended = torch.isin(targets, torch.tensor(asked.ends, device=mesh.device)) & mask
    sums = {"loss": loss, "shares": share.sum(), "kl": (share * losses.k3(ref - logprobs)).sum(), "ended": ended.sum()}
    sums |= losses.gap_sums(logprobs, old, A, mask, asked.clip)
    terms = torch.stack([each.double() for each in sums.values()])
    sums = dict(zip(sums, all_reduce("Sums[S] {U_PXEC} -> Sums[S]", terms, any_mesh), strict=True))
    if abs(float(sums["shares"]) - 1) > 1e-9:
        what = f"step {n}: the tokens' shares of the loss add up to {float(sums['shares']):g}, not to 1"
        raise ValueError(f"{what}\n  fix: report this; no option leads to it")
    kept = torch.promote_types(next(iter(tree.leaves(params))).dtype, torch.float32)
    scale = float(state.get("scale", 1.0))
    given = settings.step_options(mesh.sizes) | {"sums": kept, "scale": scale, "mean": False}
    _, grads = transformer.loss_and_grads(frozen | params, tokens, targets, config, mesh, weights=-slope, **given)
    norm, squares = norm_and_squares(grads, types, mesh)
    finite = guards.check_scaled(state, sums["loss"], norm, squares, types, mesh, n)
    clipped = optim.scaled_to(grads, norm, settings.clip, donate=True)
    params, state = optimizer.update(clipped, state, params, donate=True, **finite)
    rows, largest = len(batch.rewards), torch.where(mask, logprobs - old, 0.0).abs().max()
    record = {"step": n, "loss": float(sums["loss"]), "reward": float(batch.rewards.mean())}
    record |= {"grad_norm": float(norm), "age": age}
    record |= {"length": float(drawn) / rows, "ended": float(sums["ended"]) / rows}
    record |= {"kl": float(sums["kl"])} if reference is not None else {}
    record |= {"loss_scale": scale} if "scale" in state else {}
    record |= {"gap_max": float(guards.gather_over_ranks(largest[None], mesh).max())}
    each_token = ("gap_mean", "k3", "clipped_high", "clipped_low")
    return params, state, record | {name: float(sums[name] / drawn.clamp(min=1)) for name in each_token}


def push_weights(params: dict | None, settings: Settings, meshes: Meshes) -> dict | None:
    """Send every leaf, with adapters merged, to the serving mesh; return the params there, and None on other ranks."""
    lines, found = push_lines(settings.model, meshes.train, meshes.serve), []
    leaves: list = [None] * len(lines)
    if params is not None:
        leaves = [W.detach() for W in tree.leaves(with_adapters(params, settings, meshes.train))]
    for (_, line, into), W in zip(lines, leaves, strict=True):
        found.append(transfer(line, W, meshes.train, meshes.serve, into=into))
    return tree.unflatten(transformer.specs(settings.model, meshes.train), found) if meshes.serve.member else None


def push_lines(config: Config, train, serve) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (leaf, the line of its reshard from the training to the serving mesh, its whole shape) for each leaf."""
    ours, theirs = transformer.specs(config, train), served.specs(config, serve)
    pairs = zip(tree.named_leaves(ours).items(), tree.leaves(theirs), strict=True)
    return [(where, f"{text} -> {other}", parse(text).global_shape(config.sizes)) for (where, text), other in pairs]


def write_record(record: Mapping[str, Any], out: Path) -> None:
    """Print a step's record, and append it to metrics.jsonl."""
    with (out / METRICS).open("a") as file:
        file.write(json.dumps(record) + "\n")
    shown = {name: f"{record[name]:.4g}" for name in ("loss", "reward", "gap_max", "length", "ended", "grad_norm")}
    print(f"step {record['step']:>5}  " + "  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
