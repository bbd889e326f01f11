"""Checkpoints: sharded, atomic, loaded on any mesh.

    folder/step-000100/     rank-0000.pt, ...    the blocks that this rank is the first to hold: no block twice
                            index.json           each leaf's type, shape and blocks; ints and strings; written last
    folder/latest           the newest complete step

A step is written under another name and renamed when every rank's file is on disk, so that a run that is killed at any
moment leaves the last good one. Loading reads, of the files mapped into memory, only what this rank's types say. Files
are read with `weights_only`: nothing in them is run.
"""

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling import tree
from scaling.spec import Spec, parse
from scaling.train.blocks import IN_ORDER, Places, assembled, described, first_replica

WAIT = 600.0  # seconds that rank 0 waits for the other ranks' files


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
) -> Future | None:
    """Write `state`, a tree of this rank's shards typed by `specs` (None for ints and strings), as step `step`.

    All ranks call it, on one file system. `async_op`: return a Future at once; the tensors are copied before that.
    `keep`: how many complete steps to keep. `places`: of a dim that is stored in another order or padded, such as the
    layers of uneven stages, {"L": the index of each place in the whole, -1 for none}; what is saved is the whole.
    ValueError for a state unlike its specs. OSError names the path and the bytes.
    """
    folder, named = Path(folder), typed(state, specs)
    own, leaves, values = {}, {}, {}
    for where, (leaf, spec) in named.items():
        if spec is None:
            values[where] = leaf
        else:
            leaves[where] = described(leaf, spec, mesh, places)
            if first_replica(spec, mesh.coord, mesh):
                own[where] = leaf.detach().to("cpu", copy=async_op).contiguous()
    index = {"step": step, "mesh": dict(mesh.sizes), "leaves": leaves, "values": values}
    if mesh.rank == 0:  # what a run that was killed has left: its files are not this step's
        shutil.rmtree(folder / f".{name(step)}", ignore_errors=True)
    if (group := mesh.group(tuple(mesh.sizes))).pg is not None:
        dist.barrier(group.pg)
    if not async_op:
        write(folder, own, index, mesh.rank, mesh.size(), step, keep)
        return None
    return _writer(os.getpid()).submit(write, folder, own, index, mesh.rank, mesh.size(), step, keep)


@cache
def _writer(pid: int) -> ThreadPoolExecutor:
    """Of this process, as a forked one has not its parent's threads: writes in the order that they were asked for."""
    return ThreadPoolExecutor(1, "checkpoint")


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
    path, content = Path(folder) / name(step), index(folder, step)
    saved, values, files = content["leaves"], content["values"], {}
    found = []
    for where, text in tree.named_leaves(specs, "state").items():
        if where not in saved:
            raise ValueError(f"{path}: has no {where}; it has {', '.join(sorted(saved)[:4])}, ...")
        found.append(assembled(where, saved[where], parse(text), mesh, places, partial(block, path, files)))
    if not among and (extra := sorted(set(saved) - set(tree.named_leaves(specs, "state")))):
        raise ValueError(f"{path}: holds {extra[0]}, which the state to be loaded does not have")
    leaves = iter(found)
    return _with_values(tree.map(lambda _: next(leaves), specs), values), content["step"]


def index(folder, step: int) -> dict:
    """What a step's index.json says. FileNotFoundError if that step is not complete."""
    path = Path(folder) / name(step)
    if not (path / "index.json").is_file():
        raise FileNotFoundError(f"{path}: there is no complete checkpoint here")
    return json.loads((path / "index.json").read_text())


def leaf(folder, step: int, where: str, mesh, spec: Spec | None = None, places: Places = IN_ORDER) -> Tensor:
    """One leaf of a step, by its place: whole, or this rank's shard by a type. ValueError if it is not there."""
    path, leaves = Path(folder) / name(step), index(folder, step)["leaves"]
    if where not in leaves:
        raise ValueError(f"{path}: has no {where}; it has {', '.join(sorted(leaves)[:4])}, ...")
    saved = leaves[where]
    return assembled(where, saved, spec or parse(saved["type"]).whole(), mesh, places, partial(block, path, {}))


def latest(folder) -> int:
    """The step that the file `latest` names, or if that is gone the newest complete one. FileNotFoundError if none."""
    steps, named = complete(Path(folder)), Path(folder) / "latest"
    if not steps:
        raise FileNotFoundError(f"{folder}: there is no complete checkpoint here")
    said = int(named.read_text()) if named.is_file() else -1
    return said if said in steps else steps[-1]


def complete(folder: Path) -> list[int]:
    """The complete steps, in order."""
    there = [p for p in folder.glob("step-*") if p.name[5:].isdigit() and (p / "index.json").is_file()]
    return sorted(int(p.name[5:]) for p in there)


def name(step: int) -> str:
    return f"step-{step:06d}"


def typed(state, specs) -> dict[str, tuple[Any, Spec | None]]:
    """{where: (leaf, its type)} of a state whose ints and strings have no type."""
    leaves, types = tree.named_leaves(state, "state"), tree.named_leaves(specs, "state")
    named: dict[str, tuple[Any, Spec | None]] = {}
    for where, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            if where not in types:
                raise ValueError(f"{where}: a tensor needs a type; the specs have none there")
            named[where] = leaf, parse(types[where])
        elif isinstance(leaf, int | float | str):
            named[where] = leaf, None
        else:
            raise ValueError(f"{where}: a checkpoint holds tensors, numbers and strings, not {type(leaf).__name__}")
    if absent := sorted(set(types) - set(leaves)):
        raise ValueError(f"{absent[0]}: the specs have a type there, but the state has no leaf")
    return named


def write(folder: Path, own: Mapping, index: dict, rank: int, world: int, step: int, keep: int | None) -> None:
    """One rank's file; by rank 0, when all are there, the index, the step's name, `latest`, and what is cleaned up."""
    draft = folder / f".{name(step)}"
    draft.mkdir(parents=True, exist_ok=True)
    file = draft / f"rank-{rank:04d}.pt"
    try:
        with open(part := file.with_suffix(".part"), "wb") as out:
            torch.save(dict(own), out)
            out.flush()
            os.fsync(out.fileno())
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        left = complete(folder)
        raise OSError(
            f"{part}: its {tree.nbytes(own):,} bytes could not be written: {error}\n"
            f"  fix: make room there, or give another --out; the last good step there is {left[-1] if left else 'none'}"
        ) from error
    part.rename(file)
    final, deadline = folder / name(step), monotonic() + WAIT
    if rank:
        while not (final / "index.json").is_file():  # so that no rank goes on, or ends, before the step is complete
            if monotonic() > deadline:
                raise TimeoutError(f"{final}: rank 0 has not completed it within {WAIT:.0f} s")
            sleep(0.005)
        return
    wanted = [draft / f"rank-{r:04d}.pt" for r in range(world)]
    while missing := [path for path in wanted if not path.is_file()]:
        if monotonic() > deadline:
            raise TimeoutError(f"{missing[0]}: not written within {WAIT:.0f} s")
        sleep(0.005)
    index["bytes"] = {path.name: path.stat().st_size for path in wanted}
    replaced(draft / "index.json", json.dumps(index))
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    replaced(folder / "latest", str(step))
    for old in complete(folder)[: -keep or None] if keep else ():
        shutil.rmtree(folder / name(old))


def replaced(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    with open(draft := path.with_name(path.name + ".part"), "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    draft.rename(path)


def block(path: Path, files: dict, where: str, rank: int) -> Tensor:
    """What a rank's file holds of a leaf."""
    file = path / f"rank-{rank:04d}.pt"
    data = opened(file, files).get(where)
    if data is None:
        raise ValueError(f"{file}: does not hold {where} as the index says\n  fix: load an earlier step")
    return data


def opened(path: Path, files: dict) -> Mapping[str, Tensor]:
    """A rank's file, mapped into memory. ValueError if it is missing, damaged, or holds more than tensors."""
    if path not in files:
        index = json.loads((path.parent / "index.json").read_text())
        if not path.is_file() or path.stat().st_size != index["bytes"][path.name]:
            raise ValueError(f"{path}: missing or cut short\n  fix: load an earlier step")
        try:
            files[path] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ValueError(f"{path}: not a file of tensors alone: {str(error).splitlines()[0]}") from error
    return files[path]


def _with_values(state, values: Mapping[str, Any]):
    """The state with the ints and strings that have no type, at their places in nested dicts."""
    for where, value in values.items():
        at, keys = state, [part.strip("\"'") for part in where.removeprefix("state[").removesuffix("]").split("][")]
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = value
    return state
