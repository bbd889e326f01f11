"""Write a step's files so that they are all on disk before the step gets its name, and no older step is lost.

A step is written into a folder with another name, `.step-000100`. When every rank's blocks are there, rank 0 adds the
index, moves `latest` and renames the folder. Only then does it remove older steps and the remains of killed runs.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from scaling.train import dcp
from scaling.train.blocks import Range, SavedBlock, SavedLeaf
from scaling.train.shard_file import METADATA, checksum, entries, file_name, footer_digest, footer_of, write_blocks

WAIT = 600.0  # seconds that ranks wait for each other's files
AT_END = 2.0  # seconds to wait once the main thread has ended, because the other ranks may have died
OPEN = 16  # files that rank 0 reads at a time, which hides the latency of a shared file system
INDEX, LATEST = "index.json", "latest"


def step_name(step: int) -> str:
    """Return the name of a step's folder, such as step-000100."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step whose folder has this name, or None if it is not the name of a step."""
    number = name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdigit() and step_name(int(number)) == name else None


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder in which a step is written before it is complete."""
    return folder / f".{step_name(step)}"


def begin_step(folder: Path, step: int) -> None:
    """Make the empty folder that all ranks write into, on rank 0, removing the remains of a killed run."""
    shutil.rmtree(partial_folder(folder, step), ignore_errors=True)
    partial_folder(folder, step).mkdir(parents=True)


def step_numbers(folder: Path) -> list[int]:
    """Return the numbers of the steps that have a folder, complete or not, in ascending order."""
    found = [step_of(path.name) for path in folder.glob("step-*") if path.is_dir()]
    return sorted(step for step in found if step is not None)


def complete_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps whose checkpoints are complete, in ascending order."""
    return [step for step in step_numbers(folder) if (folder / step_name(step) / INDEX).is_file()]


def latest_named(folder: Path, steps: Sequence[int]) -> int | None:
    """Return the one of these steps that the file `latest` names, or None."""
    text = (folder / LATEST).read_bytes() if (folder / LATEST).is_file() else b""
    return next((step for step in steps if str(step).encode() == text.strip()), None)


def newest_first(folder: Path) -> list[int]:
    """Return the steps that a run may go on from, beginning with the one that `latest` names, or else with the newest.

    Steps after the one that `latest` names are left out, because the run has since gone back to an earlier step. A step
    without an index is damaged, but is included.
    """
    steps = step_numbers(folder)
    last = latest_named(folder, steps)
    return [step for step in reversed(steps) if last is None or step <= last]


def stray_files(folder: Path) -> list[str]:
    """Return a warning for each file or folder that looks like a checkpoint's and is not."""
    warnings = [
        f"{path}: is no step's name, and is left alone" for path in folder.glob("step-*") if step_of(path.name) is None
    ]
    if (folder / LATEST).is_file() and (steps := step_numbers(folder)) and latest_named(folder, steps) is None:
        text = (folder / LATEST).read_bytes()[:40].decode(errors="replace")
        warnings.append(f"{folder / LATEST}: says {text!r}, which is no step here: the newest is step {steps[-1]}")
    return warnings


def point_at(folder: Path, step: int) -> None:
    """Make `latest` name an existing step, from which a run goes on, so that later steps are ignored."""
    if latest_named(folder, [step]) is None:
        write_atomically(folder / LATEST, str(step))


def write_step(
    folder: Path,
    own: Sequence[tuple[str, Range, Tensor]],
    leaves: Mapping[str, SavedLeaf],
    writers: Sequence[int],
    index: dict,
    mesh_rank: int,
    keep: int | None,
) -> None:
    """Write this rank's blocks; rank 0 then completes the step, and the other ranks wait for it.

    Args:
        folder: The run's folder.
        own: (leaf, range, block) of the blocks that this rank writes.
        leaves: The saved leaves, without blocks.
        writers: The ranks that write a file; only rank 0 needs to know them.
        index: The content of index.json, without checksums.
        mesh_rank: This rank.
        keep: The number of complete steps to keep; None keeps all.

    Raises:
        OSError: A file could not be written; the message names the path and the bytes.
        TimeoutError: Another rank's files did not appear in time.
    """
    draft = partial_folder(folder, index["step"])
    if own:
        with atomic_file(draft / file_name(mesh_rank), sum(block.nbytes for *_, block in own)) as out:
            write_blocks(out, own)
    if mesh_rank:
        wait_until(lambda: not draft.exists(), f"{draft}: rank 0 has not completed it")
    else:
        finish_step(folder, leaves, writers, index, keep)


def finish_step(
    folder: Path, leaves: Mapping[str, SavedLeaf], writers: Sequence[int], index: dict[str, Any], keep: int | None
) -> None:
    """Wait for all blocks, then write the index, name the step and remove old steps; rank 0 calls it."""
    step, draft = index["step"], partial_folder(folder, index["step"])
    files = [draft / file_name(rank) for rank in writers]
    for file in files:
        wait_until(file.is_file, f"{file}: not written")
    saved = {where: leaf._replace(blocks=[]) for where, leaf in leaves.items()}
    by_name, sums = {dcp.name_of(where): leaf.blocks for where, leaf in saved.items()}, {}
    with ThreadPoolExecutor(OPEN) as threads:
        for file, footer in zip(files, threads.map(footer_of, files), strict=True):
            sums[file.name] = footer_digest(footer)
            for block in entries(footer):
                by_name[block.leaf].append(SavedBlock(block.at, file.name, block.start, block.nbytes))
    write_atomically(draft / METADATA, dcp.pickled(saved))
    index = index | {"files": sums | {METADATA: checksum(draft / METADATA)}}
    write_atomically(draft / INDEX, json.dumps(index | {"checksum": checksum_of(index)}))
    sync_folder(draft)
    final = folder / step_name(step)
    write_atomically(folder / LATEST, str(step))  # it takes effect once the step has its name
    sync_folder(folder)
    if final.exists():  # the step is being saved again
        set_aside(final)
    draft.rename(final)
    sync_folder(folder)
    others = sorted((each for each in complete_steps(folder) if each != step), key=lambda each: (each < step, each))
    for each in others[: max(0, len(others) - keep + 1)] if keep else ():
        set_aside(folder / step_name(each))
    for left in folder.glob(".step-*"):  # remains of this or killed runs; a later step may be being written now
        number, _, old = left.name.removeprefix(".step-").partition("-")
        begun = step_of(f"step-{number}")
        if old or (begun is not None and begun < step):
            shutil.rmtree(left, ignore_errors=True)


def checksum_of(index: Mapping[str, Any]) -> str:
    """Return the checksum of an index, computed without its own "checksum" entry."""
    content = {key: value for key, value in index.items() if key != "checksum"}
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def set_aside(path: Path) -> None:
    """Rename a step's folder at once, so that a step that is being removed never counts as complete."""
    aside = path.with_name(f".{path.name}-old")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def wait_until(done, complaint: str) -> None:
    """Wait until `done()` is true; TimeoutError, beginning with `complaint`, if another rank takes too long."""
    began, wait = monotonic(), WAIT
    while not done():
        if wait == WAIT and not threading.main_thread().is_alive():
            began, wait = monotonic(), AT_END
        if monotonic() > began + wait:
            raise TimeoutError(f"{complaint} within {wait:g} s\n  fix: see what became of that rank, then --resume")
        sleep(0.005)


@contextmanager
def atomic_file(path: Path, nbytes: int) -> Iterator[Any]:
    """Yield a file to write, which appears at `path` only when it is complete and on disk.

    Raises:
        OSError: The file, of about `nbytes` bytes, could not be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w+b") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.rename(path)
    except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError
        raise OSError(
            f"{path}: its {nbytes:,} bytes could not be written: {error}\n"
            f"  fix: make room there, or give another folder; checkpoints that were complete stay complete"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file atomically, replacing the one at `path`."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path, len(data)) as out:
        out.write(data)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
