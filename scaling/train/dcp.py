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
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling._torch import checkpoint_place
from scaling.spec import parse
from scaling.train.blocks import IN_ORDER, Places, assembled

METADATA = ".metadata"
MODULE = "torch.distributed.checkpoint"
ALLOWED = {  # all that a `.metadata` of tensors is made of, beside dtypes
    f"{MODULE}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{MODULE}.filesystem": "_StorageInfo",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",
}


def load(folder, specs, mesh, *, places: Places = IN_ORDER) -> Any:
    """The tree of `specs`, each leaf this rank's shard, of a DCP checkpoint in files, which may hold more.

    A leaf is looked for under its keys joined by dots, as DCP names it. Of a block that shares a file with others the
    whole is read. ValueError that names the leaf or the file which is missing, misshaped, damaged or not of tensors.
    """
    found, shards = _index(folder), {}
    for where, text in tree.named_leaves(specs, "state").items():
        if (name := ".".join(map(str, keys(where)))) not in found:
            raise ValueError(
                f"{folder}: has no {name}; it has {', '.join(sorted(found)[:4])}, ..."
                "\n  fix: choose one of those that it has"
            )
        shards[where] = assembled(name, found[name], parse(text), mesh, places, ShardReader(Path(folder)))
    return tree.unflatten(specs, list(shards.values()))


def keys(where: str) -> list:
    """'state["params"]["W"]' -> ["params", "W"]"""
    return json.loads("[" + where.removeprefix("state").strip("[]").replace("][", ", ") + "]")


class ShardReader:
    """`read(where, leaf, block, whole)`: a block of a leaf as the index has them; files are mapped into memory if they
    can be. `verified`: a block that is used whole is compared with its checksum.

    ValueError for a file that is missing, cut short, no tensor of that shape, or not what was written.
    """

    def __init__(self, folder: Path, verified: bool = False):
        self.folder, self.verified, self.read = folder, verified, {}

    def __call__(self, where: str, leaf: Mapping, block: Mapping, whole: bool) -> Tensor:
        path = self.folder / Path(block["file"]).name
        if (key := (path, block["from"])) not in self.read:
            self.read[key] = self._read(path, where, leaf, block)
        if whole and self.verified and not intact(path, self.read[key]):
            raise ValueError(f"{path}: its bytes are not those that were written\n  fix: load an earlier step")
        return self.read[key]

    def _read(self, path: Path, where: str, leaf: Mapping, block: Mapping) -> Tensor:
        start, nbytes = block["from"], block["bytes"]
        if not path.is_file() or (there := path.stat().st_size) < start + nbytes:
            raise ValueError(f"{path}: missing or cut short\n  fix: load an earlier step")
        try:
            if there == nbytes:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                with open(path, "rb") as file:
                    file.seek(start)
                    found = torch.load(io.BytesIO(file.read(nbytes)), map_location="cpu", weights_only=True)
        except Exception as error:
            what = f"{path}: not a file of tensors alone: {str(error).splitlines()[0]}"
            raise ValueError(f"{what}\n  fix: load an earlier step") from error
        shape, dtype = [stop - start for start, stop in block["at"]], leaf["dtype"]
        if not isinstance(found, Tensor) or [*found.shape] != shape or str(found.dtype) != f"torch.{dtype}":
            raise ValueError(
                f"{path}: does not hold {where}, {dtype}{shape}, as it should\n  fix: load an earlier step"
            )
        return found


def intact(path: Path, block: Tensor) -> bool:
    """Whether the one tensor in a file of torch.save has the checksum (CRC-32) that stands beside it."""
    try:
        with zipfile.ZipFile(path) as file:
            wanted = [entry.CRC for entry in file.infolist() if entry.filename.endswith("/data/0")]
    except zipfile.BadZipFile:
        return False
    return wanted == [zlib.crc32(block.reshape(-1).view(torch.uint8).numpy().data)]


def _member(kind: Any, name: str) -> Enum:
    """What stands for getattr in a pickle: a member of an enum by its name, and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r:.60}, which describes no tensor")
    return kind[name]


class _Restricted(pickle.Unpickler):
    """Makes nothing but what describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if name in ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python before 3.11.5 pickles the member of an enum so
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def _index(folder) -> dict[str, dict]:
    """{name: its dtype, whole shape and blocks} of each tensor of a DCP checkpoint. Values of other types are not read.

    FileNotFoundError; ValueError if `.metadata` holds anything that does not describe tensors.
    """
    if not (path := Path(folder) / METADATA).is_file():
        what = f"{path}: there is no checkpoint of torch.distributed.checkpoint here"
        raise FileNotFoundError(f"{what}\n  fix: name the folder that dcp.save wrote")
    try:
        said = _Restricted(io.BytesIO(path.read_bytes())).load()
        leaves = {name: leaf for name, leaf in said.state_dict_metadata.items() if hasattr(leaf, "chunks")}
        found: dict[str, dict] = {
            name: {"dtype": str(leaf.properties.dtype).removeprefix("torch."), "shape": [*leaf.size], "blocks": []}
            for name, leaf in leaves.items()
        }
        for at, info in said.storage_data.items():
            if at.fqn in found:
                if getattr(info, "transform_descriptors", None):
                    raise ValueError(
                        f"{at.fqn} was written through {info.transform_descriptors}"
                        "\n  fix: load it by torch.distributed.checkpoint, and save it again without its planner"
                    )
                sizes = {chunk.offsets: chunk.sizes for chunk in leaves[at.fqn].chunks}[at.offset]
                block = {"at": [(start, start + n) for start, n in zip(at.offset, sizes, strict=True)]}
                block |= {"file": info.relative_path, "from": info.offset, "bytes": info.length}
                found[at.fqn]["blocks"].append(block)
    except Exception as error:
        raise ValueError(
            f"{path}: not what torch.distributed.checkpoint writes of tensors: {error}"
            "\n  fix: give a folder that it wrote of a tree of tensors"
        ) from error
    return found


def pickled(index: Mapping) -> bytes:
    """The `.metadata` of a step whose index this is."""
    from torch.distributed.checkpoint import metadata as dcp

    tensors, storage, paths = {}, {}, {}
    for where, leaf in index["leaves"].items():
        name = ".".join(map(str, path := keys(where)))
        chunks = []
        for block in leaf["blocks"]:
            offsets = torch.Size(start for start, _ in block["at"])
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in block["at"])))
            storage[dcp.MetadataIndex(name, offsets)] = checkpoint_place(block["file"], block["from"], block["bytes"])
        properties = dcp.TensorProperties(dtype=getattr(torch, leaf["dtype"]))
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(leaf["shape"]), chunks)
        paths[name] = tuple(path)
    made = dcp.Metadata(tensors, planner_data=paths, storage_data=storage, storage_meta=dcp.StorageMeta())
    return pickle.dumps(made)
