"""A run that is killed while it saves, a full disk, damaged files and indices, what would come back as something else:
each is refused with its fix, and the last good checkpoint stays."""

import io
import os
import pickle
import re
import resource
import tarfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from machine import on_ranks
from refused import named, refused
from runs import load, save
from torch.distributed.checkpoint import metadata as torch_metadata

from scaling import tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.train import checkpoint, dcp, durable
from scaling.train.compare import verify_run

MESH = Mesh({"X": 1, "Y": 1})
STATE = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(6.0)}
TYPES = {"w": "w[D_X, F_Y]", "b": "b[F_Y]"}


def test_a_program_that_has_ended_does_not_wait_for_files_of_a_rank_that_is_gone(monkeypatch):
    monkeypatch.setattr(durable, "AT_END", 0.05)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
    mesh = AbstractMesh({"X": 2})
    pending = checkpoint.save(".", {"W": torch.ones(2)}, {"W": "W[D_X]"}, mesh, 1, async_op=True)
    assert pending is not None
    with pytest.raises(TimeoutError, match=r"__1.distcp: not written within 0.05 s"):
        pending.result(60)
    assert checkpoint.complete_steps(Path()) == []


def test_a_full_disk_leaves_the_last_good_one_and_says_how_much_was_to_be_written():
    save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    words = r"__0.distcp: its 400,000 bytes could not be written(.|\n)*fix: make room"
    try:
        with pytest.raises(OSError, match=words):
            save(2, torch.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load()[1] == 1


class Call:
    """Pickled as a call, which whoever unpickles it makes."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


EVIL = Call(os.system, "touch never")


def saved(what, length: int) -> bytes:
    """A file as torch writes it, with zip's comment made longer."""
    torch.save(what, out := io.BytesIO())
    data = bytearray(out.getvalue())
    data[-2:] = (length - len(data)).to_bytes(2, "little")
    return bytes(data).ljust(length, b"\0")


def saving(**changed):
    """Saves the state, of which something is another; what is refused leaves nothing."""
    try:
        checkpoint.save(".", **({"state": STATE, "specs": TYPES, "mesh": MESH, "step": 1} | changed))
    except ValueError:
        assert not os.listdir()
        raise


def loading(specs=TYPES, **options):
    """Saves the state, and loads it by other types."""
    checkpoint.save(".", STATE, TYPES, MESH, 1)
    checkpoint.load(".", specs, MESH, **options)


PARTIAL, ELSEWHERE = (TYPES | {"w": w} for w in ("w[D_X, F] {U_Y}", "w[D_Q, F]"))
ALIKE, ALIKE_TYPES = ({"a": {"b": leaf}, "a.b": leaf} for leaf in (torch.ones(2), "b[D]"))
# what: the call, and words of its error
REFUSED: dict = named(
    r"""
what                     call, words of its error
loaded, of other dims    (partial(loading, TYPES | {"w": "w[D_X]"}), "was saved with shape [4, 6]")
loaded, a leaf less      (partial(loading, {"w": TYPES["w"]}), "holds b, which")
loaded, a leaf more      (partial(loading, TYPES | {"z": "z[D]"}), "has no z; it has b, w")
loaded, of other places  (partial(loading, places={"D": [0, 1]}), "shape [4, 6], but D is 2 here\n  fix:")
loaded, partial sums     (partial(loading, PARTIAL), "is unreduced")
partial sums             (partial(saving, specs=PARTIAL), "is unreduced")
a type more              (partial(saving, specs=TYPES | {"z": "z[D]"}), 'state["z"]: the specs have a type there')
a type of other dims     (partial(saving, specs=TYPES | {"w": "w[D_X]"}), "have the dims of their types")
saved, of other axes     (partial(saving, specs=ELSEWHERE), "unknown mesh axis Q")
loaded, of other axes    (partial(loading, ELSEWHERE), "unknown mesh axis Q")
two leaves of one name   (partial(saving, state=STATE | ALIKE, specs=TYPES | ALIKE_TYPES), "have one name")
""",
    globals(),
)
for changed, words in [
    ({"k": (1, 2)}, "they stand in nested dicts"), ({"k": ["a"]}, "they stand in nested dicts"),
    ({'a"b': 1}, "under names without quotes"), ({"k": b"a"}, "not bytes"), ({"w": STATE["w"][0]}, "leaves are dense"),
    ({"w": STATE["w"].to("meta")}, "on meta"), ({"w": STATE["w"].to_sparse()}, "leaves are dense"),
    ({"V": torch.ones(2)}, 'state["V"]: a tensor needs a type'),
]:  # fmt: skip
    REFUSED[f"a state with {changed!r:.60}"] = partial(saving, state=STATE | changed), words
for option, values in {"step": (-1, "3"), "keep": (0, 1.5), "async_op": ("no",)}.items():
    REFUSED |= {f"{option} {value!r}": (partial(saving, **{option: value}), option) for value in values}
for places in ([0], [0, 0, 1, 2], [0, 3, 5, 7], [-2, 0, 1, 2], [0.0, 1.0, 2.0, 3.0]):
    REFUSED[f"places {places}"] = partial(saving, places={"D": places}), "places of D"

test_refused = refused(REFUSED)
NO_STEP = ": there is no complete checkpoint here\n  fix: name "
test_refused_folders = refused(
    {
        "no run": (partial(load, "no run"), f"no run{NO_STEP}the folder of"),
        "no such step": (partial(loading, step=2), f"step-000002{NO_STEP}a step that is"),
        "none of torch's": (partial(dcp.load, "elsewhere", {}, MESH), "no checkpoint"),
    },
    FileNotFoundError,
)


def moved(metadata, leaf, **changed) -> None:
    """The block of w, where it lies, and both in other words."""
    (chunk,) = leaf.chunks
    kept = metadata.storage_data.pop(next(at for at in metadata.storage_data if at.fqn == "w"))
    chunk.offsets, chunk.sizes = (torch.Size(changed.get(n, getattr(chunk, n))) for n in ("offsets", "sizes"))
    metadata.storage_data[torch_metadata.MetadataIndex("w", chunk.offsets)] = kept


NO_TENSORS, NO_INDEX = "not a file of tensors alone", "not what torch.distributed.checkpoint writes"
OTHER_FILE, OTHER_BYTES = "is not the file that was written", "are not those that were written"
OF_BLOCKS = {
    "a pickle": (lambda good: pickle.dumps(EVIL).ljust(len(good), b"\0"), OTHER_FILE),
    "an evil object": (lambda good: saved(EVIL, len(good)), OTHER_FILE),
    "another tensor": (lambda good: saved(torch.ones(2), len(good)), OTHER_FILE),
    "a bit": (lambda good: good.replace(b"\0\0\x80?", b"\0\0\x81?", 1), OTHER_BYTES),
}
DAMAGE = {  # a file: {what: (how its bytes are changed, what is said)}
    "__0.distcp": OF_BLOCKS
    | {
        "cut short": (lambda good: good[:-10], OTHER_FILE),
        "cut shorter": (lambda good: good[:1000], "missing or cut short"),
        "a bit of the footer": (lambda good: good.replace(b'[["b", ', b'[["c", '), OTHER_FILE),
    },
    "__0_0_0.distcp": OF_BLOCKS | {"cut short": (lambda good: good[:-10], "missing or cut short")},
    "index.json": {text: (lambda _, text=text: text.encode(), "is damaged") for text in ("{", "{}", '{"leaves": 3}')},
    ".metadata": {
        f"evil {evil!r:.20}": (lambda _, evil=evil: pickle.dumps(evil), NO_INDEX)
        for evil in (EVIL, {"planner_data": EVIL}, eval, torch.load)
    },
}
INDEXED = {  # how the index is changed, by what it says of w
    "blocks that lie nowhere": lambda metadata, leaf: metadata.storage_data.clear(),
    "a block of fewer rows": partial(moved, sizes=(2, 6)),
    "a block further on": partial(moved, offsets=(2, 0)),
    "another shape": lambda metadata, leaf: setattr(leaf, "size", torch.Size((6, 4))),
    "no dtype": lambda metadata, leaf: setattr(leaf.properties, "dtype", 31),
    "another dtype": lambda metadata, leaf: setattr(leaf.properties, "dtype", torch.float64),
    "no leaves": lambda metadata, leaf: delattr(metadata, "state_dict_metadata"),
}


def index_of(good: bytes, change) -> bytes:
    metadata = pickle.loads(good)
    change(metadata, metadata.state_dict_metadata["w"])
    return pickle.dumps(metadata)


DAMAGE[".metadata"] |= {what: (partial(index_of, change=change), "") for what, change in INDEXED.items()}


def earlier_run(folder: "Path | str" = ".") -> None:
    """Unpack a step that the version of November 2026 wrote on X=2, with a file for each block."""
    with tarfile.open(Path(__file__).with_name("earlier_checkpoint.tar.xz")) as archive:
        archive.extractall(folder, filter="data")


@on_ranks({"X": 2})
def test_a_step_of_an_earlier_version_is_loaded_on_other_meshes(mesh, tmp_path):
    earlier_run(run := tmp_path / str(mesh.rank))
    types = {"w": "w[D, F_X]", "b": "b[F_X]"}
    found = checkpoint.load(run, types, mesh)
    torch.testing.assert_close(found, (tree.shard(STATE, types, mesh) | {"n": 5}, 1), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in DAMAGE for what in DAMAGE[name]])
def test_damaged_and_malicious_files_are_refused_and_found_by_verify(name, what, capsys):
    if name == "__0_0_0.distcp":
        earlier_run()
    else:
        checkpoint.save(".", STATE, TYPES, MESH, 1)
    file, (change, words) = Path("step-000001", name), DAMAGE[name][what]
    assert verify_run(["."]) == 0
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(words) or "damaged|does not hold") as refused:
        checkpoint.load(".", TYPES, MESH)
    assert "fix:" in str(refused.value)
    if what not in INDEXED:
        assert verify_run([".", "--step", "1"]) == 1
        assert f"{name}: " in (said := capsys.readouterr().out)
        assert words in said
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("evil", "words"), [(EVIL, NO_TENSORS), (torch.ones(2), "does not hold b, float32[6]")], ids=["a call", "a tensor"]
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_that_no_index_names_is_refused_unless_it_holds_the_tensor(evil, words):
    torch_dcp.save(STATE, checkpoint_id="theirs")
    (block,) = dcp.saved_leaves("theirs")["b"].blocks
    with open(Path("theirs", block.file), "r+b") as file:
        file.seek(block.start)
        file.write(saved(evil, block.nbytes))
    with pytest.raises(ValueError, match=re.escape(words)):
        dcp.load("theirs", TYPES, MESH)
    assert not Path("never").exists()


def test_nothing_is_made_but_records():
    unpickled = lambda data: dcp._Restricted(io.BytesIO(data)).load()  # noqa: E731
    formats = torch_metadata._MEM_FORMAT_ENCODING
    by_name = [Call(getattr, formats, of.name) for of in formats]  # as Python before 3.11.5 pickles an enum's member
    for what in torch_metadata.Metadata({}), Path("a/b"), formats(0), *by_name:
        assert type(unpickled(pickle.dumps(what))) is dcp.PickledRecord
    for of, name in ((torch.Size, "__class__"), (formats, "__class__"), (torch.float32, "__reduce__"), (4, "real")):
        with pytest.raises(pickle.UnpicklingError, match=name):
            unpickled(pickle.dumps(Call(getattr, of, name)))
    of_3_13 = pickle.dumps(Path("a/b"), protocol=0).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert unpickled(of_3_13).given == ("a", "b")


@on_ranks({"X": 4})
def test_replicas_that_differ_are_named_as_one_of_them_would_be_lost(mesh, tmp_path):
    state = {"W": torch.ones(2, 3), "b": torch.full((3,), float(mesh.rank == 1)), "ids": torch.ones(2) * 1j}
    with pytest.raises(ArithmeticError) as refused:
        checkpoint.save(tmp_path, state, {"W": "W[D_X, F]", "b": "b[F]", "ids": "ids[I]"}, mesh, 5)
    said = str(refused.value)
    assert 'step 5: state["b"], b[F], is replicated over X, but rank 1 of 4 has oth' in said
    assert not os.listdir(tmp_path)
