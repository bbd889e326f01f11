"""Checkpoints that would come back as something else: other structures, padding, damaged indices, types of others.

Each is refused with its fix, when it is saved or when it is loaded, and gives no state.
"""

import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from scaling.mesh import Mesh
from scaling.train import checkpoint

MESH = Mesh({"X": 1, "Y": 1})
STATE = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(6.0)}
SPECS = {"w": "w[D_X, F_Y]", "b": "b[F_Y]"}

STATES = {
    "a tuple of numbers": {"k": (1, 2)},
    "a list of texts": {"k": ["a"]},
    "a name with a quote": {'a"b': 1},
    "two leaves of one name": {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)},
    "bytes": {"k": b"a"},
    "other dims": {"w": STATE["w"][0]},
    "no numbers": {"w": STATE["w"].to("meta")},
    "sparse": {"w": STATE["w"].to_sparse()},
}


@pytest.mark.parametrize("changed", STATES.values(), ids=STATES)
def test_a_state_that_would_not_come_back_is_refused(tmp_path, changed):
    specs = SPECS | ({"a": {"b": "b[D]"}, "a.b": "b[D]"} if "a" in changed else {})
    with pytest.raises(ValueError, match="fix:"):
        checkpoint.save(tmp_path, STATE | changed, specs, MESH, 1)
    with pytest.raises(FileNotFoundError, match="fix:"):
        checkpoint.load(tmp_path, SPECS, MESH)


def test_numbers_come_back_where_they_stood(tmp_path):
    state = STATE | {"data": {"position": 3, "seeds": {0: 7, "a.b": "c"}}}
    checkpoint.save(tmp_path, state, SPECS, MESH, 1)
    assert checkpoint.load(tmp_path, SPECS, MESH)[0]["data"] == state["data"]


OPTIONS = [{"step": step} for step in (-1, 1.5, True, "3", None)] + [{"keep": keep} for keep in (0, -1, 1.5, True)]
OPTIONS += [{"async_op": "no"}]
OPTIONS += [
    {"places": {"D": places}} for places in ([0], [0, 0, 1, 2], [0, 3, 5, 7], [-2, 0, 1, 2], [0.0, 1.0, 2.0, 3.0])
]


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_options_of_save_are_what_they_should_be(tmp_path, given):
    with pytest.raises(ValueError, match="fix:"):
        checkpoint.save(tmp_path, STATE, SPECS, MESH, **({"step": 1} | given))


TYPES = [SPECS | {"w": w} for w in ("w[D_X, F] {U_Y}", "w[D_Q, F]", "w[D_X]")] + [
    {"w": SPECS["w"]},
    SPECS | {"z": "z[D]"},
]


@pytest.mark.parametrize("specs", TYPES, ids=str)
def test_types_that_do_not_fit_are_refused(tmp_path, specs):
    with pytest.raises(ValueError, match=r"fix:|unknown mesh axis Q"):
        checkpoint.save(tmp_path / "new", STATE, specs, MESH, 1)
    checkpoint.save(tmp_path, STATE, SPECS, MESH, 1)
    with pytest.raises(ValueError, match=r"fix:|unknown mesh axis Q"):
        checkpoint.load(tmp_path, specs, MESH)


def leaf(metadata):
    return metadata.state_dict_metadata["w"]


def moved(metadata, **changed) -> None:
    """The block of w, where it lies, and both in other words."""
    (chunk,) = leaf(metadata).chunks
    at = next(at for at in metadata.storage_data if at.fqn == "w")
    kept = metadata.storage_data.pop(at)
    chunk.offsets, chunk.sizes = (torch.Size(changed.get(n, getattr(chunk, n))) for n in ("offsets", "sizes"))
    metadata.storage_data[MetadataIndex("w", chunk.offsets)] = kept


DAMAGES = {
    "no blocks": lambda metadata: (metadata.storage_data.clear(), leaf(metadata).chunks.clear()),
    "blocks that lie nowhere": lambda metadata: metadata.storage_data.clear(),
    "a block that has no size": lambda metadata: leaf(metadata).chunks.clear(),
    "a block of fewer rows": lambda metadata: moved(metadata, sizes=(2, 6)),
    "a block further on": lambda metadata: moved(metadata, offsets=(2, 0)),
    "a larger shape": lambda metadata: setattr(leaf(metadata), "size", torch.Size((8, 6))),
    "a smaller shape": lambda metadata: setattr(leaf(metadata), "size", torch.Size((2, 6))),
    "another shape": lambda metadata: setattr(leaf(metadata), "size", torch.Size((6, 4))),
    "no dtype": lambda metadata: setattr(leaf(metadata).properties, "dtype", 31),
    "another dtype": lambda metadata: setattr(leaf(metadata).properties, "dtype", torch.float64),
    "no leaves": lambda metadata: delattr(metadata, "state_dict_metadata"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_index_that_does_not_fit_its_files_is_damaged(tmp_path, damage):
    checkpoint.save(tmp_path, STATE, SPECS, MESH, 1)
    path = tmp_path / "step-000001" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    damage(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"(damaged|does not hold)(.|\n)*fix:"):
        checkpoint.load(tmp_path, SPECS, MESH)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"leaves": 3}'])
def test_an_index_that_is_none_is_named(tmp_path, text):
    checkpoint.save(tmp_path, STATE, SPECS, MESH, 1)
    (tmp_path / "step-000001" / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: is damaged(.|\n)*fix:"):
        checkpoint.load(tmp_path, SPECS, MESH)


@pytest.mark.parametrize("text", ["", "abc", "-1", "99"])
def test_a_file_latest_that_names_no_step_is_passed_over(tmp_path, text):
    checkpoint.save(tmp_path, STATE, SPECS, MESH, 4)
    (tmp_path / "latest").write_text(text)
    state, step = checkpoint.load(tmp_path, SPECS, MESH)
    assert step == 4
    assert torch.equal(state["w"], STATE["w"])


def saves_replicas_that_differ(mesh, folder):
    state = {
        "W": torch.ones(2, 3),
        "b": torch.full((3,), float(mesh.rank == 1)),
        "ids": torch.ones(2, dtype=torch.complex128),
    }
    with pytest.raises(ArithmeticError) as error:
        checkpoint.save(folder, state, {"W": "W[D_X, F]", "b": "b[F]", "ids": "ids[I]"}, mesh, 5)
    return str(error.value)


def test_replicas_that_differ_are_named_as_one_of_them_would_be_lost(ranks, tmp_path):
    for message in ranks(saves_replicas_that_differ, {"X": 4}, tmp_path):
        assert 'step 5: state["b"], b[F], is replicated over X, but rank 1 of 4 has other values' in message
    assert not [*tmp_path.iterdir()]
