"""Collectives of GPUs, in a node and over a tree of switches (Part 12): seconds from bytes.

`nbytes` is V as for a torus: the whole array of one group. Inside the axis of `gpus` GPUs that a collective runs over,
another axis of `inner` GPUs may shard the array: then `nbytes` counts all groups, and each moves 1/inner of it.
At each level a unit's children run a ring over the links between them; levels overlap, and the slowest counts.
The exact time is V (D - 1) / (D W) with D children in the group; the book's approximation is V / W.
"""

from scaling.common.arguments import not_negative, whole
from scaling.cost.layers import Cost
from scaling.hardware import Chip


def spans(chip: Chip, gpus: int, inner: int = 1) -> list[tuple[int, int, float, float]]:
    """Return, for each level that a group of `gpus` spans, `inner` GPUs apart, its children and their links.

    Children are filled in turn: 12 GPUs are a node and half of another, with half of its links.

    Returns:
        (GPUs below a child, children, the last child's share of a whole one, bytes/s of a whole child for this group)
        for each level.

    Raises:
        ValueError: Only some neighbours in a group would lie across nodes: 8 GPUs, every third, in nodes of 8.
    """
    whole(gpus=gpus, inner=inner)
    below, found = 1, []
    for level in chip.levels_for(gpus * inner):
        if inner % below and below % inner:
            raise ValueError(
                f"{gpus} x {inner} GPUs of {chip.name} do not fill whole units ({level.name}: children of {below} GPUs)"
                "\n  fix: choose numbers of GPUs that fill nodes"
            )
        own, unit = max(1, below // inner), below * level.degree
        ranks = min(gpus, max(1, unit // inner))  # of the group, in one unit; `own` of them in one child
        if ranks > own:
            children = -(-ranks // own)
            last = (ranks - (children - 1) * own) / own
            found.append((below, children, last, level.group_bw(children) / min(inner, below)))
        below = unit
        if gpus * inner <= below:
            break
    return found


def all_gather(nbytes: float, chip: Chip, gpus: int, inner: int = 1, exact: bool = True) -> float:
    """Return an AllGather's seconds: V (N - 1) / (N W) in a node; over nodes, the slowest level's V (D - 1) / (D W).

    At each level a child receives over its links the part of V that it lacks, or all of V if not `exact`. The last
    child may be partial, and then has fewer links.
    """
    not_negative(nbytes=nbytes)
    times = [0.0]
    for _, children, last, bandwidth in spans(chip, gpus, inner):
        for share in {1.0, last}:
            missing = 1 - share / (children - 1 + last) if exact else 1.0
            times.append(nbytes / inner * missing / (bandwidth * share))
    return max(times)


def reduce_scatter(nbytes: float, chip: Chip, gpus: int, inner: int = 1, exact: bool = True) -> float:
    """Return the seconds of a ReduceScatter, which equal an AllGather's."""
    return all_gather(nbytes, chip, gpus, inner, exact)


def all_reduce(nbytes: float, chip: Chip, gpus: int, inner: int = 1, exact: bool = True, sharp: bool = False) -> float:
    """Return the seconds of an AllReduce: two AllGathers, or V / W with SHARP, where the switches add.

    In practice SHARP gains about 30%, not the 75% of 8 GPUs in theory (Part 12, "Intra-node collectives").
    """
    if sharp:
        return all_gather(nbytes, chip, gpus, inner, exact=False)
    return 2 * all_gather(nbytes, chip, gpus, inner, exact)


def nonzero_share(units: int, k: int | None = None, random: bool = False) -> float:
    """Return the share of `units` destinations that a ragged AllToAll sends to: min(k / units, 1).

    With `random`, k independent draws may coincide: 1 - ((n - 1)/n)^k (Part 12, Appendix B).
    """
    whole(units=units)
    if k is None:
        return 1.0
    whole(k=k)
    return 1 - (1 - 1 / units) ** k if random else min(k / units, 1.0)


def all_to_all(nbytes: float, chip: Chip, gpus: int, k: int | None = None, exact: bool = True) -> float:
    """Return the seconds of an AllToAll at the slowest level, where V (M - 1) / M^2 leaves a child of N/M GPUs.

    In a node M = N GPUs with W = 450e9 (H100); over M nodes W is the node's 400e9. If only `k` of the destinations
    (GPUs in a node, else nodes) are not empty (ragged), the time is multiplied by their `nonzero_share`.
    """
    not_negative(nbytes=nbytes)
    times = [0.0]
    for below, _, _, bandwidth in spans(chip, gpus):
        own = min(1.0, below / gpus)
        share = nonzero_share(-(-gpus // min(below, chip.node_gpus)), k) * ((1 - own) if exact else 1)
        times.append(nbytes * own * share / bandwidth)
    return max(times)


def hop_bandwidth(chip: Chip, inner: int) -> float:
    """Return the bytes/s to a GPU `inner` away: over its links in a node, over its share of the node's beyond."""
    return chip.bandwidth("scale-out") / chip.node_gpus if inner >= chip.node_gpus else chip.bandwidth("node")


def collective_bw(chip: Chip, gpus: int) -> float:
    """Return V over the seconds of an exact AllGather: 514e9 in an H100's node, 413e9 beyond."""
    return 1 / all_gather(1, chip, gpus)


def bisection_bw(chip: Chip, gpus: int) -> float:
    """Return the bytes/s across an even cut of `gpus` GPUs, both directions: 3.6e12 for an H100's node.

    A GPU's or node's share, bisection / units, is the collective bandwidth of the book's table.
    """
    _, children, _, bandwidth = spans(chip, gpus)[-1]
    return children * bandwidth


def levels_table(chip: Chip) -> list[dict]:
    """Return each level's GPUs and the bytes/s of a unit, a GPU and a node (Part 12, "Beyond the node level").

    `switch_bw` is the total over the ports of a unit's switches, if known.
    """
    rows, gpus = [], 1
    for level in chip.need("levels"):
        unit_bw, below = level.degree * level.child_bw, gpus
        gpus *= level.degree
        switch_bw = level.switches * level.ports * level.link_bw if level.switches and level.ports else None
        rows.append({
            "level": level.name, "gpus": gpus, "switches": level.switches, "unit_bw": unit_bw, "switch_bw": switch_bw,
            "gpu_bw": level.child_bw / below, "node_bw": level.child_bw / max(1, below // chip.node_gpus),
        })  # fmt: skip
    return rows


# Rooflines of the strategies


def data_threshold(chip: Chip, nodes: int | None = None, model_nodes: int = 1, dtype="bf16") -> float:
    """Return the tokens per GPU from which DP or ZeRO over whole nodes is compute-bound (Part 12, "Data Parallelism").

    Between nodes it is C/W_node, times (X - 1)/X for few `nodes`, and divided by `model_nodes`, the nodes that each
    replica spans (TP, PP, EP). Gradients move inside nodes and between them at once, and the slower counts: on two
    nodes of H100s that is 7/8 of C/W of the node, 1925, and not the network's 1237. With `model_nodes=1` a replica is
    one GPU.
    """
    whole(model_nodes=model_nodes, nodes=nodes or 1)
    alpha = chip.intensity("scale-out", dtype) / model_nodes
    across = alpha * (nodes - 1) / nodes if nodes else alpha
    inside = chip.intensity("node", dtype) * (1 - 1 / chip.node_gpus) if model_nodes == 1 else 0.0
    return max(across, inside)


def tensor_limit_across(F: float, chip: Chip) -> float:
    """Return the largest Y for which TP over several nodes is compute-bound: node + F / alpha.

    `node` is the GPUs of one node, and alpha is C over the bandwidth between nodes. Only the share (M - 1)/M of the
    activations leaves a node, if there are M.
    """
    return chip.node_gpus + F / chip.intensity("scale-out")


def expert_layer(B: float, D: float, F: float, Z: int, k: int, chip: Chip, dtype="bf16") -> Cost:
    """Return the forward Cost of experts over Z GPUs of whole nodes: 4BkDF/(ZC), 4BD(Z - 8)/(WZ) min(8k/Z, 1).

    Each of two AllToAlls sends a token at most once to each node (Part 12, "Expert Parallelism"), and within one node
    at most once to each GPU.
    """
    not_negative(B=B, D=D, F=F)
    whole(Z=Z, k=k)
    math_time = 4 * B * k * D * F / (Z * chip.flops(dtype))
    node = chip.node_gpus
    across = node < Z
    if across and Z % node:
        raise ValueError(
            f"Z = {Z}: experts over several nodes take whole ones, of {node} GPUs\n  fix: give Z a multiple of {node}"
        )
    units = Z // node if across else Z
    sent = 4 * B * D / units * (units - 1) * nonzero_share(units, k)
    return Cost(math_time, (("Z", sent / chip.bandwidth("scale-out" if across else "node")),))


def expert_min_width(Z: int, k: int, chip: Chip) -> float:
    """Return the least F for which experts over Z GPUs are compute-bound: alpha (Z - 8)/k min(8k/Z, 1) <= 8 alpha."""
    cost = expert_layer(1, 1, 1, Z, k, chip)
    return cost.comms / cost.math
