"""Read and write the files of torch.distributed.checkpoint (DCP), and never run the pickle in their `.metadata`.

A step of `scaling.train.checkpoint` is a DCP checkpoint: torch's own `dcp.load(state, checkpoint_id=RUN/step-000100)`
opens it, whole or as DTensors, under names such as params.layers.W_Q. And `load` reads what torch's `dcp.save` wrote.

This project reads and writes the files itself, for three reasons. DCP's FileSystemReader reads saved blocks whole (a
rank that needs a quarter of a block reads four times its bytes) and unpickles anything. DCP's safetensors storage keeps
one block per leaf and rank, so it loses all but the last block of an interleaved pipeline's. And `dcp.save` needs
collectives in addition to the step's.
"""

import io
import json
import pickle
from collections.abc import Mapping
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
from scaling.train.shard_file import METADATA, NO_SUMS, ShardReader, checksum

MODULE = "torch.distributed.checkpoint"
ALLOWED = {  # the classes and functions in a `.metadata` of tensors, apart from dtypes and sizes
    f"{MODULE}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{MODULE}.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",  # the module's name in Python 3.13
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
    """Load a tree of this rank's shards from the files of a DCP checkpoint.

    A leaf is found by its keys joined by dots, as DCP names it.

    Args:
        folder: The checkpoint's folder.
        specs: The types of the leaves to load.
        mesh: The mesh of the shards.
        places: As in `checkpoint.save`.
        among: Whether the checkpoint may hold other leaves, which are not read.
        verified: As in `ShardReader`.
        sums: As in `ShardReader`.

    Raises:
        ValueError: A leaf or a file is missing, misshaped, damaged or not of tensors; the message names it.
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
    """Return one leaf of a step, whole; it raises the errors of `load`."""
    dims = tuple((f"d{i}", ()) for i in range(len(saved.shape)))
    return assembled(name, saved, Spec(name, dims), Mesh({"X": 1}), IN_ORDER, ShardReader(folder, verified=True))


def keys(where: str) -> list:
    """Split a leaf's path into its keys: 'state["params"]["W"]' -> ["params", "W"]."""
    return json.loads("[" + where.removeprefix("state").strip("[]").replace("][", ", ") + "]")


def name_of(where: str) -> str:
    """Return DCP's name of a leaf: 'state["params"]["W"]' -> "params.W"."""
    return ".".join(map(str, keys(where)))


class PickledRecord:
    """A stand-in for a pickled object of DCP's, which holds the pickled values and runs nothing."""

    state: Any = None

    def __init__(self, *given):
        self.given = given

    def __setstate__(self, state) -> None:
        self.state = state
        self.__dict__.update(state if isinstance(state, dict) else {})


def _member(kind: Any, name: str) -> PickledRecord:
    """Replace getattr in a pickle: return the member of an enum with this name, and refuse anything else."""
    if kind is not PickledRecord or name.startswith("_"):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r:.60}, which describes no tensor")
    return PickledRecord(name)


class _Restricted(pickle.Unpickler):
    """An unpickler that only makes records of the classes that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class that describes tensors, and refuse every other name."""
        if name in ALLOWED.get(module, "").split():
            return PickledRecord
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python before 3.11.5 pickles the member of an enum by getattr
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def saved_leaves(folder, sums: Mapping[str, str] = NO_SUMS) -> dict[str, SavedLeaf]:
    """Return {name: how it is saved} of each tensor in a DCP checkpoint; values of other types are not read.

    Raises:
        FileNotFoundError: The folder has no `.metadata`.
        ValueError: `.metadata` holds anything but descriptions of tensors, or has another checksum than `sums` says.
    """
    if not (path := Path(folder) / METADATA).is_file():
        what = f"{path}: there is no checkpoint of torch.distributed.checkpoint here"
        raise FileNotFoundError(f"{what}\n  fix: name the folder that dcp.save wrote")
    try:
        metadata = _Restricted(io.BytesIO(path.read_bytes())).load()
        leaves = {name: leaf for name, leaf in metadata.state_dict_metadata.items() if hasattr(leaf, "chunks")}
        found = {name: SavedLeaf(_dtype(leaf.properties.state), [*leaf.size], []) for name, leaf in leaves.items()}
        shapes = {(name, chunk.offsets): chunk.sizes for name, leaf in leaves.items() for chunk in leaf.chunks}
        for at, info in metadata.storage_data.items():
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
    """Return the dtype, which DCP pickles as the first of a tensor's properties."""
    dtype = properties[0]
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"{dtype!r:.60} stands where a dtype does")  # `saved_leaves` catches it
    return dtype


def pickled(leaves: Mapping[str, SavedLeaf]) -> bytes:
    """Return the pickled `.metadata` with which torch's DCP reads a state."""
    from torch.distributed.checkpoint import metadata as dcp

    tensors, storage, paths = {}, {}, {}
    for where, saved in leaves.items():
        name, chunks = name_of(where), []
        for block in saved.blocks:
            offsets = torch.Size(start for start, _ in block.at)
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in block.at)))
            storage[dcp.MetadataIndex(name, offsets)] = checkpoint_place(block.file, block.start, block.nbytes)
        properties = dcp.TensorProperties(dtype=saved.dtype)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
        paths[name] = tuple(keys(where))
    made = dcp.Metadata(tensors, planner_data=paths, storage_data=storage, storage_meta=dcp.StorageMeta())
    return pickle.dumps(made)
