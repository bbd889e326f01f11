"""Files of a step that are all there, on the disk, before the step has its name; and no step lost for it.

A step is written into a folder of another name, `.step-000100`. When every rank's blocks lie there, rank 0 adds the
index, moves `latest`, gives the folder its name, and only then removes older steps and what killed runs have left.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from scaling.train import dcp
from scaling.train.blocks import SavedLeaf

WAIT = 600.0  # seconds that ranks wait for each other's files
AT_END = 2.0  # the same in a program that has ended otherwise, perhaps as those ranks are gone
INDEX, LATEST = "index.json", "latest"


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step whose folder has this name; None if it is no step's."""
    number = name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdigit() and step_name(int(number)) == name else None


def unfinished(folder: Path, step: int) -> Path:
    return folder / f".{step_name(step)}"


def begin(folder: Path, step: int) -> None:
    """Rank 0's part before all others': an empty folder to write into, whatever a killed run has left there."""
    shutil.rmtree(unfinished(folder, step), ignore_errors=True)
    unfinished(folder, step).mkdir(parents=True)


def named(folder: Path) -> list[int]:
    """Return the steps that have a folder, in order."""
    found = [step_of(path.name) for path in folder.glob("step-*") if path.is_dir()]
    return sorted(step for step in found if step is not None)


def complete(folder: Path) -> list[int]:
    """Return the complete steps, in order."""
    return [step for step in named(folder) if (folder / step_name(step) / INDEX).is_file()]


def pointed(folder: Path, steps: Sequence[int]) -> int | None:
    """Return the one of these steps that the file `latest` names; None if it names none of them."""
    text = (folder / LATEST).read_bytes() if (folder / LATEST).is_file() else b""
    return next((step for step in steps if str(step).encode() == text.strip()), None)


def newest_first(folder: Path) -> list[int]:
    """Return the steps that a run may go on from, beginning with the one that `latest` names, or else with the newest.

    Later steps are of a run that went back since. A step whose index is missing is damaged, and is among them.
    """
    steps = named(folder)
    last = pointed(folder, steps)
    return [step for step in reversed(steps) if last is None or step <= last]


def oddities(folder: Path) -> list[str]:
    """Return what looks like a checkpoint's and is not, a line each."""
    odd = [
        f"{path}: is no step's name, and is left alone" for path in folder.glob("step-*") if step_of(path.name) is None
    ]
    if (folder / LATEST).is_file() and (steps := named(folder)) and pointed(folder, steps) is None:
        text = (folder / LATEST).read_bytes()[:40].decode(errors="replace")
        odd.append(f"{folder / LATEST}: says {text!r}, which is no step here: the newest is step {steps[-1]}")
    return odd


def point_at(folder: Path, step: int) -> None:
    """Let `latest` name a step that is there: a run goes on from it, and later ones do not count any more."""
    if pointed(folder, [step]) is None:
        replaced(folder / LATEST, str(step))


def write_step(
    folder: Path,
    own: Mapping[str, Tensor],
    leaves: Mapping[str, SavedLeaf],
    index: dict,
    mesh_rank: int,
    keep: int | None,
) -> None:
    """One rank's blocks; by rank 0, when all are there, the rest. OSError names the path and the bytes."""
    draft = unfinished(folder, index["step"])
    for file, block in own.items():
        with whole_file(draft / file, block.nbytes) as out, checksums():
            torch.save(block, out)
    if mesh_rank:
        until(lambda: not draft.exists(), f"{draft}: rank 0 has not completed it")
    else:
        finish(folder, leaves, index, keep)


@contextmanager
def checksums() -> Iterator[None]:
    """torch.save writes checksums, also where the program has turned them off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def finish(folder: Path, leaves: Mapping[str, SavedLeaf], index: dict[str, Any], keep: int | None) -> None:
    """Rank 0's part: wait for all blocks, then name the step."""
    step, draft = index["step"], unfinished(folder, index["step"])
    for file in (draft / block.file for saved in leaves.values() for block in saved.blocks):
        until(file.is_file, f"{file}: not written")
    replaced(draft / dcp.METADATA, dcp.pickled(leaves, draft))
    written = [dcp.METADATA, *(block.file for saved in leaves.values() for block in saved.blocks)]
    index = index | {"files": {file: dcp.checksum(draft / file) for file in written}}
    replaced(draft / INDEX, json.dumps(index | {"checksum": checksum_of(index)}))
    final = folder / step_name(step)
    if final.exists():  # a step that is saved again
        set_aside(final)
    replaced(folder / LATEST, str(step))  # which counts from the moment at which there is such a step
    synced(folder)
    draft.rename(final)
    synced(folder)
    others = sorted((each for each in complete(folder) if each != step), key=lambda each: (each < step, each))
    for each in others[: max(0, len(others) - keep + 1)] if keep else ():
        set_aside(folder / step_name(each))
    for left in folder.glob(".step-*"):  # of this or killed runs; a later step's may be one that is being written
        number, _, old = left.name.removeprefix(".step-").partition("-")
        begun = step_of(f"step-{number}")
        if old or (begun is not None and begun < step):
            shutil.rmtree(left, ignore_errors=True)


def checksum_of(index: Mapping[str, Any]) -> str:
    """Return the checksum of an index, without the one that stands in it."""
    content = {key: value for key, value in index.items() if key != "checksum"}
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def set_aside(path: Path) -> None:
    """Take a step's name away at once: what is being removed is not complete any more."""
    aside = path.with_name(f".{path.name}-old")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def until(done, complaint: str) -> None:
    """Wait for another rank. TimeoutError."""
    began, wait = monotonic(), WAIT
    while not done():
        if wait == WAIT and not threading.main_thread().is_alive():
            began, wait = monotonic(), AT_END
        if monotonic() > began + wait:
            raise TimeoutError(f"{complaint} within {wait:g} s\n  fix: see what became of that rank, then --resume")
        sleep(0.005)


@contextmanager
def whole_file(path: Path, nbytes: int) -> Iterator[Any]:
    """A file to write, of about so many bytes, which is at `path` whole and on the disk, or not at all. OSError."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.rename(path)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        raise OSError(
            f"{path}: its {nbytes:,} bytes could not be written: {error}\n"
            f"  fix: make room there, or give another folder; checkpoints that were complete stay complete"
        ) from error


def replaced(path: Path, content: str | bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    with whole_file(path, len(data)) as out:
        out.write(data)


def synced(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
