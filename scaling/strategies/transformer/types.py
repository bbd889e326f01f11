"""The types of a Transformer's params on a mesh: P pods, Z stages, X data, C context, Y tensor, E experts (Part 5).

Each leaf of `scaling.models.leaves` has two types: its stored type, and its type while a layer uses it, gathered over X
(and for the ends over Z). Axes that the mesh lacks, or has with size 1, drop out. Params are replicated over P and C,
and, except for the experts, over E.

Virtual stages get L layers as evenly as possible, the first ones one more. Each stores an equal number of slots; empty
slots are zeros and are never run.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise

from scaling.common.arguments import one_of
from scaling.configs import Config
from scaling.models.leaves import AXES, KV_HEADS, check_computed, types_of, without
from scaling.models.lora import Lora, adapter_specs
from scaling.schedules import Schedule, make
from scaling.spec import ShardingError, mesh_sizes


def specs(config: Config, mesh, *, zero: int = 3, schedule=None, lora: Lora | None = None) -> dict:
    """Return the stored types of the params, a tree like the params of `models.transformer`.

    With zero 3, matrices are also sharded over X (FSDP). With 0, 1 and 2 they are replicated over X, where 1 and 2
    shard the gradients and the optimizer's state (`grad_specs`). W_K and W_V have no Y if |Y| does not divide K: each
    rank then computes the KV heads that its query heads see. A vocabulary that does not divide is padded
    (`padded_sizes`). With `lora` the tree also has the types of adapters, under "lora".

    Raises:
        ShardingError: A Transformer cannot use an axis, or heads, features or experts do not divide.
    """
    one_of("zero", zero, (0, 1, 2, 3))
    found = deepcopy(_specs(config, tuple(mesh_sizes(mesh).items()), zero))  # which the caller may modify
    if lora is None:
        return found
    lora.check(config)
    staged = mesh_sizes(mesh).get("Z", 1) > 1
    if zero != 3 or (staged and slots_of(config, mesh, schedule) != [*range(config.L)]):
        raise ShardingError(
            f"{config.name}: adapters on {mesh} with zero {zero}\n"
            "  rule: adapters are stored in the order of the layers, as many on each stage Z, no dense ones first, "
            "and not beside weights that X replicates\n  fix: give a Z that divides the layers (1 if dense layers "
            "come first), a schedule with one part per rank, and zero 3"
        )
    return found | {"lora": adapter_specs(config, lora, found)}


def grad_specs(config: Config, mesh, *, zero: int = 3) -> dict:
    """Return the types of the gradients that a step returns; the optimizer's state has them, too.

    They are the params' types, but with zero 1 and 2 the gradients are sharded over X, where params are replicated:
    they are reduced at the end of the step (1) or layer by layer (2).
    """
    one_of("zero", zero, (0, 1, 2, 3))
    return specs(config, mesh, zero=3 if zero else 0)


@lru_cache(maxsize=256)
def _specs(config: Config, mesh: tuple[tuple[str, int], ...], zero: int) -> dict:
    """Return the types of `specs`, cached because each step needs them."""
    sizes = dict(mesh)
    _check_mesh(config, sizes, zero)
    check_computed(config)
    unused = tuple(axis for axis in AXES if sizes.get(axis, 1) == 1) + (() if zero == 3 else ("X",))
    whole_heads = KV_HEADS if config.K % sizes.get("Y", 1) else ()
    return types_of(config, lambda name, leaf: without(leaf.trained, (*unused, "Y") if name in whole_heads else unused))


def padded_sizes(config: Config, mesh) -> dict[str, int]:
    """Return the sizes of the stored params, where V is the next multiple of |Y| |Z|.

    Entries beyond the vocabulary are zeros. They have no logit, so no gradient reaches them.
    """
    sizes = mesh_sizes(mesh)
    parts = sizes.get("Y", 1) * sizes.get("Z", 1)
    return config.sizes | {"V": -(-config.V // parts) * parts}


def schedule_of(schedule: "Schedule | str | None", mesh, microbatches: int) -> Schedule | None:
    """Return the schedule as an object: 1F1B unless one is named or given, None without stages."""
    Z = mesh.sizes.get("Z", 1)
    if schedule is None and Z == 1:
        return None
    if not isinstance(schedule, Schedule):
        schedule = make(schedule or "1f1b", Z, microbatches)
    if schedule.stages != Z or schedule.microbatches != microbatches:
        raise ValueError(
            f"{schedule.name}: is of {schedule.stages} stages and {schedule.microbatches} microbatches, but the mesh "
            f"has Z={Z} and microbatches={microbatches}\n  fix: make it with these"
        )
    return schedule


def storing_schedule(schedule: "Schedule | str | None", mesh) -> Schedule | None:
    """Return a schedule that stores the layers as the given one does; a schedule's name needs no microbatches here."""
    if isinstance(schedule, Schedule):
        return schedule
    return schedule_of(schedule, mesh, 2 * mesh.sizes.get("Z", 1))


def layers_of(config: Config, schedule: Schedule | None) -> list[range]:
    """Return the layers of each virtual stage, counted in their stack.

    Raises:
        ValueError: there are more stages than layers.
    """
    V, L = 1 if schedule is None else schedule.virtual_stages, config.sizes["L"]
    if V > L:
        which = " after the dense ones" if config.dense else ""
        raise ValueError(
            f"{config.name}: L={L} layers{which} cannot fill {V} stages\n  fix: use fewer stages or chunks"
        )
    bounds = [s * (L // V) + min(s, L % V) for s in range(V + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def slots_of(config: Config, mesh, schedule: "Schedule | str | None") -> list[int]:
    """Return the layer that each slot of the stored stack [L_Z] holds; -1 for none."""
    schedule = storing_schedule(schedule, mesh)
    stages = layers_of(config, schedule)
    if schedule is None:
        return list(stages[0])
    depth, slots = max(map(len, stages)), []
    for rank in range(schedule.stages):
        for s in schedule.stages_of(rank):
            slots += [*stages[s], *[-1] * (depth - len(stages[s]))]
    return slots


def stored_places(config: Config, mesh, schedule: "Schedule | str | None" = None) -> dict[str, list[int]]:
    """Return the index in the model of each slot of the stored stack [L_Z]; -1 for none.

    If the vocabulary [V_YZ] is padded, the indices of its entries are returned as well.
    """
    found = {"L": slots_of(config, mesh, schedule)}
    more = padded_sizes(config, mesh)["V"] - config.V
    return found | ({"V": [*range(config.V), *[-1] * more]} if more else {})


def _check_mesh(config: Config, sizes: Mapping[str, int], zero: int) -> None:
    """Raise ShardingError unless the model's sizes divide over the mesh's axes, which must be known ones."""
    if unknown := [axis for axis in sizes if axis not in AXES]:
        raise ShardingError(
            f"{config.name}: mesh axis {unknown[0]} splits nothing of a Transformer\n"
            f"  rule: the axes are {', '.join(AXES)}: pods, stages, data, context, tensor, experts\n"
            "  fix: rename the axis to one of these"
        )
    if (config.linear or isinstance(config.dense_layers, tuple)) and sizes.get("Z", 1) > 1:
        what = "linear layers" if config.linear else "dense layers among those with experts"
        raise ShardingError(
            f"{config.name}: {what} over Z={sizes['Z']}\n  rule: a stage stores layers of one kind, after dense first "
            "layers\n  fix: give the ranks of Z to X, C or Y"
        )
    X, Y, E = (sizes.get(axis, 1) for axis in "XYE")
    wanted = [("N", config.N, Y, "query heads"), ("F", config.F, Y, "features")]
    wanted += [("F_dense", config.F_dense, Y, "features of dense layers")] if config.dense_layers else []
    wanted += [("k", config.linear.keys, Y, "heads of linear layers")] if config.linear else []
    wanted += [("D", config.D, X, "model dims")] if zero == 3 else []  # else no param is split over X
    if config.latent and zero == 3:
        wanted += [("R", config.sizes["R"], X, "of the queries' rank")]
        wanted += [("C", config.latent.kv_rank, X, "of the keys' and values' rank")]
    if config.latent and config.latent.value > config.latent.nope + config.latent.rope:
        raise ShardingError(
            f"{config.name}: V[B, T, N, {config.latent.value}] of latent attention is wider than its keys\n"
            "  rule: kernels of attention take heads of one width, to which values are padded\n"
            "  fix: give a value of at most nope + rope"
        )
    check_divided(config, Y, [*wanted, ("E", config.E, E, "experts")])


def check_divided(config: Config, Y: int, wanted: Sequence[tuple[str, int, int, str]]) -> None:
    """Raise a ShardingError unless heads split over Y, and each (dim, size, blocks, noun) into its blocks."""
    if (config.qk_wide or config.qk_layernorm) and config.K % Y:
        raise ShardingError(
            f"{config.name}: K={config.K} KV heads over Y={Y}\n"
            "  rule: its norms have gains of each head, and every rank along Y has whole heads"
            "\n  fix: choose Y among divisors of K"
        )
    if config.K % Y and Y % config.K:
        raise ShardingError(
            f"{config.name}: K={config.K} KV heads over Y={Y}\n  rule: Y divides K, or is a multiple of it, so that "
            f"each rank's query heads share whole KV heads\n  fix: choose Y among divisors or multiples of {config.K}"
        )
    for dim, size, parts, what in wanted:
        if size % parts:
            raise ShardingError(
                f"{config.name}: {dim}={size} {what} do not divide into {parts} blocks\n"
                f"  fix: use fewer devices along that axis, or pad {dim} to a multiple of {parts}"
            )
