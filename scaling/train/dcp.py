"""The files of torch.distributed.checkpoint (DCP): `.metadata`, in and out, without running what stands in it.

A step of `scaling.train.checkpoint` is a DCP checkpoint: torch's own `dcp.load(state, checkpoint_id=RUN/step-000100)`
opens it, whole or as DTensors, under names such as params.layers.W_Q. And `load` reads what torch's `dcp.save` wrote.

Reading and writing are this project's own. DCP's FileSystemReader reads saved blocks whole (a rank that needs a quarter
of a block reads four times its bytes) and unpickles anything; its safetensors storage keeps one block a leaf and rank,
so that it loses all but the last of an interleaved pipeline's, and `dcp.save` needs collectives beside the step's.
"""

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.common.torch_private import checkpoint_place
from scaling.mesh import Mesh
from scaling.models.params import IN_ORDER, Places
from scaling.spec import Spec, parse
from scaling.train.blocks import SavedBlock, SavedLeaf, assembled

METADATA = ".metadata"
NO_SUMS: Mapping[str, str] = {}
MODULE = "torch.distributed.checkpoint"
ALLOWED = {  # all that a `.metadata` of tensors is made of, beside dtypes and sizes
    f"{MODULE}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{MODULE}.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",  # as Python 3.13 calls it
}


def load(
    folder,
    specs,
    mesh,
    *,
    places: Places = IN_ORDER,
    among: bool = True,
    verified: bool = False,
    sums: Mapping[str, str] = NO_SUMS,
) -> Any:
    """The tree of `specs`, each leaf this rank's shard, of a DCP checkpoint in files, which may hold more if `among`.

    A leaf is looked for under its keys joined by dots, as DCP names it. Of a block that shares a file with others the
    whole is read. `verified`, `sums`: as of `ShardReader`. ValueError that names the leaf or the file which is missing,
    misshaped, damaged or not of tensors.
    """
    types, found = {name_of(where): parse(text) for where, text in tree.named_leaves(specs, "state").items()}, {}
    saved, read = saved_leaves(folder, sums), ShardReader(Path(folder), verified, sums)
    for name, spec in types.items():
        if name not in saved:
            raise ValueError(
                f"{folder}: has no {name}; it has {', '.join(sorted(saved)[:4])}, ...\n"
                "  fix: load it with the specs of the state that was saved"
            )
        found[name] = assembled(name, saved[name], spec, mesh, places, read)
    if not among and (extra := sorted(set(saved) - set(types))):
        raise ValueError(
            f"{folder}: holds {extra[0]}, which the state to be loaded does not have\n  fix: give it a type"
        )
    return tree.unflatten(specs, list(found.values()))


def whole_leaf(folder: Path, name: str, saved: SavedLeaf) -> Tensor:
    """One leaf of a step, whole. ValueError as of `load`."""
    dims = tuple((f"d{i}", ()) for i in range(len(saved.shape)))
    return assembled(name, saved, Spec(name, dims), Mesh({"X": 1}), IN_ORDER, ShardReader(folder, verified=True))


def keys(where: str) -> list:
    """'state["params"]["W"]' -> ["params", "W"]"""
    return json.loads("[" + where.removeprefix("state").strip("[]").replace("][", ", ") + "]")


def name_of(where: str) -> str:
    """'state["params"]["W"]' -> "params.W", as DCP names it."""
    return ".".join(map(str, keys(where)))


class ShardReader:
    """`read(name, saved, block, whole)`: a block of a leaf as the index has them; files are mapped into memory if they
    can be. `verified`: a block that is used whole is compared with its checksum. `sums`: the `checksum` of each file as
    the index has it, with which every file is compared that is read.

    ValueError for a file that is missing, cut short, no tensor of that shape, or not what was written.
    """

    def __init__(self, folder: Path, verified: bool, sums: Mapping[str, str] = NO_SUMS):
        self.folder, self.verified, self.sums, self.read = folder, verified, sums, {}

    def __call__(self, name: str, saved: SavedLeaf, block: SavedBlock, whole: bool) -> Tensor:
        path = self.folder / Path(block.file).name
        if (key := (path, block.start)) not in self.read:
            self.read[key] = self._read(path, name, saved, block)
        if whole and self.verified and not intact(path, self.read[key]):
            raise ValueError(f"{path}: its bytes are not those that were written\n  fix: load an earlier step")
        return self.read[key]

    def _read(self, path: Path, name: str, saved: SavedLeaf, block: SavedBlock) -> Tensor:
        if not path.is_file() or (there := path.stat().st_size) < block.start + block.nbytes:
            raise ValueError(f"{path}: missing or cut short\n  fix: load an earlier step")
        try:
            if there == block.nbytes:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                with open(path, "rb") as file:
                    file.seek(block.start)
                    found = torch.load(io.BytesIO(file.read(block.nbytes)), map_location="cpu", weights_only=True)
        except Exception as error:
            what = f"{path}: not a file of tensors alone: {str(error).splitlines()[0]}"
            raise ValueError(f"{what}\n  fix: load an earlier step") from error
        shape = [stop - start for start, stop in block.at]
        if not isinstance(found, Tensor) or [*found.shape] != shape or found.dtype != saved.dtype:
            dtype = str(saved.dtype).removeprefix("torch.")
            raise ValueError(f"{path}: does not hold {name}, {dtype}{shape}, as it should\n  fix: load an earlier step")
        if path.name in self.sums and checksum(path) != self.sums[path.name]:
            raise ValueError(f"{path}: is not the file that was written for this step\n  fix: load an earlier step")
        return found


def checksum(path: Path) -> str:
    """Return what tells a file of a step from another: a digest of its bytes, or of a file of torch.save, which is a
    zip archive, a digest of the names, sizes and CRC-32s of what it holds, for which little of it is read."""
    if path.name == METADATA:
        return blake2b(path.read_bytes(), digest_size=8).hexdigest()
    try:
        with zipfile.ZipFile(path) as file:
            held = [(entry.filename, entry.file_size, entry.CRC) for entry in file.infolist()]
    except zipfile.BadZipFile:
        return ""
    return blake2b(repr(held).encode(), digest_size=8).hexdigest()


def intact(path: Path, block: Tensor) -> bool:
    """Whether the one tensor in a file of torch.save has the checksum (CRC-32) that stands beside it."""
    try:
        with zipfile.ZipFile(path) as file:
            wanted = [entry.CRC for entry in file.infolist() if entry.filename.endswith("/data/0")]
    except zipfile.BadZipFile:
        return False
    return wanted == [zlib.crc32(block.reshape(-1).view(torch.uint8).numpy().data)]


class PickledRecord:
    """What stands for an object of DCP's: what was pickled of it, and nothing that runs."""

    state: Any = None

    def __init__(self, *given):
        self.given = given

    def __setstate__(self, state) -> None:
        self.state = state
        self.__dict__.update(state if isinstance(state, dict) else {})


def _member(kind: Any, name: str) -> PickledRecord:
    """What stands for getattr in a pickle: a member of an enum by its name, and nothing else."""
    if kind is not PickledRecord or name.startswith("_"):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r:.60}, which describes no tensor")
    return PickledRecord(name)


class _Restricted(pickle.Unpickler):
    """Makes nothing but records of what describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, "").split():
            return PickledRecord
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python before 3.11.5 pickles the member of an enum so
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def saved_leaves(folder, sums: Mapping[str, str] = NO_SUMS) -> dict[str, SavedLeaf]:
    """{name: how it is saved} of each tensor of a DCP checkpoint. Values of other types are not read.

    FileNotFoundError; ValueError if `.metadata` holds anything that does not describe tensors, or is not the file of
    which `sums` has the checksum.
    """
    if not (path := Path(folder) / METADATA).is_file():
        what = f"{path}: there is no checkpoint of torch.distributed.checkpoint here"
        raise FileNotFoundError(f"{what}\n  fix: name the folder that dcp.save wrote")
    try:
        said = _Restricted(io.BytesIO(path.read_bytes())).load()
        leaves = {name: leaf for name, leaf in said.state_dict_metadata.items() if hasattr(leaf, "chunks")}
        found = {name: SavedLeaf(_dtype(leaf.properties.state), [*leaf.size], []) for name, leaf in leaves.items()}
        shapes = {(name, chunk.offsets): chunk.sizes for name, leaf in leaves.items() for chunk in leaf.chunks}
        for at, info in said.storage_data.items():
            if at.fqn in found:
                if getattr(info, "transform_descriptors", None):
                    raise ValueError(
                        f"{at.fqn} was written through {info.transform_descriptors}"
                        "\n  fix: load it by torch.distributed.checkpoint, and save it again without its planner"
                    )
                ranges = tuple(
                    (start, start + n) for start, n in zip(at.offset, shapes[at.fqn, at.offset], strict=True)
                )
                found[at.fqn].blocks.append(SavedBlock(ranges, info.relative_path, info.offset, info.length))
    except Exception as error:
        raise ValueError(
            f"{path}: is damaged, or not what torch.distributed.checkpoint writes of tensors: {error}"
            "\n  fix: give a folder that it wrote of a tree of tensors, or load another step"
        ) from error
    if METADATA in sums and checksum(path) != sums[METADATA]:
        raise ValueError(f"{path}: is damaged: it is not the file that was written\n  fix: load another step")
    return found


def _dtype(properties: Any) -> torch.dtype:
    """The dtype, which stands first among what DCP pickles of a tensor's properties."""
    dtype = properties[0]
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"{dtype!r:.60} stands where a dtype does")  # caught where the file is read
    return dtype


def pickled(leaves: Mapping[str, SavedLeaf], folder: Path) -> bytes:
    """The `.metadata` of a state's leaves, each block of which has a file of its own in the folder."""
    from torch.distributed.checkpoint import metadata as dcp

    tensors, storage, paths = {}, {}, {}
    for where, saved in leaves.items():
        name, chunks = name_of(where), []
        for block in saved.blocks:
            offsets = torch.Size(start for start, _ in block.at)
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in block.at)))
            storage[dcp.MetadataIndex(name, offsets)] = checkpoint_place(
                block.file, 0, (folder / block.file).stat().st_size
            )
        properties = dcp.TensorProperties(dtype=saved.dtype)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
        paths[name] = tuple(keys(where))
    made = dcp.Metadata(tensors, planner_data=paths, storage_data=storage, storage_meta=dcp.StorageMeta())
    return pickle.dumps(made)
