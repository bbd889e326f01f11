"""Eight programs with one waste each, and the same without it, for planted.py. `step(mesh, state, fixed)`."""

from collections.abc import Callable
from dataclasses import dataclass
from time import sleep

import torch

from scaling import optim
from scaling.collectives import all_gather, all_reduce, einsum, recv, reduce_scatter, send, wait
from scaling.strategies import context

L = 4


@dataclass(frozen=True)
class Program:
    """`kind`: the suggestion that is right; `make(mesh)`: the state of the steps."""

    kind: str
    make: Callable
    step: Callable


def layers(mesh) -> dict:
    """x[B, D] and W[L, D_X, D]."""
    return {"x": torch.randn(256, 1024), "W": 0.03 * torch.randn(L, 1024 // mesh.size(), 1024)}


GATHER, PRODUCT = "W[D_X, F] -> W[D, F]", "x[B_X, D] * W[D, F] -> y[B_X, F]"


def gathers(mesh, s, fixed) -> None:
    """Weights gathered where they are needed; a layer ahead."""
    x, ahead = s["x"], all_gather(GATHER, s["W"][0], mesh, async_op=True) if fixed else None
    for l in range(L):
        W = wait(ahead) if fixed else all_gather(GATHER, s["W"][l], mesh)
        if fixed and l + 1 < L:
            ahead = all_gather(GATHER, s["W"][l + 1], mesh, async_op=True)
        x = einsum(PRODUCT, x, W)


def twice(mesh, s, fixed) -> None:
    """An activation gathered for each of the two matrices that multiply it; once for both."""
    V = s["W"][:, :, :512]
    for l in range(L):
        a = einsum("x[B_X, D] -> a[B_X, D]", s["x"])
        whole = all_gather("a[B_X, D] -> a[B, D]", a, mesh)
        einsum("a[B, E] * V[E, F_X] -> y[B, F_X]", whole[:, : len(V[l])], V[l])
        again = whole if fixed else all_gather("a[B_X, D] -> a[B, D]", a, mesh)
        einsum("a[B, E] * V[E, F_X] -> z[B, F_X]", again[:, : len(V[l])], V[l])


def wire(mesh, s, fixed) -> None:
    """Products in bfloat16, whose partial sums are added up in float32; in bfloat16."""
    x, W = s["x"].bfloat16(), s["W"][0].bfloat16()
    for _ in range(L):
        y = einsum("x[B, E_X] * W[E_X, F] -> y[B, F] {U_X}", x[:, : len(W)], W)
        y = all_reduce("y[B, F] {U_X} -> y[B, F]", y if fixed else y.float(), mesh)


def buckets(mesh, s, fixed) -> None:
    """64 gradients of 4 kB, each reduced by itself; all together."""
    x, W = s["x"], s["W"][0]
    einsum("x[B, E] * W[E, F] -> y[B, F]", x[:, : len(W)], W)
    if fixed:
        all_reduce("dW[N, D] {U_X} -> dW[N, D]", torch.ones(64, 1024), mesh)
        return
    for _ in range(64):
        all_reduce("dW[D] {U_X} -> dW[D]", torch.ones(1024), mesh)


def sequences(mesh) -> dict:
    return {name: torch.randn(1, 1024 // mesh.size(), 4, 64) for name in "QKV"}


def attention(mesh, s, fixed) -> None:
    """Causal attention, each rank with a piece of the sequence: the last one sees most; in zig-zag order all alike."""
    form = "zigzag" if fixed else "ring"
    for _ in range(L):
        context.attention(s["Q"], s["K"], s["V"], mesh, axis="X", form=form)


def sends(mesh, s, fixed) -> None:
    """Rank 0 hands its result on and waits until it is taken; goes on at once."""
    x, W, pending = s["x"], s["W"].flatten(0, 1), None

    def work() -> torch.Tensor:
        return einsum("x[B, E] * W[E, F] -> y[B, F]", x, W[:1024])

    for _ in range(2):
        y = work()
        if mesh.rank == 0:
            pending = send("y[B, F]", y, mesh, "X", 1, async_op=fixed)
        work(), work()
        if mesh.rank == 1:
            recv("y[B, F]", y, mesh, "X", 0)
        if mesh.rank == 0 and fixed:
            wait(pending)


def late(mesh, s, fixed) -> None:
    """Rank 1 does something else for 20 ms in each step."""
    x, W = s["x"], s["W"][0]
    y = einsum("x[B, E_X] * W[E_X, F] -> y[B, F] {U_X}", x[:, : len(W)], W)
    if mesh.rank == 1 and not fixed:
        sleep(0.02)
    y = einsum("y[B, F] {U_X} -> z[B] {U_X}", y)
    all_reduce("z[B] {U_X} -> z[B]", y, mesh)


ADAMW = optim.adamw(1e-3)


def trained(mesh) -> dict:
    n, m = mesh.size(), 4_000_000
    whole, shard = {"W": torch.randn(m)}, {"W": torch.randn(m // n)}
    return {"W": whole, "shard": shard, "state": ADAMW.init(whole), "part": ADAMW.init(shard), "dW": torch.randn(m)}


def update(mesh, s, fixed) -> None:
    """Every rank updates all params; its own part of them, which are then gathered."""
    if fixed:
        grads = reduce_scatter("dW[D] {U_X} -> dW[D_X]", s["dW"], mesh)
        params, _ = ADAMW.update({"W": grads}, s["part"], s["shard"])
        all_gather("W[D_X] -> W[D]", params["W"], mesh)
    else:
        grads = all_reduce("dW[D] {U_X} -> dW[D]", s["dW"], mesh)
        ADAMW.update({"W": grads}, s["state"], s["W"])


PROGRAMS = {
    "no prefetch": Program("prefetch", layers, gathers),
    "gathered twice": Program("twice", layers, twice),
    "float32 sent": Program("wire", layers, wire),
    "tiny buckets": Program("buckets", layers, buckets),
    "unbalanced": Program("unbalanced", sequences, attention),
    "blocking send": Program("send", layers, sends),
    "straggler": Program("straggler", layers, late),
    "replicated": Program("replicated", trained, update),
}
