"""Run the steps of a training run, with logging, guards, evaluations and checkpoints between them.

A run writes metrics.jsonl and checkpoints. When the file `stop` appears in its folder, it saves a checkpoint and ends,
without an evaluation, because torchrun and Slurm kill a run soon after they have asked it to end.
On a GPU the host launches a step before it reads the loss of the step before, so the GPU's queue does not run empty.
Each loss has been read before a checkpoint is written, an evaluation is made or replicas are compared.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scaling import optim, tree
from scaling.common.arguments import of_type
from scaling.models.params import stored_sizes
from scaling.profile.record import watched
from scaling.spec import present
from scaling.trace import Log
from scaling.train import checkpoint, guards
from scaling.train.batches import Batches, Mixture, leave_out, open_batches, prefetch
from scaling.train.durable import point_at, step_name
from scaling.train.evaluate import continuation, evaluate
from scaling.train.flight import Flight
from scaling.train.progress import Progress
from scaling.train.record import (
    begins_new_data,
    changed_data,
    check_unchanged,
    option_changes,
    order_of,
    rate_change,
    read_record,
    record_of,
    resumable_steps,
)
from scaling.train.settings import Settings, optimizer_of, rate
from scaling.train.step import (
    batch_slices,
    begin_state,
    held_types,
    initial_params,
    make_step,
    split_frozen,
    stored_layout,
    to_mesh,
    trained_types,
)

STOP = "stop"  # a file of this name in the run's folder asks it to save and end
AHEAD = {"cuda": 1}  # steps that are launched before the host reads the values of one, so that a device never waits


class Launched(NamedTuple):
    """A step whose values the host has not read.

    Attributes:
        number: Its number.
        began: When the host began it.
        lr: Its learning rate, on the device.
        log: Its trace.
        metrics: Its metrics, on the device.
        asked: What `ask_to_stop` returned after it.
    """

    number: int
    began: float
    lr: torch.Tensor
    log: Log
    metrics: dict[str, Any]
    asked: torch.Tensor


def run(mesh, settings: Settings, keep: Callable[[], None] | None = None) -> dict:
    """Train on every rank of a mesh; return {"step", "sequences", "loss", "valid"}, the latest of each.

    `keep`: rank 0 calls it once every rank has accepted the run. Nothing is written into the run's folder before that.
    """
    settings = replace(settings, lr=settings.peak)  # the record has the rate itself
    out, (_, places) = Path(settings.out), stored_layout(settings, mesh)
    optimizer, types = optimizer_of(settings), trained_types(settings, mesh)
    specs, made_with = state_specs(settings, mesh, optimizer), record_of(settings)
    frozen, own = split_frozen(settings, initial_params(settings, mesh)) if settings.adapters else ({}, None)
    loaded, start, before = load_or_init(settings, mesh, optimizer, specs, made_with, own)
    made_with["order"], made_with["packed"] = order_of(settings, before, made_with)
    train, valid = open_batches(settings, made_with["packed"])
    params, state, seen = loaded["params"], loaded["optimizer"], loaded["data"]["sequences"]
    first = seen if begins_new_data(settings, before, made_with) else loaded["data"]["begun"]
    del loaded  # else the first params and state would stay alive
    train = replace(train, sources=tuple(replace(each, order=made_with["order"]) for each in train.sources))
    train, made_with["held_out"], missing = leave_out(train, valid, before.get("held_out", []))
    lr_at = rate(settings)
    step, result = make_step(settings, mesh, optimizer, frozen), {"step": start, "sequences": seen}
    rows, tokens = batch_slices(settings.batch, settings.seq, mesh)
    coming = prefetch(train, seen - first, settings.batch, rows)
    agreed = torch.tensor([*blake2b(json.dumps(made_with).encode(), digest_size=16).digest()])
    progress, losses, pace, saving = Progress(settings, mesh), guards.Losses(), guards.Pace(), None
    ahead = 0 if settings.dtype == "fp16" else AHEAD.get(mesh.device.type, 0)
    launched: list[Launched] = []  # the steps whose values have not been read, the oldest first
    read_at = 0.0
    wait_for_ranks(mesh)
    if mesh.rank == 0:
        if keep is not None:
            keep()
        if start:
            point_at(out, start)
    progress.drop_after(start)
    wait_for_ranks(mesh)  # other ranks write into the folder after rank 0
    warn_of_data(progress, settings, train, valid, missing)
    flight = Flight(out, mesh.rank)
    for number in watched(range(start + 1, settings.steps + 1), settings.profile, mesh.rank, settings.chip):
        began = time.perf_counter()
        (batch, several), place = next(coming), seen - first
        if settings.guard_every and (number - start - 1) % settings.guard_every == 0:
            compared = {"params": params, "optimizer": state, "options and data": agreed, "batch": list(batch)}
            compared |= {"first rows": list(train.batch_at(place, slice(len(batch[0]))))}
            guards.check_replicas(compared, specs | data_types(mesh), mesh, number)
            del compared
            progress.warn(pace.slow(mesh, number) if len(pace.steps) >= 8 else "")
            began = time.perf_counter()
        lr = lr_at(state["step"])
        with flight.step(number) as log:
            *ids, documents = (x[:, tokens] for x in batch)
            part = [*(to_mesh(x, mesh) for x in ids), documents if several else None]  # whose ends the host reads
            params, state, metrics = step(params, state, part, donate=True, read=not ahead)
        seen += settings.batch
        launched.append(Launched(number, began, lr, log, metrics, ask_to_stop(out, mesh)))
        asked = len(launched) > ahead and bool(launched[0].asked.any())
        last = number == settings.steps
        evaluates = not asked and (last or (settings.eval_every and number % settings.eval_every == 0))
        saves = asked or last or (settings.save_every and number % settings.save_every == 0)
        guards_next = settings.guard_every and (number - start) % settings.guard_every == 0
        while len(launched) > (0 if evaluates or saves or guards_next else ahead):
            one = launched.pop(0)
            metrics, loss, norm = one.metrics, one.metrics["loss"].item(), one.metrics["grad_norm"].item()
            seconds, read_at = time.perf_counter() - max(one.began, read_at), time.perf_counter()
            if ahead:
                values = metrics["loss"], metrics["grad_norm"], metrics["squares"]
                guards.check_finite(*values, types, mesh, one.number)
            waited = guards.wait_seconds(one.log) if mesh.device.type == "cpu" else None
            pace.add(seconds, waited or 0.0)
            result |= {"step": one.number, "loss": loss, "sequences": seen}
            record = progress.record(one.number, loss, norm, seconds, waited) | {"lr": one.lr.item()}
            record |= {"expert_load": expert_shares(one.log, mesh)} if one.log.loads else {}
            record |= {"loss_scale": metrics["scale"]} if "scale" in metrics else {}
            if evaluates and not launched:
                loss_on_valid = evaluate(frozen | params, valid, settings, mesh, partial(ask_to_stop, out, mesh))
                if not (asked := loss_on_valid is None):
                    result["valid"] = record["valid"] = loss_on_valid
                    record |= {"sample": continuation(frozen | params, settings, mesh)} if settings.sample else {}
            progress.report(record)
            if settings.norms:
                norms = guards.leaf_norms(metrics["squares"], types, mesh).tolist()
                progress.norms(one.number, tree.named_leaves(types), norms)
            progress.warn(losses.jump(loss, one.number))
        if saves or asked:
            if saving is not None:
                saving.result()
            data = {"sequences": seen, "begun": first, "seed": settings.seed}
            saved = {"params": params, "optimizer": state, "data": data}
            how = {"keep": settings.keep, "places": places, "made_with": made_with}
            saving = checkpoint.save(out, saved, specs, mesh, number, async_op=True, **how)
            del saved
        if asked:
            break
    if saving is not None:
        saving.result()
    return result


def warn_of_data(
    progress: Progress, settings: Settings, train: Mixture, valid: Sequence[Batches], missing: int
) -> None:
    """Warn of held-out text that has moved, of tokens that are left out, and of what reading the data has noted.

    `missing` is the number of ranges held out earlier that were not found, as `leave_out` returns it.
    """
    if missing:
        progress.warn("text that was held out for validation has moved in the data, so the run may train on it now")
    lost = sum(source.packing.lost for source in train.sources if source.packing)
    if lost:
        progress.warn(
            f"{lost:,} tokens that count are more than {settings.seq} after the beginning of their document, and are "
            "left out\n  fix: give a longer --seq"
        )
    for note in dict.fromkeys(note for each in valid for note in each.corpus.notes):
        progress.warn(note)


def load_or_init(
    settings: Settings,
    mesh,
    optimizer: optim.Optimizer,
    specs: dict,
    made_with: Mapping[str, Any],
    params: dict | None = None,
) -> tuple[dict, int, dict[str, Any]]:
    """Load or make the (state, step, record) that a run begins with; no rank holds more than its shards.

    A resumed run loads them from its newest undamaged checkpoint. A new run begins at step 0 with an empty record. Its
    params are `params` if they are given, or else the weights of a folder or drawn by the seed.

    Raises:
        ValueError: The checkpoint has other options, data, model or tokenizer, or every checkpoint is damaged.
    """
    if steps := resumable_steps(settings):
        state, step, before = load_first_intact(settings, steps, made_with, specs, mesh)
        notes = [option_changes(before, made_with), rate_change(settings, before, step)]
        if begins_new_data(settings, before, made_with):
            notes.append(f"a new epoch of other data: {changed_data(settings, before, made_with)}")
        if mesh.rank == 0 and any(notes):
            print(f"from step {step + 1} on: {'; '.join(filter(None, notes))}", flush=True)
        return state, step, before
    params = initial_params(settings, mesh) if params is None else params
    data = {"sequences": 0, "begun": 0, "seed": settings.seed}
    return {"params": params, "optimizer": begin_state(settings, mesh, optimizer, params), "data": data}, 0, {}


def load_first_intact(
    settings: Settings, steps: Sequence[int], made_with: Mapping[str, Any], specs: dict, mesh
) -> tuple[dict, int, dict[str, Any]]:
    """Return (state, step, record) of the first of these steps that every rank can load.

    Raises:
        ValueError: All steps are damaged, or a step was made with other options, data, model or tokenizer.
    """
    out, config = Path(settings.out), settings.model
    _, places = stored_layout(settings, mesh)
    sizes = stored_sizes(config, places) | ({"r": settings.lora} if settings.lora else {})

    def load(step: int) -> dict:
        state, _ = checkpoint.load(out, specs, mesh, step, places=places)
        tree.check(state["params"], specs["params"], sizes, mesh)
        of_type(f"{out / step_name(step)}: the index's place in the data", state["data"]["sequences"], int)
        return state

    check = partial(check_unchanged, settings, now=made_with)
    return first_intact(out, steps, mesh, partial(read_record, out), check, load)


def first_intact(
    out: Path, steps: Sequence[int], mesh, record_at: Callable, check: Callable, load: Callable
) -> tuple[dict, int, dict[str, Any]]:
    """Return (state, step, record) of the first of these steps that every rank of the mesh can load.

    A warning names each damaged step.

    Args:
        out: The run's folder.
        steps: The steps to try.
        mesh: The mesh of all ranks.
        record_at: Returns the record of a step, or raises ValueError or OSError if it is damaged.
        check: Takes a record, and raises a ValueError if the run may not go on from it.
        load: Returns the state of a step, or raises ValueError or OSError if it is damaged.

    Raises:
        ValueError: All steps are damaged, or `check` has raised it.
    """
    first = ""
    for step in steps:
        before, state, damage = {}, {}, ""
        try:
            before = record_at(step)
        except (ValueError, OSError) as error:
            damage = str(error)
        if not damage:
            check(before)
            try:
                state = load(step)
            except (ValueError, OSError) as error:
                damage = str(error)
        failed = guards.gather_over_ranks(torch.tensor([bool(damage)], dtype=torch.int64), mesh).flatten().tolist()
        if not any(failed):
            return state, step, before
        first = first or damage
        if failed.index(1) == mesh.rank:
            print(f"warning: step {step} is damaged: {damage.splitlines()[0]}", file=sys.stderr, flush=True)
    reason = first.splitlines()[0] if first else "another rank says why"
    raise ValueError(
        f"{out}: no checkpoint of steps {', '.join(map(str, steps))} is whole: {reason}\n"
        "  fix: put the files back, or begin another run with another --out"
    )


def state_specs(settings: Settings, mesh, optimizer: optim.Optimizer) -> dict:
    """Return the types of a run's params and optimizer state; the numbers in a state have none."""
    updated = optimizer.state_specs(trained_types(settings, mesh))
    return {"params": held_types(settings, mesh), "optimizer": updated}


def data_types(mesh) -> dict:
    """Return the types of the tensors by which the guards compare the ranks' data.

    Ranks along P, X and E train on different rows, so these have no replicas along them. All ranks therefore also read
    the first rows of the batch, and have a digest of the run's record, which holds the options and each file's digest.
    """
    rows = present("t[B_PXE, T]", mesh)
    return {"options and data": "digest[N]", "batch": [rows] * 3, "first rows": ["t[B, T]"] * 3}


def expert_shares(log: Log, mesh) -> list[float]:
    """Return each expert's share of the tokens routed in a step, over all layers and microbatches."""
    load = torch.stack(log.loads).sum(0)
    if mesh.sizes.get("Z", 1) > 1:  # a stage has counted its own layers alone, and all its ranks have the same counts
        load = guards.gather_over_ranks(load, mesh).sum(0)
    return [round(share, 4) for share in (load / load.sum()).tolist()]


def wait_for_ranks(mesh) -> None:
    """Wait until every rank has called this function. A rank that has refused the run never calls it."""
    guards.gather_over_ranks(torch.zeros(1, dtype=torch.int64), mesh)


def ask_to_stop(out: Path, mesh) -> torch.Tensor:
    """Return int64[world, 1], not 0 where a rank has seen the stop file, for which rank 0 alone looks."""
    asked = mesh.rank == 0 and (out / STOP).exists()
    return guards.gather_on_device(torch.tensor([asked], dtype=torch.int64), mesh)
