"""Checkpoints of torch.distributed.checkpoint: its own load opens ours, we open its own, and nothing in them is run."""

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from runs import ONE, Malicious
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from scaling import tree
from scaling.train import checkpoint, dcp

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: deprecations, and that a load is of one process
SPECS = {"params": {"W": "W[L, D_X, F_Y]", "norm": "norm[D]"}, "moments": [{"W": "W[L, D_XY, F]"}], "n": "n[]"}
PLACES = {"L": [0, 2, 1]}  # as on interleaved stages: no block of several layers is whole


def whole() -> dict:
    W = torch.arange(3 * 8 * 4.0, dtype=torch.float64).view(3, 8, 4)
    params = {"W": W, "norm": torch.rand(8).bfloat16()}
    return {"params": params, "moments": [{"W": W.float() / 7}], "n": torch.tensor(5)}


def equal(a, b) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def saves(mesh, folder, state):
    given = tree.map(lambda W: W[[0, 2, 1]] if W.dim() == 3 else W, state)
    values = {"data": {"seed": 1}}
    checkpoint.save(folder, tree.shard(given, SPECS, mesh) | values, SPECS, mesh, 1, places=PLACES)


def placed(mesh, W: torch.Tensor, *placements) -> DTensor:
    there = DeviceMesh("cpu", torch.arange(mesh.size()).view(*mesh.sizes.values()))
    shard = W
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shard = shard.chunk(there.size(axis), placement.dim)[there.get_local_rank(axis)]
    return DTensor.from_local(shard.contiguous(), there, placements, run_check=False)


def loaded_by_torch(mesh, folder, state):
    """By torch's own load, one of them as a DTensor of another sharding."""
    found, wanted = tree.map(torch.zeros_like, state), placed(mesh, state["params"]["W"], Shard(2), Shard(1))
    found["params"]["W"] = placed(mesh, found["params"]["W"], Shard(2), Shard(1))
    torch_dcp.load(found, checkpoint_id=folder / "step-000001")
    W = found["params"].pop("W")
    return equal([W.to_local(), found], [wanted.to_local(), state | {"params": {"norm": state["params"]["norm"]}}])


def test_torch_opens_a_step(ranks, tmp_path):
    state = whole()
    ranks(saves, {"X": 2, "Y": 2}, tmp_path, state)
    assert all(ranks(loaded_by_torch, {"X": 2, "Y": 2}, tmp_path, state))


def saved_by_torch(mesh, folder, state):
    given = state | {"params": {"W": placed(mesh, state["params"]["W"], Shard(1), Replicate()), "other": "text"}}
    given["params"]["norm"] = placed(mesh, state["params"]["norm"], Replicate(), Shard(0))
    torch_dcp.save(given, checkpoint_id=folder)


def loads_torch_s(mesh, folder, state):
    given = tree.map(lambda W: W[[0, 2, 1]] if W.dim() == 3 else W, state)
    return equal(dcp.load(folder, SPECS, mesh, places=PLACES), tree.shard(given, SPECS, mesh))


def test_a_checkpoint_of_torch_is_opened(ranks, tmp_path):
    state = whole()
    ranks(saved_by_torch, {"X": 2, "Y": 2}, tmp_path, state)
    for sizes in ({"X": 4, "Y": 1}, {"X": 2, "Y": 2}):
        assert all(ranks(loads_torch_s, sizes, tmp_path, state))
    for name, words in (("W_in", "W_in; it has moments.0.W, "), ("other", "other")):  # the latter is a pickle
        with pytest.raises(ValueError, match=f"has no params.{words}"):
            dcp.load(tmp_path, {"params": {name: "n[]"}}, ONE)


class Attribute:
    """Pickled as a getattr, as Python before 3.11.5 pickles the member of an enum."""

    def __init__(self, of, name: str):
        self.given = of, name

    def __reduce__(self):
        return getattr, self.given


def unpickled(data: bytes) -> Any:
    return dcp._Restricted(io.BytesIO(data)).load()


def test_nothing_is_made_but_records():
    formats = torch_metadata._MEM_FORMAT_ENCODING
    for what in torch_metadata.Metadata({}), Path("a/b"), formats(0), *(Attribute(formats, of.name) for of in formats):
        assert type(unpickled(pickle.dumps(what))) is dcp.PickledRecord
    for of, name in ((torch.Size, "__class__"), (formats, "__class__"), (torch.float32, "__reduce__"), (4, "real")):
        with pytest.raises(pickle.UnpicklingError, match=name):
            unpickled(pickle.dumps(Attribute(of, name)))
    of_3_13 = pickle.dumps(Path("a/b"), protocol=0).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert unpickled(of_3_13).given == ("a", "b")


def test_a_malicious_checkpoint_of_torch_is_refused():
    torch_dcp.save({"W": torch.ones(4)}, checkpoint_id=".", no_dist=True)
    metadata, data = Path(".metadata"), Path("__0_0.distcp")
    good, load = metadata.read_bytes(), partial(dcp.load, specs={"W": "W[D]"}, mesh=ONE)
    for evil in (Malicious(), {"planner_data": Malicious()}, eval, torch.load):
        metadata.write_bytes(pickle.dumps(evil))
        with pytest.raises(ValueError, match=r"not what torch\.distributed\.checkpoint writes"):
            load(".")
    metadata.write_bytes(good)
    data.write_bytes(pickle.dumps(Malicious()).ljust(data.stat().st_size, b"\0"))
    with pytest.raises(ValueError, match="not a file of tensors alone"):
        load(".")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load("elsewhere")
    assert not Path("never").exists()
