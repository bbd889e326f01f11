"""Run GRPO over two meshes, one that trains and one that draws answers. The whole loop is `run`.

    rollouts   the serving mesh draws answers with the engine, from the full distribution, and scores them
    exchange   `transfer` sends the tokens, their log-probabilities and the rewards to the training mesh
    update     the training mesh computes its own log-probabilities of the same tokens, and the derivative of the loss
               by them; a cross entropy with minus this derivative as its weights has the loss's gradients
    push       one planned `transfer` per leaf sends it to the serving mesh, from its training type to its serving type

The answers for step n are drawn by the weights after n - 1 - staleness updates, and carry that version. If the meshes
have separate ranks and the staleness is at least 1, the serving ranks draw while the others train. Each random number
follows from the seed, the step and the answer's index, so all pairs of meshes give the same losses.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import optim, tree
from scaling.collectives import all_reduce, transfer
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.posttrain import losses
from scaling.posttrain.losses import PLAIN, Clip, Rollouts
from scaling.posttrain.rewards import Prompt, number_of, prompts_of_step, score_answers
from scaling.serve import generation
from scaling.serve import types as served
from scaling.serve.requests import Sampling
from scaling.spec import parse, present
from scaling.strategies import transformer
from scaling.train import checkpoint, guards
from scaling.train.progress import METRICS
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import initial_params, local, split_frozen, trained_types, with_adapters

WHOLE = Sampling(temperature=1.0)  # the full distribution, which is also the one that is trained
TYPES = dict(zip(Rollouts._fields, ("t[R, T]", "t[R, T]", "m[R, T]", "p[R, T]", "r[R]", "v[]"), strict=True))

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
    reward: str = "reward.py"

    def ranks(self) -> tuple[range, range]:
        """Return (the ranks that train, the ranks that draw answers)."""
        n, m = (AbstractMesh(sizes).size() for sizes in (self.train, self.serve))
        return range(n), range(n, n + m) if self.apart else range(m)


class Meshes(NamedTuple):
    """The training mesh, the serving mesh, and a mesh of one rank: the serving mesh's first, which scores answers."""

    train: Any
    serve: Any
    judge: Any


def meshes_of(asked: LoopOptions, mesh) -> Meshes:
    """Make the meshes on the ranks of this run."""
    given = mesh.device, mesh.checked, mesh.timeout
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
    if steps := checkpoint.complete_steps(out) if settings.resume else []:
        first = steps[-1]
    queue = [ELSEWHERE] * (asked.staleness if first else 0)
    if trains := meshes.train.member:
        optimizer, types = optimizer_of(settings), trained_types(settings, meshes.train)
        begun = initial_params(settings, meshes.train)
        frozen, params = split_frozen(settings, begun)
        reference = None
        if asked.clip.beta:
            reference = with_adapters(begun, settings, meshes.train) if frozen else tree.map(torch.clone, begun)
        state = optimizer.init(params)
        specs = {"params": types, "optimizer": optimizer.state_specs(types)}
        specs |= {"queue": [dict(TYPES) for _ in queue]}
        if first:
            held, _ = checkpoint.load(out, specs, meshes.train, first)
            params, state = held["params"], held["optimizer"]
            queue = [Rollouts(**each) for each in held["queue"]]
    weights = push_weights(frozen | params if trains else None, settings, meshes)
    record: dict[str, Any] = {"step": first}
    drawing = partial(draw_answers, settings=settings, asked=asked, prompts=prompts, score=score, by=by, meshes=meshes)
    for n in range(first + 1, settings.steps + 1):
        began, made = time.perf_counter(), []
        for due in range(n + len(queue), n + asked.staleness + 1):
            made.append(drawing(weights, due, version=n - 1))
        rolled = time.perf_counter()
        if not queue:  # this step needs these answers
            queue, made = [send_rollouts(each, meshes, settings, asked) for each in made], []
        batch = queue.pop(0)
        if trains:
            update = (settings, asked, meshes.train, optimizer, frozen, reference)
            params, state, record = update_policy(params, state, batch, n, *update)
        trained = time.perf_counter()
        queue += [send_rollouts(each, meshes, settings, asked) for each in made]
        weights = push_weights(frozen | params if trains else None, settings, meshes)
        ends = time.perf_counter()
        record |= {"seconds_rollout": rolled - began, "seconds_train": trained - rolled, "seconds_push": ends - trained}
        if made_with and trains and (n == settings.steps or (settings.save_every and n % settings.save_every == 0)):
            held = {"params": params, "optimizer": state, "queue": [each._asdict() for each in queue]}
            of_queue = {"queue": [dict(TYPES) for _ in queue]}
            checkpoint.save(out, held, specs | of_queue, meshes.train, n, keep=settings.keep, made_with=made_with)
        if mesh.rank == 0 and made_with:
            write_record(record, out)
    return record


def draw_answers(
    weights: dict | None, step: int, version: int, *, settings, asked: LoopOptions, prompts, score, by, meshes: Meshes
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Draw and score the answers of a step on the serving mesh; return None on ranks outside it.

    Returns:
        int64[R, 3 + S], whose rows hold the version, the prompt's length, the whole length and the ids; the
        log-probabilities of the ids, 0 in the prompt; and the rewards, on the rank that scores.
    """
    if not meshes.serve.member:
        return None
    rows = prompts_of_step(prompts, settings.seed, step, settings.batch // asked.group)
    rows = [prompt for prompt in rows for _ in range(asked.group)]
    seeds = [number_of(settings.seed, step, i) for i in range(len(rows))]
    given = {"seed": seeds, "stop": asked.ends, "mesh": meshes.serve if meshes.serve.size() > 1 else None}
    texts = [prompt.ids for prompt in rows]
    ids, old = [[*text] for text in texts], [[0.0] * len(text) for text in texts]
    for tokens in generation.stream(weights or {}, texts, settings.model, asked.new, WHOLE, **given):
        for token in tokens:
            ids[token.row].append(token.id)
            old[token.row].append(token.logprob)
    S = settings.seq + 1
    whole = [[version, len(text), len(own), *own, *[0] * (S - len(own))] for text, own in zip(texts, ids, strict=True)]
    device = meshes.serve.device
    logprobs = torch.tensor([[*own, *[0.0] * (S - len(own))] for own in old], dtype=torch.float64, device=device)
    rewards = None
    if meshes.judge.member:
        answers = [by.decode(own[len(text) :]) for text, own in zip(texts, ids, strict=True)]
        found = score_answers(score, rows, answers, asked.seconds, Path(asked.reward))
        rewards = torch.tensor(found, dtype=torch.float64, device=device)
    return torch.tensor(whole, device=device), logprobs, rewards


def send_rollouts(made: tuple | None, meshes: Meshes, settings: Settings, asked: LoopOptions) -> Rollouts:
    """Send the answers of `draw_answers` to the training mesh; return them there, and ELSEWHERE on other ranks."""
    whole, old, rewards = made or (None, None, None)
    whole = transfer("t[R, S] -> t[R, S]", whole, meshes.serve, meshes.train)
    old = transfer("p[R, S] -> p[R, S]", old, meshes.serve, meshes.train)
    rewards = transfer("r[R] -> r[R]", rewards, meshes.judge, meshes.train)
    if whole is None or old is None or rewards is None:
        return ELSEWHERE
    version, begins, ends, ids = whole[0, 0], whole[:, 1:2], whole[:, 2:3], whole[:, 3:]
    at = torch.arange(1, ids.shape[1], device=ids.device)
    mask = (at >= begins) & (at < ends)
    if bool((ids >= settings.model.V).any()):
        what = f"an answer has ids outside 0..{settings.model.V - 1}: padding of the vocabulary was drawn"
        raise ValueError(f"{what}\n  fix: report this; no option leads to it")
    return Rollouts(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask, old[:, 1:].contiguous(), rewards, version)


def update_policy(
    params: dict, state: dict, batch: Rollouts, n: int, settings: Settings, asked: LoopOptions, mesh, optimizer,
    frozen: dict, reference: dict | None,
) -> tuple[dict, dict, dict[str, Any]]:  # fmt: skip
    """Make one update on the training mesh; return (params, state, the record of step n).

    `frozen` has the params that are not trained, {} if all are. `reference` has the params of the KL term, or None.
    """
    config, types, lora = settings.model, trained_types(settings, mesh), settings.adapters
    if (age := n - 1 - int(batch.version)) != min(asked.staleness, n - 1):
        what = f"step {n}: its answers are of weights {age} updates old, not of {asked.staleness}"
        raise ValueError(f"{what}\n  fix: report this; no option leads to it")
    A = losses.advantages(batch.rewards, asked.group, asked.divide)[:, None].expand(batch.mask.shape)
    share = losses.shares(batch.mask, asked.mean)
    own = [local(x.contiguous(), mesh) for x in (batch.tokens, batch.targets, batch.old, A, share)]
    tokens, targets, old, A_here, share = own
    logprobs = transformer.logprobs(frozen | params, tokens, targets, config, mesh, lora=lora).double()
    ref = torch.zeros_like(logprobs)
    if reference is not None:
        ref = transformer.logprobs(reference, tokens, targets, config, mesh).double()
    of = partial(losses.loss, old=old, reference=ref, A=A_here, share=share, clip=asked.clip)
    slope, loss = torch.func.grad_and_value(of)(logprobs)
    terms = torch.stack([loss, share.sum(), (share * losses.k3(ref - logprobs)).sum()])
    loss, total, kl = all_reduce("Sums[S] {U_PXEC} -> Sums[S]", terms, mesh.optional)
    if abs(float(total) - 1) > 1e-9:
        what = f"step {n}: the tokens' shares of the loss add up to {float(total):g}, not to 1"
        raise ValueError(f"{what}\n  fix: report this; no option leads to it")
    sums = torch.promote_types(next(iter(tree.leaves(params))).dtype, torch.float32)
    scale = float(state.get("scale", 1.0))
    given = settings.step_options(mesh.sizes) | {"sums": sums, "scale": scale, "mean": False}
    _, grads = transformer.loss_and_grads(frozen | params, tokens, targets, config, mesh, weights=-slope, **given)
    norm = optim.global_norm(grads, types, mesh)
    finite = guards.check_scaled(state, loss, norm, grads, types, mesh, n)
    clipped = optim.scaled_to(grads, norm, settings.clip, donate=True)
    params, state = optimizer.update(clipped, state, params, donate=True, **finite)
    whole = tree.unshard(logprobs, present("p[B_PXE, T_C]", mesh), mesh)
    lengths = batch.mask.sum(1).double()
    ended = torch.isin(batch.targets, torch.tensor(asked.ends, device=mesh.device)) & batch.mask
    record = {"step": n, "loss": loss.item(), "reward": batch.rewards.mean().item(), "grad_norm": norm.item()}
    record |= {"age": age, "length": lengths.mean().item(), "ended": ended.any(1).double().mean().item()}
    record |= {"kl": kl.item()} if reference is not None else {}
    record |= {"loss_scale": scale} if "scale" in state else {}
    return params, state, record | losses.gap(whole, batch.old, A, batch.mask, asked.clip)


def push_weights(params: dict | None, settings: Settings, meshes: Meshes) -> dict | None:
    """Send every leaf, with adapters merged, to the serving mesh; return the params there, and None on other ranks."""
    config, found = settings.model, {}
    types = transformer.specs(config, meshes.train)
    if params is not None:
        params = with_adapters(params, settings, meshes.train)
    for where, line, into in push_lines(config, meshes.train, meshes.serve):
        W = None if params is None else tree.named_leaves(params)[where].detach()
        found[where] = transfer(line, W, meshes.train, meshes.serve, into=into)
    if not meshes.serve.member:
        return None
    return tree.unflatten(types, [found[where] for where in tree.named_leaves(types)])


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
