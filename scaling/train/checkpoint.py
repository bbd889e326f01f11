"""Checkpoints: sharded, atomic, loaded on any mesh, and open to torch.distributed.checkpoint (see `dcp`).

    folder/step-000100/     __0_0_0.distcp, ...  the blocks that a rank is the first to hold: no block twice
                            .metadata            each leaf's dtype, shape and blocks, as torch's own `dcp.load` reads it
                            index.json           the step, the mesh, the leaves' types, ints and strings; what it was
                                                 made with (`record`); the checksum of each file, and its own
    folder/latest           the newest complete step

A step is written under another name and renamed when every rank's blocks are on disk, so that a run that is killed at
any moment leaves the last good one. Loading reads, of the files mapped into memory, only what this rank's types say;
each file must be the one that the index names, a block that a rank uses whole is compared with its checksum, and
`verify` does so with all blocks.
Nothing in the files is run.
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
from scaling.train.blocks import stored
from scaling.train.durable import INDEX, begin, checksum_of, complete, pointed, step_name, write_step
from scaling.train.guards import check_same

THREAD = "checkpoint"  # the name of those that write


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
    """Write `state`, a tree of this rank's shards typed by `specs` (None for ints and strings), as step `step`.

    All ranks call it, on one file system. `async_op`: return a Future at once; the tensors are copied before that. Ask
    for its result before the program ends, as a program that ends does not wait long for other ranks' files.
    `keep`: how many complete steps to keep. `places`: of a dim that is stored in another order or padded, such as the
    layers of uneven stages, {"L": the index of each place in the whole, -1 for none}; what is saved is the whole.
    `made_with`: a record, of what JSON holds, that the step's `index` gives back.
    ValueError for a state unlike its specs; ArithmeticError, on a checked mesh, for replicas that differ. OSError names
    the path and the bytes.
    """
    whole(0, step=step)
    whole(keep=1 if keep is None else keep)
    flag(async_op=async_op)
    folder, named = Path(folder), typed(state, specs)
    values = {where: leaf for where, (leaf, spec) in named.items() if spec is None}
    check_kept(state, specs, values)
    own, leaves, types = {}, {}, {}
    for number, (where, (leaf, spec)) in enumerate(named.items()):
        if spec is not None:
            leaves[where], blocks = stored(leaf, spec, mesh, places, number)
            types[where] = str(spec)
            own |= {file: _on_cpu(block, copy=async_op) for file, block in blocks.items()}
    index = {"step": step, "mesh": dict(mesh.sizes), "types": types, "values": values}
    index |= {} if made_with is None else {"made_with": dict(made_with)}
    alike(mesh, f"checkpoint.save of step {step}", folder=str(folder), keep=keep, state=named, made_with=made_with)
    if mesh.checked and leaves:  # of replicas one is written
        check_same([(where, leaf, spec) for where, (leaf, spec) in named.items() if spec is not None], mesh, step)
    if mesh.rank == 0:
        begin(folder, step)
    if (group := mesh.group(tuple(mesh.sizes))).pg is not None:
        with naming(f"checkpoint.save of step {step}", group.pg):
            dist.barrier(group.pg)
    if not async_op:
        write_step(folder, own, leaves, index, mesh.rank, keep)
        return None
    return in_turn(partial(write_step, folder, own, leaves, index, mesh.rank, keep))


def check_kept(state, specs, values: Mapping[str, Any]) -> None:
    """ValueError unless loading would put every number and string back where it stands, and find each tensor by its
    name."""
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
    """A block with a storage of its own, or the very one if that is so already and no copy is asked for."""
    found = block.detach().to("cpu").contiguous()
    alike = found.untyped_storage().nbytes() == found.nbytes
    return found if alike and not (copy and found.data_ptr() == block.data_ptr()) else found.clone()


def in_turn(work: Callable[[], None]) -> Future:
    """Do it in a thread, after what was given here before: steps are completed in the order they were asked for."""
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
    """(state, step): the tree of `specs`, each leaf this rank's shard on the mesh's device; ints and strings as saved.

    `step` None: the latest complete one. The mesh and the types may be others than those that were saved, the leaves
    and their whole shapes may not. `places` as in `save`, of this mesh. `among`: the checkpoint may hold more, which
    is not read, such as the optimizer's state beside params. FileNotFoundError if there is no such step; ValueError
    that names the leaf, or the file, that is missing, misshaped or damaged.
    """
    step = latest(folder) if step is None else step
    whole(0, step=step)
    content, path = index(folder, step), Path(folder) / step_name(step)
    sums = content.get("files", dcp.NO_SUMS)
    state = dcp.load(path, specs, mesh, places=places, among=among, verified=True, sums=sums)
    return _with_values(state, content["values"]), content["step"]


def index(folder, step: int) -> dict:
    """What a step's index.json says. FileNotFoundError if that step is not complete; ValueError if it is damaged."""
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
    """The step that the file `latest` names, or if there is none such the newest complete one. FileNotFoundError."""
    if not (steps := complete(Path(folder))):
        raise FileNotFoundError(f"{folder}: there is no complete checkpoint here\n  fix: name the folder of a run")
    named = pointed(Path(folder), steps)
    return steps[-1] if named is None else named


def typed(state, specs) -> dict[str, tuple[Any, Spec | None]]:
    """{where: (leaf, its type)} of a state whose ints and strings have no type."""
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
    """The state with the ints and strings that have no type, at their places in nested dicts."""
    for where, value in values.items():
        at, (*path, last) = state, dcp.keys(where)
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return state
