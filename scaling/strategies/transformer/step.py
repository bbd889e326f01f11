"""A training step: its options, and the step resolved for one mesh (Part 5).

A run repeats one step thousands of times. `resolve` reads its options, the model and the shapes of params and batch
once per mesh, refuses combinations that do not fit, and returns a `TrainStep`: the types, the lines and the settings
that the layers, the stages and the ends read. Only the values of a batch are checked each time.

The *ends* are the params outside the layers: the embedding, the last norm and the unembedding. A leaf has a stored
type, and a used type, gathered over X (for the ends also over Z). By the law of cotangents its gradient is unreduced
over every axis that splits the tokens and not the leaf. It is reduced over X inside a pod first, then over the other
axes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives.checked import spoken
from scaling.common.arguments import not_negative, one_of, positive, whole
from scaling.common.limits import LIMITS, Limits
from scaling.configs import Config
from scaling.cost.transformer import REDUCES
from scaling.mesh import Group
from scaling.models.inputs import check_ids, check_segments, check_weights
from scaling.models.leaves import STACKS, matrices_of, without
from scaling.models.lora import Lora
from scaling.scaled import RECIPES, UNSCALED, check_block, check_matrix
from scaling.schedules import Schedule
from scaling.spec import ShardingError, Spec, format_of, parse, present
from scaling.strategies.context.ring import FORMS
from scaling.strategies.transformer import types
from scaling.strategies.transformer.ends import Terms
from scaling.strategies.transformer.layer import REMAT, dropped

TOKENS = ("P", "X", "E", "C", "Y")  # the axes that split the tokens, over which the loss is unreduced
TOKENS_AND_STAGES = (*TOKENS, "Z")  # with Z for leaves outside the layers, which not every stage uses


@dataclass(frozen=True)
class StepOptions:
    """The options of a training step, in addition to the model, the params and the batch.

    Attributes:
        microbatches: The number of parts in which a rank's rows are run in turn.
        schedule: The pipeline's, by name or as an object; None is 1F1B if the mesh has stages.
        remat: Which activations a layer keeps for its backward: a policy of `layer.REMAT`.
        keep_weights: Whether weights stay gathered to the end of the step. Else they are freed after each use and
            gathered again. Neither this nor `remat` changes a bit of the gradients.
        ignore_index: The target of tokens that do not count.
        label_smoothing: As in `ends.Terms`.
        z_loss: As in `ends.Terms`.
        context: The form of attention over C.
        zero: The stage of ZeRO, given to `specs` and `grad_specs`.
        reduce: When gradients are reduced over X: `once`, as whole sums over microbatches, or after `each` microbatch.
            With `each` a rank holds only its shards of the sums, and sends gradients once for each microbatch.
        sums: The dtype in which gradients are added up over microbatches and ranks, and returned; None is the params'.
        scale: The factor by which cotangents are multiplied, and gradients divided at the end: for float16, a power
            of two.
        precision: The recipe of `scaling.scaled.RECIPES` by which the layers' products are scaled, or "".
        mean: Whether the loss is divided by the sum of the weights. Else it is sum(w ce), and w may have either sign.
        loads: Whether the gradients of biases that choose experts are the tokens of the batch that chose each expert,
            for `models.moe.update_bias`. Else they are zeros.
        lora: The adapters in params["lora"]; only they have gradients, {"lora": ...}.
        limits: The thresholds at which the step's code changes; None is `LIMITS`.
    """

    microbatches: int = 1
    schedule: "Schedule | str | None" = None
    remat: str = "none"
    keep_weights: bool = False
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    context: str = "zigzag"
    zero: int = 3
    reduce: str = "once"
    sums: "torch.dtype | None" = None
    scale: float = 1.0
    lora: "Lora | None" = None
    loads: bool = False
    mean: bool = True
    precision: str = ""
    limits: "Limits | None" = None


class LeafLines(NamedTuple):
    """The lines of one leaf, each "" if there is nothing to do.

    Attributes:
        gather: The line of its weight from the stored to the used type.
        scatter: The line that begins to reduce its gradient to the stored type.
        total: The line that ends it.
        dim: The dim that X alone splits, or -1.
    """

    gather: str
    scatter: str
    total: str
    dim: int


class TrainStep(NamedTuple):
    """A training step resolved for one mesh.

    Attributes:
        options: The options of the step.
        limits: The thresholds at which its code changes.
        config: The model.
        mesh: The mesh; axes that it lacks drop out of lines.
        inside: The mesh that a layer sees, without the stages.
        backward: Whether gradients are wanted; otherwise nothing is saved for backward.
        stored: The stored types of the params, a tree like them.
        reduced: The types of the returned gradients.
        lines: The lines of each leaf, by name for the ends, in their order for a stack of layers.
        schedule: The pipeline's, None without stages.
        vocab_stages: {table of the vocabulary: the index along Z of the only stage that uses it}; {} if tied, or
            without stages.
        terms: The parts of a token's loss.
        dtype: The dtype of the params.
        sums: The dtype in which gradients are added up.
        dropped_names: The names of saved values that `remat` does not keep.
        reduce_each: Whether gradients are reduced after each of several microbatches, not once.
        group: The ranks that have to agree on the call; None if nothing is compared.
        call: The text that they have to agree on.
    """

    options: StepOptions
    limits: Limits
    config: Config
    mesh: Any
    inside: Any
    backward: bool
    stored: dict
    reduced: dict
    lines: dict[str, Any]
    schedule: Schedule | None
    vocab_stages: dict[str, int]
    terms: Terms
    dtype: torch.dtype
    sums: torch.dtype
    dropped_names: frozenset[str]
    reduce_each: bool
    group: Group | None
    call: str

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim of the stored params."""
        sizes = types.padded_sizes(self.config, self.mesh)
        sizes |= {"L": len(types.slots_of(self.config, self.mesh, self.options.schedule))}
        return sizes | ({"r": self.options.lora.rank} if self.options.lora else {})

    def grad_shapes(self, stack: str) -> list[tuple[int, ...]]:
        """Return the local shapes of the reduced gradients of a stack's leaves."""
        return [parse(text).local_shape(self.sizes, self.mesh) for text in tree.leaves(self.reduced[stack])]


def resolve(options: StepOptions, config: Config, params: dict, batch: Sequence, mesh, seeded: bool, backward: bool):
    """Return the TrainStep of these options on a mesh.

    Raises:
        ShardingError: or ValueError, where options do not fit the model, the mesh or the batch's shapes.
    """
    (tokens, targets, weights, segments), compiling = batch, torch.compiler.is_compiling()
    stored = types.specs(config, mesh, zero=options.zero, schedule=options.schedule, lora=options.lora)
    reduced = stored if options.lora else types.grad_specs(config, mesh, zero=options.zero)
    check_batch(tokens, targets, options, config, mesh)
    positive(scale=options.scale)
    sums = options.sums
    if sums is not None and not (isinstance(sums, torch.dtype) and sums.is_floating_point):
        raise ValueError(f"sums = {sums!r}: gradients are added up in floats\n  fix: give torch.float32, or None")
    not_negative(label_smoothing=options.label_smoothing, z_loss=options.z_loss)
    if options.label_smoothing > 1:
        raise ValueError(f"label_smoothing = {options.label_smoothing!r}: is a share\n  fix: give a number from 0 to 1")
    if backward and config.embed_dropout:
        what = f"{config.name}: training does not drop elements of embeddings, embed_dropout={config.embed_dropout}"
        raise ValueError(f"{what}\n  fix: train config.with_(embed_dropout=0.0), or set it to 0.0 in config.json")
    if backward and config.attention_dropout:
        fix = "train config.with_(attention_dropout=0.0), or set it to 0.0 in config.json"
        what = (
            f"{config.name}: training does not drop weights of attention, attention_dropout={config.attention_dropout}"
        )
        raise ValueError(f"{what}\n  fix: {fix}")
    if backward and config.dropout and (not seeded or compiling):
        fix = "give seed=, another in each step" if not seeded else "run it without torch.compile"
        raise ValueError(f"{config.name}: dropout={config.dropout} draws random masks\n  fix: {fix}")
    if options.precision:
        check_precision(options, config, mesh)
        check_blocks(options, config, stored, mesh, tokens.shape, backward)
    schedule = None
    if "Z" in mesh.sizes and backward:
        schedule = types.schedule_of(options.schedule, mesh, options.microbatches)
    elif "Z" in mesh.sizes:
        schedule = types.storing_schedule(options.schedule, mesh)
    group, call = None, ""
    if mesh.checked and mesh.size() > 1 and not compiling:
        name = getattr(options.schedule, "name", options.schedule)
        said = {"config": config} | vars(options) | {"schedule": name, "seeded": seeded, "tokens": tokens}
        said |= {"weights": weights, "segments": segments, "params": params}
        group, call = mesh.group([*mesh.sizes]), spoken("loss_and_grads" if backward else "loss", said)
    terms = Terms(config.V, options.label_smoothing, options.z_loss, config.logit_cap)
    dtype: Any = getattr(params.get("embed"), "dtype", None) if isinstance(params, dict) else None
    counted_in: Any = sums or dtype
    if backward and options.loads and counted_in is not None and counted_in.itemsize < 4:
        rule = f"tokens are counted among the gradients, and {counted_in} rounds large counts"
        raise ValueError(f"{config.name}: loads=True\n  rule: {rule}\n  fix: give sums=torch.float32")
    reduce_each = options.reduce == "each" and options.microbatches > 1
    vocab_stages = {}
    if schedule is not None and not config.tied and mesh.sizes["Z"] > 1:
        vocab_stages = {"embed": schedule.placement[0], "unembed": schedule.placement[-1]}
    lines = lines_of_params(stored, reduced, mesh, vocab_stages)
    return TrainStep(
        options, options.limits or LIMITS, config, mesh, mesh.without("Z"), backward, stored, reduced, lines, schedule,
        vocab_stages, terms, dtype, sums or dtype, dropped(options.remat), reduce_each, group, call,
    )  # fmt: skip


def check_precision(options: StepOptions, config: Config, mesh) -> None:
    """Raise a ValueError if an option or the mesh rules out products that are scaled by the recipe."""
    one_of("precision", options.precision, RECIPES)
    K, one = config.K, "leave one out"
    reasons = [
        (options.lora, "adapters", "the sum W + s A B would be quantized, which rounds small changes of A B away", one),
        (options.keep_weights, "keep_weights", "a weight that is kept needs the forms of both passes", one),
        (K % mesh.sizes.get("Y", 1), f"K = {K} heads of keys", "heads that are replicated over Y are not quantized",
         f"give Y a size that divides {K}, or leave precision out"),
    ]  # fmt: skip
    for wrong, name, rule, fix in reasons:
        if wrong:
            what = f"{config.name}: precision={options.precision!r} on {mesh}, with {name}"
            raise ValueError(f"{what}\n  rule: {rule}\n  fix: {fix}")


def check_blocks(
    options: StepOptions, config: Config, stored: dict, mesh, tokens: Sequence[int], backward: bool
) -> None:
    """Raise a ShardingError if the mesh cuts a block of values that share a scale, in a matrix or among tokens.

    `stored` has the params' types, and `tokens` is the shape of a rank's tokens [B_PXE, T_C].
    """
    sizes, inputs_of = types.padded_sizes(config, mesh), matrices_of(config)
    for stack in (name for name in STACKS if name in inputs_of):
        for text, dims in zip(tree.leaves(stored[stack]), tree.leaves(inputs_of[stack]), strict=True):
            W = parse(text)
            if dims and W.name not in UNSCALED:
                held = replace(W, dims=W.dims[1:])  # of one layer
                check_matrix(options.precision, held, dims.split(" -> ")[0], sizes, mesh)
    if backward and (name := RECIPES[options.precision].gradients):
        (B, T), C, Y = tokens, mesh.sizes.get("C", 1), mesh.sizes.get("Y", 1)
        rows = {"T": T} if C > 1 else {"B T": B // options.microbatches * T}
        if C > 1 and options.context == "zigzag":  # a rank has two parts of a row, which are not adjacent
            rows["T/2"] = T // 2
        if Y > 1 and config.latent and config.latent.q_rank:  # the rows of W_DQ's product are split over Y
            rows["T_Y"] = T // Y
        for dims, size in rows.items():
            check_block("x[B_PXE, T_C, D] -> x[B_PXE, T_C, D] {Q_B,T}", dims, size, format_of(name))


def lines_of_params(stored: dict, reduced: dict, mesh, vocab_stages: Collection[str] = ()) -> dict[str, Any]:
    """Return the lines of each leaf: by name for the ends, a list for each stack of layers.

    A table that one stage alone uses, a key of `vocab_stages`, is gathered and reduced over X on that stage, where it
    has the type `type_on_stage`.
    """
    ends = [name for name in stored if name not in STACKS]
    both = [stored[name] for name in ends], [reduced[name] for name in ends]
    lines: dict[str, Any] = dict(zip(ends, lines_of(*both, mesh, TOKENS_AND_STAGES), strict=True))
    for name in vocab_stages:
        (lines[name],) = lines_of([type_on_stage(stored[name])], [type_on_stage(reduced[name])], mesh, TOKENS)
    for name in ("dense", "linear", "layers"):
        if name in stored:  # the first stage alone runs the dense layers
            both = tree.leaves(types_of_stack(stored, name)), tree.leaves(types_of_stack(reduced, name))
            lines[name] = lines_of(*both, mesh, TOKENS_AND_STAGES if name == "dense" else TOKENS, stack=True)
    return lines


def type_on_stage(stored: str) -> str:
    """Drop Z from the stored type of a vocabulary table: its type at the stage that uses it, still sharded over X."""
    return without(stored, ("Z",))


def types_of_stack(types: dict, stack: str) -> dict:
    """Return the types of a stack's leaves, including its adapters' if it has any."""
    return types[stack] | ({"lora": types["lora"][stack]} if "lora" in types else {})


def lines_of(
    stored: Sequence[str], reduced: Sequence[str], mesh, axes: tuple[str, ...], stack: bool = False
) -> list[LeafLines]:
    """Return the lines of leaves with params of the `stored` types and gradients of the `reduced` types.

    Gradients are unreduced over the `axes` that do not split them. For a `stack` over L all lines except `total` are
    lines of one layer.
    """
    each = zip(stored, reduced, strict=True)
    return [LeafLines(*mesh.constant(_lines_of_leaf, *types, axes, stack)) for types in each]


def _lines_of_leaf(mesh, stored: str, reduced: str, axes: tuple, stack: bool) -> tuple[str, str, str, int]:
    """Return the fields of a leaf's LeafLines as a plain tuple, which a compiler can keep."""
    before, after = present(stored, mesh), present(reduced, mesh)
    used = parse(without(str(before), ("X", "Z")))
    over = [axis for axis in axes if mesh.sizes.get(axis, 1) > 1 and axis not in used.axes]
    partial = used.with_unreduced(over)
    scattered = after.with_unreduced([axis for axis in over if axis not in after.axes])
    total = f"{scattered} -> {after}" if scattered.unreduced else ""
    if stack:
        before, after, used, partial, scattered = (
            Spec(t.name, t.dims[1:], t.unreduced) for t in (before, after, used, partial, scattered)
        )
    gather = "" if before.same_sharding(used) else f"{before} -> {used}"
    scatter = "" if partial.same_sharding(scattered) else f"{partial} -> {scattered}"
    dims = [i for i, (_, axes) in enumerate(after.dims) if axes == ("X",)]
    return gather, scatter, total, dims[0] if dims else -1


def check_batch(tokens: Tensor, targets: Tensor, options: StepOptions, config: Config, mesh) -> None:
    """Raise ValueError or ShardingError for a batch that does not fit the model or the mesh, whatever its values."""
    context, microbatches = options.context, options.microbatches
    one_of("remat", options.remat, tuple(REMAT))
    one_of("context", context, FORMS)
    one_of("reduce", options.reduce, REDUCES)
    whole(microbatches=microbatches)
    if options.reduce == "each" and not options.zero:
        raise ValueError(
            'reduce="each" with zero=0\n  rule: without ZeRO every rank holds whole gradients, so reducing them after '
            'each microbatch saves nothing\n  fix: choose zero=1, 2 or 3, or reduce="once"'
        )
    if config.moe and config.capacity is not None and context == "zigzag" and mesh.sizes.get("C", 1) > 1:
        raise ValueError(
            f"{config.name}: experts with a capacity keep the first tokens of the batch, but zig-zag reorders them\n"
            '  fix: choose context="ring", or capacity=None'
        )
    if config.linear and mesh.sizes.get("C", 1) > 1:
        if context == "zigzag":
            raise ValueError(
                f"{config.name}: linear layers hand their state on along C, but zig-zag reorders the tokens\n"
                '  fix: choose context="ring"'
            )
        if tokens.shape[1] < config.linear.width - 1:
            raise ShardingError(
                f"{config.name}: {tokens.shape[1]} tokens of each sequence on a rank\n  rule: a convolution over "
                f"{config.linear.width} tokens reaches into no rank but the one before\n  fix: use fewer ranks along C"
            )
    check_ids("tokens", tokens)
    check_ids("targets", targets, tokens.shape)
    if len(tokens) % microbatches:
        raise ValueError(
            f"{len(tokens)} rows on each rank do not make {microbatches} microbatches of one size\n"
            f"  fix: give a number of rows that {microbatches} divides"
        )
    if tokens.shape[1] % mesh.sizes.get("Y", 1):
        raise ShardingError(
            f"x[B, T_CY, D]: {tokens.shape[1]} tokens of each sequence on a rank do not divide over Y="
            f"{mesh.sizes['Y']}\n  fix: make T a multiple of |C| |Y|"
        )
    if torch.compiler.is_compiling() and (config.moe or mesh.sizes.get("Z", 1) > 1):
        why = "experts get as many rows as choose them" if config.moe else "stages wait for each other's messages"
        raise ValueError(
            f"{config.name}: {why}, which a compiled graph cannot express\n  fix: run it without torch.compile"
        )


def check_fit(step: TrainStep, params: dict, batch: Sequence) -> None:
    """Raise a ShardingError or ValueError unless params, weights and segments fit the model and the batch."""
    mesh, schedule, (_, targets, weights, segments) = step.mesh, step.options.schedule, batch
    if not torch.compiler.is_compiling():
        fix = "transformer.shard(params, config, mesh, ...), with the same zero and schedule"
        tree.check(params, step.stored, step.sizes, mesh, step.dtype, fix=fix)
        tree.check_floats(params)
    if weights is not None:
        check_weights(weights, targets)
    if segments is not None:
        check_segments(segments, targets)
    if schedule is not None and "Z" not in mesh.sizes:
        what = f"schedule={schedule!r:.60} on {mesh}, which has no stages"
        raise ShardingError(f"{what}\n  fix: give the mesh an axis Z")
