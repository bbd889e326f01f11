"""Write and read the one file that a rank adds to a step of a checkpoint.

    __5.distcp      block 0, as torch.save writes it     torch's own DCP reads these bytes as a file
                    block 1, ...
                    the footer                           JSON: each block's leaf, range, place in the file and CRC-32
                    the footer's length, MAGIC           8 bytes each

A block begins at a multiple of 64 bytes, and its elements lie one after another at a place that the footer names. A
reader maps the file into memory and touches only the pages that it uses; it unpickles nothing. Files without a footer
are read too: those of torch's own `dcp.save`, and those of earlier versions, which wrote a file for each block.
"""

import io
import json
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from scaling.train.blocks import Range, SavedBlock, SavedLeaf

METADATA = ".metadata"
NO_SUMS: Mapping[str, str] = {}
ALIGNED, MAGIC = 64, b"blocks01"


class StoredBlock(NamedTuple):
    """A footer's entry: a block's leaf and range, and where in the file its archive and its elements are."""

    leaf: str
    at: Range
    start: int  # of the archive of torch.save
    nbytes: int  # of the archive
    data: int  # the first byte of the elements
    crc: int  # the elements' CRC-32


def file_name(rank: int) -> str:
    """Return the name of a rank's file in the folder of a step."""
    return f"__{rank}.distcp"


def write_blocks(out: IO[bytes], blocks: Sequence[tuple[str, Range, Tensor]]) -> None:
    """Write (leaf, range, block) triples and the footer to a file that is open for reading and writing."""
    entries = []
    with checksums():
        for leaf, at, block in blocks:
            out.write(b"\0" * (-out.tell() % ALIGNED))
            start = out.tell()
            torch.save(block, out)
            with zipfile.ZipFile(out) as archive:  # the last archive of the file
                element = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
            out.seek(element.header_offset + 26)
            lengths = (int.from_bytes(out.read(2), "little") for _ in range(2))  # of the name and of the padding
            data = element.header_offset + 30 + sum(lengths)
            entries.append(StoredBlock(leaf, at, start, out.seek(0, os.SEEK_END) - start, data, element.CRC))
    footer = json.dumps(entries).encode()
    out.write(footer + len(footer).to_bytes(8, "little") + MAGIC)


@contextmanager
def checksums() -> Iterator[None]:
    """Make torch.save write checksums, even if the program has turned them off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def footer_of(path: Path) -> bytes:
    """Return the footer of a rank's file, or b"" if the file has none."""
    with open(path, "rb") as file:
        if (size := file.seek(0, os.SEEK_END)) < 16:
            return b""
        file.seek(size - 16)
        length, magic = int.from_bytes(file.read(8), "little"), file.read(8)
        if magic != MAGIC or length > size - 16:
            return b""
        file.seek(size - 16 - length)
        return file.read(length)


def entries(footer: bytes) -> list[StoredBlock]:
    """Return the entries of a footer."""
    found = (StoredBlock(*entry) for entry in json.loads(footer))
    return [entry._replace(at=tuple((start, stop) for start, stop in entry.at)) for entry in found]


def footer_digest(footer: bytes) -> str:
    """Return the digest of a footer or a `.metadata`, by which the step's index identifies the file."""
    return blake2b(footer, digest_size=8).hexdigest()


def checksum(path: Path) -> str:
    """Return a digest that identifies a file of a step, from little of the file.

    It is a digest of the footer. For `.metadata` it covers all bytes, and for a file of an earlier version the names,
    sizes and CRC-32s in the directory of its zip archive.
    """
    if path.name == METADATA:
        return footer_digest(path.read_bytes())
    if footer := footer_of(path):
        return footer_digest(footer)
    try:
        with zipfile.ZipFile(path) as file:
            held = [(entry.filename, entry.file_size, entry.CRC) for entry in file.infolist()]
    except zipfile.BadZipFile:
        return ""
    return footer_digest(repr(held).encode())


class ShardReader:
    """A function `read(name, saved, block, whole)` that returns a saved block of a leaf.

    Files are mapped into memory where possible. A call raises ValueError if the file is missing or cut short, does not
    hold a tensor of the block's shape and dtype, or is not the file that was written.

    Attributes:
        folder: The checkpoint's folder.
        verified: Whether a block that is used whole is compared with its checksum.
        sums: The `checksum` of each file by the index; every file that is read is compared with its own.
        files: {path: (the mapped file, its entries by their first byte)}; files without a footer have no entries.
        read: The blocks that have been read, by file and first byte.
    """

    def __init__(self, folder: Path, verified: bool, sums: Mapping[str, str] = NO_SUMS):
        self.folder, self.verified, self.sums = folder, verified, sums
        self.files: dict[Path, tuple[Any, dict[int, StoredBlock]]] = {}
        self.read: dict[tuple[Path, int], Tensor] = {}

    def __call__(self, name: str, saved: SavedLeaf, block: SavedBlock, whole: bool) -> Tensor:
        """Return a block of leaf `name`; with `whole` and `verified`, compare its checksum."""
        path = self.folder / Path(block.file).name
        if not path.is_file() or path.stat().st_size < block.start + block.nbytes:
            raise ValueError(f"{path}: missing or cut short\n  fix: load an earlier step")
        if path not in self.files:
            self.files[path] = self._open(path)
        memory, stored = self.files[path]
        if (key := (path, block.start)) not in self.read:
            if stored:
                self.read[key] = self._mapped(path, name, saved, block, memory, stored)
            else:
                self.read[key] = self._loaded(path, name, saved, block)
        found = self.read[key]
        if whole and self.verified:
            wanted = [stored[block.start].crc] if stored else archived_sums(path)
            if wanted != [zlib.crc32(found.reshape(-1).view(torch.uint8).numpy().data)]:
                what = f"{path}: its bytes of {name} are not those that were written"
                raise ValueError(f"{what}\n  fix: load an earlier step")
        return found

    def _open(self, path: Path) -> tuple[Any, dict[int, StoredBlock]]:
        """Compare a file with its checksum, and map it into memory if it has a footer."""
        if path.name in self.sums and checksum(path) != self.sums[path.name]:
            raise ValueError(f"{path}: is not the file that was written for this step\n  fix: load an earlier step")
        if not (footer := footer_of(path)):
            return None, {}
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            return memory, {entry.start: entry for entry in entries(footer)}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: its footer is damaged: {error}\n  fix: load an earlier step") from error

    def _mapped(self, path: Path, name: str, saved: SavedLeaf, block: SavedBlock, memory, stored) -> Tensor:
        """Return a block of a file with a footer, as a view of the mapped file."""
        shape, entry = block.shape, stored.get(block.start)
        nbytes = prod(shape) * saved.dtype.itemsize
        if entry is None or (entry.leaf, entry.at) != (name, block.at) or entry.data + nbytes > len(memory):
            raise misnamed(path, name, saved, block)
        if not nbytes:
            return torch.empty(shape, dtype=saved.dtype)
        data = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=entry.data)
        return data.view(saved.dtype).reshape(shape)

    def _loaded(self, path: Path, name: str, saved: SavedLeaf, block: SavedBlock) -> Tensor:
        """Return a block of a file without a footer; a block that shares its file with others is read whole."""
        try:
            if path.stat().st_size == block.nbytes:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                with open(path, "rb") as file:
                    file.seek(block.start)
                    found = torch.load(io.BytesIO(file.read(block.nbytes)), map_location="cpu", weights_only=True)
        except Exception as error:
            what = f"{path}: not a file of tensors alone: {str(error).splitlines()[0]}"
            raise ValueError(f"{what}\n  fix: load an earlier step") from error
        if not isinstance(found, Tensor) or [*found.shape] != block.shape or found.dtype != saved.dtype:
            raise misnamed(path, name, saved, block)
        return found


def misnamed(path: Path, name: str, saved: SavedLeaf, block: SavedBlock) -> ValueError:
    """Return the error for a file that does not hold the block that `.metadata` says it holds."""
    what = f"{path}: does not hold {name}, {str(saved.dtype).removeprefix('torch.')}{block.shape}, as it should"
    return ValueError(f"{what}\n  fix: load an earlier step")


def archived_sums(path: Path) -> list[int]:
    """Return the CRC-32 that a file of torch.save records for its only tensor."""
    try:
        with zipfile.ZipFile(path) as file:
            return [entry.CRC for entry in file.infolist() if entry.filename.endswith("/data/0")]
    except zipfile.BadZipFile:
        return []
