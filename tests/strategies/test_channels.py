"""What pipeline stages hand to each other: of one shape and dtype, each message told from all others; send and recv."""

import pytest
import torch
from machine import RankFailed

from scaling.mesh import AbstractMesh, Mesh
from scaling.schedules import make
from scaling.schedules.instructions import RECVS, SENDS
from scaling.strategies import pipeline
from scaling.strategies.channels import Channels
from scaling.strategies.stage import mlp

B, D, F, L = 8, 4, 8, 4
BROKEN = {
    "fewer columns": lambda Out: Out[:, :-1],
    "fewer rows": lambda Out: Out[:1],
    "a dim more": lambda Out: Out[None],
    "bfloat16": torch.Tensor.bfloat16,
    "float64": torch.Tensor.double,
}


def run(mesh, change, half):
    """A pipeline of which each stage's result of one kind, or the batch of one rank, is changed."""
    g = torch.Generator().manual_seed(0)
    params = {"W_in": torch.randn(L // 2, D, F, generator=g), "W_out": torch.randn(L // 2, F, D, generator=g)}
    In, stage = torch.randn(B, D, generator=g), mlp()
    if half == "forward":
        stage = stage._replace(forward=changed(stage.forward, change))
    if half == "backward":
        stage = stage._replace(backward_input=changed(stage.backward_input, change))
    if half == "batch" and mesh.rank == 1:
        In = BROKEN[change](In)
    mesh = Mesh(mesh.sizes, timeout=20)  # unchecked: in the checked mode the ranks would compare their batches first
    return pipeline.value_and_grad(params, In, In, mesh, make("1f1b", 2, 2), lambda Out, In: Out.sum(), stage)


def changed(function, change):
    def wrapped(*args):
        x, rest = function(*args)
        return BROKEN[change](x), rest

    return wrapped


SENT = "this rank sends x[B, D] of (4, 4) float32\n"


@pytest.mark.parametrize(
    ("change", "half", "words"),
    [
        ("fewer columns", "forward", "SendActivation x[B, D]\n  stage 0 hands on torch.float32 (4, 3) on cpu"),
        ("bfloat16", "forward", "hands on torch.bfloat16 (4, 4) on cpu, but microbatches of In are torch.float32"),
        ("float64", "forward", "hands on torch.float64"),
        ("a dim more", "forward", "hands on torch.float32 (1, 4, 4)"),
        ("fewer rows", "backward", "SendGrad x[B, D]\n  stage 1 hands on torch.float32 (1, 4) on cpu"),
        ("fewer columns", "batch", SENT + "  rank 1 expects x[B, D] of (4, 3) float32\n  rule: what is received"),
        ("float64", "batch", SENT + "  rank 1 expects x[B, D] of (4, 4) float64\n  rule: what is received"),
    ],
)
def test_a_stage_hands_on_what_the_next_one_waits_for(ranks, change, half, words):
    with pytest.raises(RankFailed) as error:
        ranks(run, {"Z": 2}, change, half)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev"])
def test_messages_between_two_ranks_have_tags_of_their_own(name):
    """Sent and received under one tag; and no two, nor the notes, under the same."""
    schedule = make(name, 4, 8)
    tags: dict[tuple, list] = {}
    for rank, program in enumerate(schedule):
        channels = Channels(AbstractMesh({"Z": 4}, {"Z": rank}), "Z", schedule, torch.empty(2, device="meta"), "x[B]")
        for step in program:
            if isinstance(step, RECVS + SENDS):
                receive = isinstance(step, RECVS)
                route, note = (channels.route(step, receive=receive, note=note) for note in (False, True))
                ends = (step.peer, rank) if receive else (rank, step.peer)
                assert route["group_src" if receive else "group_dst"] == step.peer
                assert note["group_dst" if receive else "group_src"] == step.peer
                tags.setdefault((receive, *ends), []).append(route["tag"])
                tags.setdefault((receive, "notes", *ends), []).append(note["tag"])
    for (receive, *ends), found in tags.items():
        assert sorted(found) == sorted(tags[(not receive, *ends)])
        if ends[0] != "notes":
            assert len(set(found)) == len(found)
            assert not set(found) & set(tags[(receive, "notes", *ends)])
