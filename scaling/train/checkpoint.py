"""Save and load checkpoints that are sharded, atomic, independent of the mesh, and readable by DCP (see `dcp`).

    folder/step-000100/     __0.distcp, ...      the blocks that a rank is the first to hold: no block twice
                            .metadata            each leaf's dtype, shape and blocks, as torch's own `dcp.load` reads it
                            index.json           the step, the mesh, the leaves' types, ints and strings; the record of
                                                 the run (`record`); the checksums of each file and of the index itself
    folder/latest           the newest complete step

A step is written under another name and renamed when every rank's blocks are on disk, so a run that is killed at any
moment leaves the last complete step intact. Loading maps the files into memory and reads only the blocks that overlap
this rank's shards. Each file must be the one that the index names. A block that a rank uses whole is compared with its
checksum, and `verify` compares all blocks. Loading never executes code from the files.
"""

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from scaling import tree
from scaling.collectives.checked import alike
from scaling.common.arguments import flag, whole
from scaling.mesh.lost import naming
from scaling.models.params import IN_ORDER, Places
from scaling.spec import Spec, parse
from scaling.train import dcp
from scaling.train.blocks import SavedLeaf, own_blocks, writers
from scaling.train.durable import INDEX, begin_step, checksum_of, complete_steps, latest_named, step_name, write_step
from scaling.train.guards import check_same
from scaling.train.shard_file import NO_SUMS

THREAD = "checkpoint"  # the name of the threads that write


def save(
    folder,
    state,
    specs,
    mesh,
    step: int,
    *,
    async_op: bool = False,
    keep: int | None = None,
    places: Places = IN_ORDER,
    made_with: Mapping[str, Any] | None = None,
) -> Future | None:
    """Write a state as step `step`. All ranks call it, on one file system.

    Args:
        folder: The run's folder.
        state: A tree of this rank's shards, ints, floats and strings.
        specs: The types of the shards; ints, floats and strings have none.
        mesh: The mesh of the shards.
        step: The number of the step.
        async_op: Return a Future at once, after the tensors have been copied. Ask for its result before the program
            ends, because a program that ends does not wait long for other ranks' files.
        keep: The number of complete steps to keep; None keeps all.
        places: {"L": the index of each stored position in the whole, -1 for padding} for each dim that is stored in
            another order or padded, such as the layers of uneven stages. The checkpoint holds the whole dim.
        made_with: A record of JSON values, which `index` returns for this step.

    Raises:
        ValueError: The state does not match its specs.
        ArithmeticError: Replicas differ, which is found on a checked mesh.
        OSError: A file could not be written; the message names the path and the bytes.
    """
    whole(0, step=step)
    whole(keep=1 if keep is None else keep)
    flag(async_op=async_op)
    folder, named = Path(folder), typed_leaves(state, specs)
    values = {where: leaf for where, (leaf, spec) in named.items() if spec is None}
    check_restorable(state, specs, values)
    typed = {where: (leaf, spec) for where, (leaf, spec) in named.items() if spec is not None}
    own, leaves = [], {}
    for where, (leaf, spec) in typed.items():
        shape, blocks = own_blocks(leaf, spec, mesh, places)
        leaves[where] = SavedLeaf(leaf.dtype, shape, [])
        own += [(dcp.name_of(where), at, _on_cpu(block, copy=async_op)) for at, block in blocks]
    types = {where: str(spec) for where, (_, spec) in typed.items()}
    index = {"step": step, "mesh": dict(mesh.sizes), "types": types, "values": values}
    index |= {} if made_with is None else {"made_with": dict(made_with)}
    alike(mesh, f"checkpoint.save of step {step}", folder=str(folder), keep=keep, state=named, made_with=made_with)
    if mesh.checked and leaves:  # only one of the replicas is written, so they must be equal
        check_same([(where, leaf, spec) for where, (leaf, spec) in typed.items()], mesh, step)
    ranks = writers((spec for _, spec in typed.values()), mesh) if mesh.rank == 0 else []
    if mesh.rank == 0:
        begin_step(folder, step)
    if (group := mesh.group(tuple(mesh.sizes))).pg is not None:
        with naming(f"checkpoint.save of step {step}", group.pg):
            dist.barrier(group.pg)
    write = partial(write_step, folder, own, leaves, ranks, index, mesh.rank, keep)
    return submit(write) if async_op else write()


def check_restorable(state, specs, values: Mapping[str, Any]) -> None:
    """Check that loading would restore every number and string to its key, and find each tensor by its name.

    Raises:
        ValueError: Numbers or strings are outside nested dicts, or two tensors have the same name.
    """
    named = tree.named_leaves(specs, "state")
    try:
        kept, names = _with_values(tree.map(lambda _: 0, specs), values), {*map(dcp.name_of, named)}
    except (ValueError, TypeError, AttributeError):  # a key that cannot be read back
        kept, names = None, {*named}
    if tree.structure(kept) != tree.structure(state):
        raise ValueError(
            f"the state has numbers or strings at {', '.join(values)}\n"
            "  rule: they stand in nested dicts, under names without quotes\n  fix: put them into a dict of the state"
        )
    if len(names) < len(named):
        raise ValueError(
            f"two of {', '.join(named)} have one name, their keys joined by dots\n  fix: keys without dots"
        )


def _on_cpu(block: Tensor, copy: bool) -> Tensor:
    """Return a block on the CPU in a storage of the block's size; with `copy`, never in the block's storage."""
    found = block.detach().to("cpu").contiguous()
    alike = found.untyped_storage().nbytes() == found.nbytes
    return found if alike and not (copy and found.data_ptr() == block.data_ptr()) else found.clone()


def submit(work: Callable[[], None]) -> Future:
    """Run `work` in a thread after all work submitted earlier, so that steps are completed in order."""
    before = [thread for thread in threading.enumerate() if thread.name == THREAD]
    future: Future = Future()

    def run() -> None:
        for thread in before:
            thread.join()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=THREAD).start()
    return future


def load(
    folder, specs, mesh, step: int | None = None, *, places: Places = IN_ORDER, among: bool = False
) -> tuple[Any, int]:
    """Load a step and return (state, step), where each leaf is this rank's shard on the mesh's device.

    The mesh and the types may differ from the saved ones; the leaves and their whole shapes may not. Ints, floats and
    strings come back unchanged.

    Args:
        folder: The run's folder.
        specs: The types of the leaves to load.
        mesh: The mesh of the shards.
        step: The number of the step; None loads the latest complete one.
        places: As in `save`, for this mesh.
        among: Whether the checkpoint may hold other leaves, such as the optimizer's state; they are not read.

    Raises:
        FileNotFoundError: There is no such step.
        ValueError: A leaf or a file is missing, misshaped or damaged; the message names it.
    """
    step = latest(folder) if step is None else step
    whole(0, step=step)
    content, path = index(folder, step), Path(folder) / step_name(step)
    sums = content.get("files", NO_SUMS)
    state = dcp.load(path, specs, mesh, places=places, among=among, verified=True, sums=sums)
    return _with_values(state, content["values"]), content["step"]


def index(folder, step: int) -> dict:
    """Return the content of a step's index.json.

    Raises:
        FileNotFoundError: The step is not complete.
        ValueError: The index is damaged.
    """
    path = Path(folder) / step_name(step) / INDEX
    if not path.is_file():
        what = f"{path.parent}: there is no complete checkpoint here"
        raise FileNotFoundError(f"{what}\n  fix: name a step that is there")
    content, wrong = {}, ""
    try:
        content = json.loads(path.read_bytes())
        _with_values({}, content["values"])
        whole(0, step=content["step"])
        if "checksum" in content and checksum_of(content) != content["checksum"]:
            wrong = "its content is not what was written"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if wrong:
        raise ValueError(f"{path}: is damaged: {wrong}\n  fix: load another step")
    if content["step"] != step:
        raise ValueError(f"{path}: is that of step {content['step']}\n  fix: give the folder the name of its step")
    return content


def latest(folder) -> int:
    """Return the step that the file `latest` names, or else the newest complete step.

    Raises:
        FileNotFoundError: The folder holds no complete step.
    """
    if not (steps := complete_steps(Path(folder))):
        raise FileNotFoundError(f"{folder}: there is no complete checkpoint here\n  fix: name the folder of a run")
    named = latest_named(Path(folder), steps)
    return steps[-1] if named is None else named


def typed_leaves(state, specs) -> dict[str, tuple[Any, Spec | None]]:
    """Return {where: (leaf, its type)} of a state; the type is None for a number or a string.

    Raises:
        ValueError: A tensor has no type, a type has no leaf, or a leaf is neither tensor, number nor string.
    """
    leaves, types = tree.named_leaves(state, "state"), tree.named_leaves(specs, "state")
    named: dict[str, tuple[Any, Spec | None]] = {}
    for where, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            if where not in types:
                raise ValueError(f"{where}: a tensor needs a type; the specs have none there\n  fix: give it one")
            named[where] = leaf, parse(types[where])
        elif isinstance(leaf, int | float | str):
            named[where] = leaf, None
        else:
            what = f"{where}: a checkpoint holds tensors, numbers and strings, not {type(leaf).__name__}"
            raise ValueError(f"{what}\n  fix: torch.as_tensor(...), with a type, or leave it out")
    if absent := sorted(set(types) - set(leaves)):
        what = f"{absent[0]}: the specs have a type there, but the state has no leaf"
        raise ValueError(f"{what}\n  fix: give specs of this state")
    return named


def _with_values(state, values: Mapping[str, Any]):
    """Put the saved numbers and strings into the nested dicts of `state`, and return it."""
    for where, value in values.items():
        at, (*path, last) = state, dcp.keys(where)
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return state
