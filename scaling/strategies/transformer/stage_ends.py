"""The ends of a Transformer on pipeline stages: each table of the vocabulary where it is used, and its gradient back.

    U[D_X, V_YZ] -> U[D_X, V_Y] {U_Z} -> U[D, V_Y]             gathered at the last stage, and there over X
    dU[D, V_Y] {U_X} -> dU[D_X, V_Y] {U_Z} -> dU[D_X, V_YZ]    reduced there, and scattered to all stages

In store the vocabulary is split over Z, too. The embedding goes to the first stage in the same way. A tied table is
used by both ends: all stages gather it, and its gradient is the sum of both.
"""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from scaling import tree
from scaling.collectives import gather, scatter, wait
from scaling.configs import Config
from scaling.models.types import without
from scaling.schedules import Schedule
from scaling.spec import parse
from scaling.strategies.transformer.step import ENDS, Problem, end_weights, reduce_gradients


def homes_of(config: Config, mesh, schedule: Schedule | None) -> dict[str, int]:
    """{a table of the vocabulary that is stored over Z: the place along Z of the stage that alone uses it}."""
    if schedule is None or config.tied or mesh.sizes["Z"] == 1:
        return {}
    return {"embed": schedule.placement[0], "unembed": schedule.placement[-1]}


def stage_ends(params: Mapping, problem: Problem, homes: Mapping[str, int]) -> dict[str, Tensor]:
    """What this stage uses of the params outside the layers, gathered."""
    stored, used, mesh = problem.stored, problem.used, problem.mesh
    coming = {
        name: gather(_line_there(stored[name]), params[name], mesh, root=home, async_op=True)
        for name, home in homes.items()
    }
    tables = {name: wait(pending) for name, pending in coming.items()}
    tables = {name: W for name, W in tables.items() if mesh.coord["Z"] == homes[name]}
    common = {name: W for name, W in params.items() if name not in homes}
    return end_weights(tables, _at_home(stored), used, mesh) | end_weights(common, stored, used, mesh)


def ends_gradients(dW: Mapping, params: Mapping, problem: Problem, homes: Mapping[str, int]) -> dict[str, Tensor]:
    """Gradients of what this stage used of the ends, unreduced over what splits the tokens -> all, typed as params."""
    stored, used, mesh = problem.stored, problem.used, problem.mesh
    there = _at_home(stored)
    tables = reduce_gradients({name: g for name, g in dW.items() if name in homes}, there, used, mesh)
    done = reduce_gradients({name: g for name, g in dW.items() if name not in homes}, stored, used, mesh, ENDS)
    for name, home in homes.items():
        if name not in tables:
            shape = parse(there[name]).local_shape(problem.config.sizes, mesh)
            tables[name] = params[name].new_zeros(shape, dtype=problem.sums)
        done[name] = scatter(_line_back(stored[name]), tables[name], mesh, root=home, async_op=True)
    return tree.map(wait, done)


def _at_home(stored: Mapping) -> dict[str, str]:
    """The types of the tables where they are used, before they are gathered over X."""
    return {name: without(text, ("Z",)) for name, text in stored.items() if name != "layers"}


@lru_cache(maxsize=4096)
def _line_there(stored: str) -> str:
    return f"{stored} -> {parse(without(stored, ('Z',))).with_unreduced(['Z'])}"


@lru_cache(maxsize=4096)
def _line_back(stored: str) -> str:
    return f"{parse(without(stored, ('Z',))).with_unreduced(['Z'])} -> {stored}"
