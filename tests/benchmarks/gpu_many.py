"""Parts `beside` and `trace` of gpu.py: strategies on all ranks beside PyTorch's own, and a profile of a step."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import versus_torch
import versus_torch_transformer as whole
from gpu_equal import join
from gpu_one import race_here
from harness import SIZES, Size
from versus_torch_transformer import SMALL

from scaling.configs import get
from scaling.cost.transformer import train_flops
from scaling.profile import profile

SIDES = ("ours", "tuned", "ours compiled", "tuned compiled")
PAIRS = {"eager": ("ours", "tuned"), "compiled": ("ours compiled", "tuned compiled")}
STRATEGIES = ("dp", "fsdp", "tp-rows", "fsdp_tp", "1f1b")
LARGE = Size(8, 4096, 16384, 16384, dtype=torch.bfloat16)
TRANSFORMERS = {"fsdp": "X", "tp": "Y", "fsdp_tp": "XY", "interleaved": "ZX"}


def large(tiny: bool) -> whole.Size:
    """Four layers as Llama 3 8B's, with a quarter of its vocabulary."""
    if tiny:
        return replace(SMALL, dtype=torch.float32)
    return whole.Size(get("llama3-8b").with_(name="Llama 3 8B's layers", L=4, V=32768), 8, 4096, dtype=torch.bfloat16)


def cases_beside(device: str, tiny: bool) -> dict[str, Callable]:
    mesh_of, ranks = join(device), int(os.environ["WORLD_SIZE"])
    size, samples, sides = (SIZES["tiny"], 3, SIDES[:2]) if tiny else (LARGE, 10, SIDES)
    contests, cases = versus_torch.contests(), {}

    def one(name: str, optimizer: str) -> list[dict]:
        contest = contests[name]
        mesh = mesh_of(contest.axes(ranks))
        chosen = sides[:2] if "Z" in mesh.sizes else sides
        built = {side: partial(contest.side(side), mesh, size, optimizer) for side in chosen}
        about = {"model": str(size), "ours": name, "theirs": contest.rival, "mesh": mesh.sizes}
        return [race_here(built, samples, size, size.flops, PAIRS, **about)]

    def transformer(name: str, axes: str, compiled: bool = False) -> list[dict]:
        given, (first, *rest) = large(tiny), axes
        mesh = mesh_of({first: 2 if rest else ranks} | dict.fromkeys(rest, ranks // 2))
        ours, tuned = SIDES[2:] if compiled else SIDES[:2]
        how = {"compiled": True} if compiled else {}
        built = {ours: partial(whole.ours, mesh, given, "adamw", **how)}
        built[tuned] = partial(whole.theirs, mesh, given, "adamw", tuned=True, **how)
        rival = whole.LAYOUTS[name][0]
        about = {"model": str(given), "ours": f"Transformer, {name}", "theirs": rival, "mesh": mesh.sizes}
        flops = sum(train_flops(given.config, given.B, given.T, causal=True).values())
        return [race_here(built, samples, given, flops, PAIRS, **about)]

    for name in STRATEGIES:
        if ranks > 2 or len(contests[name].axes(ranks)) == 1:
            cases[f"{name}, adamw"] = partial(one, name, "adamw")
    for name, axes in TRANSFORMERS.items():
        if ranks > 2 or len(axes) == 1:
            cases[f"Transformer, {name}"] = partial(transformer, name, axes)
    if not tiny:
        cases["Transformer, fsdp, compiled"] = partial(transformer, "fsdp", "X", compiled=True)
    return cases


def cases_trace(device: str, tiny: bool) -> dict[str, Callable]:
    """One step of the Transformer under FSDP, profiled on all ranks after two that were not."""
    mesh = join(device)({"X": int(os.environ.get("WORLD_SIZE", 1))})

    def traced() -> list[dict]:
        given = large(tiny)
        step = whole.ours(mesh, replace(given, B=max(given.B, mesh.size())), "adamw")
        for _ in range(2):
            step()
        with profile() as found:
            step()
        if mesh.rank == 0:
            found.save(Path(os.environ["GPU_OUT"]) / "trace.json")
        return [{"file": "trace.json", "seconds": found.seconds, "ranks": mesh.size()}]

    return {"Transformer under FSDP": traced}
