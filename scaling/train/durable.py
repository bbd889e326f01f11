"""Files of a step that are all there, on the disk, before the step has its name; and no step lost for it.

A step is written into a folder of another name, `.step-000100`. When every rank's blocks lie there, rank 0 adds the
index, gives the folder its name, moves `latest`, and only then removes older steps and what killed runs have left.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.train import dcp

WAIT = 600.0  # seconds that ranks wait for each other's files
AT_END = 2.0  # the same in a program that has ended otherwise, perhaps as those ranks are gone
INDEX, LATEST = "index.json", "latest"


def name(step: int) -> str:
    return f"step-{step:06d}"


def draft_of(folder: Path, step: int) -> Path:
    return folder / f".{name(step)}"


def complete(folder: Path) -> list[int]:
    """The complete steps, in order."""
    there = [p for p in folder.glob("step-*") if p.name[5:].isdigit() and (p / INDEX).is_file()]
    return sorted(int(p.name[5:]) for p in there)


def write(folder: Path, own: Mapping[str, Tensor], index: dict, mesh_rank: int, step: int, keep: int | None) -> None:
    """One rank's blocks; by rank 0, when all are there, the rest. OSError names the path and the bytes."""
    draft = draft_of(folder, step)
    draft.mkdir(parents=True, exist_ok=True)
    for file, block in own.items():
        try:
            with whole_file(draft / file) as out:
                torch.save(block, out)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            left = complete(folder)
            raise OSError(
                f"{draft / file}: its {block.nbytes:,} bytes, of the {tree.nbytes(dict(own)):,} that this rank writes, "
                f"could not be written: {error}\n  fix: make room there, or give another --out; the last good step "
                f"there is {left[-1] if left else 'none'}"
            ) from error
    if mesh_rank:
        until(lambda: not draft.exists(), f"{draft}: rank 0 has not completed it")
    else:
        finish(folder, draft, index, step, keep)


def finish(folder: Path, draft: Path, index: dict[str, Any], step: int, keep: int | None) -> None:
    """Rank 0's part: wait for all blocks, then name the step."""
    for leaf in index["leaves"].values():
        for block in leaf["blocks"]:
            file = draft / block["file"]
            until(file.is_file, f"{file}: not written")
            block |= {"from": 0, "bytes": file.stat().st_size}
    replaced(draft / dcp.METADATA, dcp.pickled(index))
    replaced(draft / INDEX, json.dumps(index))
    final, before = folder / name(step), folder / f".{name(step)}-before"
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():  # a step that is saved again
        final.rename(before)
    draft.rename(final)
    synced(folder)
    replaced(folder / LATEST, str(step))
    synced(folder)
    older = [each for each in complete(folder) if each != step]
    for each in older[: max(0, len(older) - keep + 1)] if keep else ():
        shutil.rmtree(folder / name(each))
    for left in folder.glob(".step-*"):  # of runs that were killed; a later step's may be one that is being written
        if left == before or (left.name[6:].isdigit() and int(left.name[6:]) < step):
            shutil.rmtree(left, ignore_errors=True)


def until(done, complaint: str) -> None:
    """Wait for another rank. TimeoutError."""
    began, wait = monotonic(), WAIT
    while not done():
        if wait == WAIT and not threading.main_thread().is_alive():
            began, wait = monotonic(), AT_END
        if monotonic() > began + wait:
            raise TimeoutError(f"{complaint} within {wait:g} s")
        sleep(0.005)


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A file to write, which is at `path` whole and on the disk, or not at all."""
    with open(part := path.with_name(path.name + ".part"), "wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    part.rename(path)


def replaced(path: Path, content: str | bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    with whole_file(path) as out:
        out.write(content.encode() if isinstance(content, str) else content)


def synced(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
