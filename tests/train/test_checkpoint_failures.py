"""A run that is killed while it saves, a full disk, damaged files and indices, what would come back as something else:
each is refused with its fix, and the last good checkpoint stays."""

import io
import os
import pickle
import re
import resource
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from machine import RankFailed
from refused import refused
from runs import SPECS, Malicious, load, save
from torch.distributed.checkpoint.metadata import MetadataIndex

from scaling import launch, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.train import checkpoint, durable, verify

MESH = Mesh({"X": 1, "Y": 1})
STATE = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(6.0)}
TYPES = {"w": "w[D_X, F_Y]", "b": "b[F_Y]"}


def test_a_program_that_has_ended_does_not_wait_for_files_of_a_rank_that_is_gone(monkeypatch):
    monkeypatch.setattr(durable, "AT_END", 0.05)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
    mesh = AbstractMesh({"X": 2})
    pending = checkpoint.save(".", {"W": torch.ones(2)}, {"W": "W[D_X]"}, mesh, 1, async_op=True)
    with pytest.raises(TimeoutError, match=r"__1_0_0.distcp: not written within 0.05 s"):
        pending.result(60)
    assert checkpoint.complete(Path()) == []


def dies_while_saving(mesh):
    for step in range(1, 4):
        if (step, mesh.rank) == (3, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.save(".", {"W": torch.full((2,), float(step))}, {"W": "W[D_X]"}, mesh, step)


def test_a_run_that_is_killed_leaves_the_last_good_one():
    with pytest.raises(launch.RankError):
        launch.run(dies_while_saving, {"X": 2})
    assert load() == ([2.0] * 4, 2)


def leftovers(mesh, folder):
    """A run on this mesh, after one on another mesh that was killed when one rank had written its file."""
    if mesh.rank == 0:
        (folder / ".step-000001").mkdir()
        torch.save(torch.zeros(7), folder / ".step-000001" / "__1_0_0.distcp")
    tree.unshard({"n": torch.ones(1)}, {"n": "n[D_X]"}, mesh)  # all ranks see the leftovers
    checkpoint.save(folder, {"W": torch.ones(4)}, {"W": "W[D_X]"}, mesh, 1)
    return checkpoint.load(folder, SPECS, mesh)[0]["W"].sum().item()


def test_files_of_a_killed_run_are_not_taken_for_this_one_s(ranks, tmp_path):
    assert ranks(leftovers, {"X": 2}, tmp_path) == [8.0, 8.0]


def test_a_full_disk_leaves_the_last_good_one_and_says_how_much_was_to_be_written():
    save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    words = r"__0_0_0.distcp: its 400,000 bytes could not be written(.|\n)*fix: make room"
    try:
        with pytest.raises(OSError, match=words):
            save(2, torch.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load()[1] == 1


def saved(what, length: int) -> bytes:
    """A file as torch writes it, with zip's comment made longer."""
    torch.save(what, out := io.BytesIO())
    data = bytearray(out.getvalue())
    data[-2:] = (length - len(data)).to_bytes(2, "little")
    return bytes(data).ljust(length, b"\0")


DAMAGED = [  # what the file holds in the place of what was written, and what is said
    (lambda good: good[:-10], "missing or cut short"),
    (lambda good: pickle.dumps(Malicious()).ljust(len(good), b"\0"), "not a file of tensors alone"),
    (lambda good: saved(Malicious(), len(good)), "not a file of tensors alone"),
    (lambda good: saved(torch.ones(2), len(good)), r"does not hold W, float32\[3\]"),
    (lambda good: good.replace(b"\0\0\x80?", b"\0\0\x81?", 1), "its bytes are not those that were written"),
]


def test_damaged_and_malicious_files_are_refused_and_found_by_verify(capsys):
    save(1)
    file = Path("step-000001/__0_0_0.distcp")
    good = file.read_bytes()
    assert verify.main(["."]) == 0
    for content, words in DAMAGED:
        file.write_bytes(content(good))
        with pytest.raises(ValueError, match=f"__0_0_0.distcp: {words}"):
            load()
        assert verify.main([".", "--step", "1"]) == 1
        assert re.search(f"{file.name}: {words}", capsys.readouterr().out)
    file.with_name("index.json").write_text("{}")
    assert [verify.main(["."]), verify.main(["no run"])] == [1, 2]
    assert not Path("never").exists()


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
ALIKE = {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}
REFUSED: dict = {  # what: the call, and words of its error
    "loaded, of other dims": (partial(loading, TYPES | {"w": "w[D_X]"}), "was saved with shape [4, 6]"),
    "loaded, a leaf less": (partial(loading, {"w": TYPES["w"]}), "holds b, which"),
    "loaded, a leaf more": (partial(loading, TYPES | {"z": "z[D]"}), "has no z; it has b, w"),
    "loaded, of other places": (partial(loading, places={"D": [0, 1]}), "shape [4, 6], but D is 2 here\n  fix:"),
    "loaded, partial sums": (partial(loading, PARTIAL), "is unreduced"),
    "partial sums": (partial(saving, specs=PARTIAL), "is unreduced"),
    "a type more": (partial(saving, specs=TYPES | {"z": "z[D]"}), 'state["z"]: the specs have a type there'),
    "a type of other dims": (partial(saving, specs=TYPES | {"w": "w[D_X]"}), "have the dims of their types"),
    "two leaves of one name": (
        partial(saving, state=STATE | ALIKE, specs=TYPES | {"a": {"b": "b[D]"}, "a.b": "b[D]"}), "have one name",
    ),
}  # fmt: skip
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
test_refused_axes = refused(
    {"saved": partial(saving, specs=ELSEWHERE), "loaded": partial(loading, ELSEWHERE)}, always="unknown mesh axis Q"
)
NO_STEP = ": there is no complete checkpoint here\n  fix: name "
test_refused_folders = refused(
    {
        "no run": (partial(load, "no run"), f"no run{NO_STEP}the folder of"),
        "no such step": (partial(loading, step=2), f"step-000002{NO_STEP}a step that is"),
    },
    FileNotFoundError,
)


def moved(metadata, leaf, **changed) -> None:
    """The block of w, where it lies, and both in other words."""
    (chunk,) = leaf.chunks
    kept = metadata.storage_data.pop(next(at for at in metadata.storage_data if at.fqn == "w"))
    chunk.offsets, chunk.sizes = (torch.Size(changed.get(n, getattr(chunk, n))) for n in ("offsets", "sizes"))
    metadata.storage_data[MetadataIndex("w", chunk.offsets)] = kept


DAMAGES = {  # how the index is changed, by what it says of w
    "blocks that lie nowhere": lambda metadata, leaf: metadata.storage_data.clear(),
    "a block of fewer rows": partial(moved, sizes=(2, 6)),
    "a block further on": partial(moved, offsets=(2, 0)),
    "another shape": lambda metadata, leaf: setattr(leaf, "size", torch.Size((6, 4))),
    "no dtype": lambda metadata, leaf: setattr(leaf.properties, "dtype", 31),
    "another dtype": lambda metadata, leaf: setattr(leaf.properties, "dtype", torch.float64),
    "no leaves": lambda metadata, leaf: delattr(metadata, "state_dict_metadata"),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "{", '{"leaves": 3}'])
def test_an_index_that_does_not_fit_its_files_is_damaged(damage):
    checkpoint.save(".", STATE, TYPES, MESH, 1)
    path, words = Path("step-000001/.metadata"), r"(damaged|does not hold)(.|\n)*fix:"
    if damage in DAMAGES:
        metadata = pickle.loads(path.read_bytes())
        DAMAGES[damage](metadata, metadata.state_dict_metadata["w"])
        path.write_bytes(pickle.dumps(metadata))
    else:
        path.with_name("index.json").write_text(damage)
        words = r"index\.json: is damaged(.|\n)*fix:"
    with pytest.raises(ValueError, match=words):
        checkpoint.load(".", TYPES, MESH)


def test_a_file_latest_that_names_no_step_is_passed_over():
    save(4)
    for text in ("", "-1", "99"):
        Path("latest").write_text(text)
        assert load() == ([4.0] * 3, 4)


def saves_replicas_that_differ(mesh, folder):
    state = {"W": torch.ones(2, 3), "b": torch.full((3,), float(mesh.rank == 1)), "ids": torch.ones(2) * 1j}
    checkpoint.save(folder, state, {"W": "W[D_X, F]", "b": "b[F]", "ids": "ids[I]"}, mesh, 5)


def test_replicas_that_differ_are_named_as_one_of_them_would_be_lost(ranks, tmp_path):
    with pytest.raises(
        RankFailed, match=r'step 5: state\["b"\], b\[F\], is replicated over X, but rank 1 of 4 has oth'
    ):
        ranks(saves_replicas_that_differ, {"X": 4}, tmp_path)
    assert not os.listdir()
