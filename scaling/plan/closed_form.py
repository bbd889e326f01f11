"""The closed forms of Parts 5 and 12 for a plan: thresholds in tokens a chip, X_opt, the longest tensor axis."""

from scaling import cost
from scaling.cost import gpu
from scaling.hardware import Chip
from scaling.plan.job import Job, Question


def closed_form(asked: Question, pods: int) -> dict:
    """Return the results of the book's formulas for two matrices a layer; {} for a chip whose network is not known."""
    job, chip, chips = asked.job, asked.chip, asked.chips
    config = job.config
    if chip.kind == "cpu":
        return {}
    found = {"tokens_per_chip": job.batch / chips}
    sparse = cost.expert_inflation(config.E, config.k) if config.moe else 1
    if chip.kind == "gpu":
        return found | _gpu(job, chip, chips, sparse)
    C, axes, F, n = chip.flops(job.wide), chip.axes, config.F, chips // pods
    across = [chip.bandwidth("ici", axes=m) for m in (axes, max(1, axes - 1), 1)]
    found["fsdp_threshold"] = sparse * cost.data_threshold(C, across[0])
    if not config.moe:
        mixed = cost.mixed_threshold(F, C, across[1], across[2], "max" if job.overlap == "max" else "sum")
        best = cost.mixed_optimum(job.batch / pods, F, n, max(1, axes - 1), 1)
        per_chip = found["tokens_per_chip"]
        regime = "FSDP" if per_chip > found["fsdp_threshold"] else "FSDP+TP" if per_chip > mixed else "none"
        found |= {"mixed_threshold": mixed, "compute_bound": regime, "X_opt": best, "Y_opt": n / best}
        found["tensor_limit"] = cost.tensor_limit(F, C, across[2])
    if pods > 1:
        found |= {"tokens_per_pod": job.batch / pods, "pod_threshold": cost.pod_threshold(C, chip.need("dcn_bw"))}
    return found


def _gpu(job: Job, chip: Chip, chips: int, sparse: float) -> dict:
    """Return Part 12's forms: data parallelism in a node or across nodes, tensor parallelism in one, experts across."""
    config, C = job.config, chip.flops(job.wide)
    inside = cost.data_threshold(C, chip.bandwidth("node"))
    found: dict = {
        "data_threshold_in_node": sparse * inside,
        "tensor_limit": cost.tensor_limit(config.F, C, chip.bandwidth("node")),
    }
    if chips > chip.node_gpus:
        found["data_threshold"] = sparse * gpu.data_threshold(chip, dtype=job.wide)
    needed = found.get("data_threshold", found["data_threshold_in_node"])
    found["compute_bound"] = "data" if job.batch / chips > needed else "none"
    found["model_nodes_needed"] = max(1.0, needed / (job.batch / chips))
    return found


def form_lines(form: dict, config) -> list[str]:
    """Return the closed forms as lines of text."""
    if not form:
        return []
    tokens, found = f"{form['tokens_per_chip']:,.0f} tokens a chip", ["Closed form (two matrices a layer):"]
    if "data_threshold_in_node" in form:
        needs = form.get("data_threshold", form["data_threshold_in_node"])
        where = "across nodes" if "data_threshold" in form else "in the node"
        found.append(f"  {tokens}; data parallelism {where} needs {needs:,.0f} (Part 12): " + (
            "it is compute-bound" if form["compute_bound"] == "data" else
            f"each replica should span {form['model_nodes_needed']:.1f} times as many nodes (PP, EP), or the batch grow"
        ))  # fmt: skip
        ways = form["tensor_limit"]
        limit = (
            f"stays compute-bound up to {ways:.1f} ways" if ways >= 2 else "is bound by communication from 2 ways on"
        )
        found.append(f"  TP in a node {limit}")
    elif "X_opt" in form:
        verdict = {"FSDP": "FSDP alone is compute-bound", "FSDP+TP": "FSDP+TP is compute-bound, FSDP alone is not"}
        found.append(
            f"  {tokens}; FSDP needs {form['fsdp_threshold']:,.0f}, FSDP+TP {form['mixed_threshold']:,.0f}: "
            + verdict.get(form["compute_bound"], "neither is compute-bound")
        )
        found.append(
            f"  X_opt = {form['X_opt']:,.0f} (FSDP), {form['Y_opt']:.1f} (TP); TP on one ring of the torus up to "
            f"{form['tensor_limit']:.1f}"
        )
    else:
        found.append(
            f"  {tokens}; FSDP needs {form['fsdp_threshold']:,.0f}, E/k = {config.E / config.k:g} times a dense model's"
        )
    if "tokens_per_pod" in form:
        found.append(
            f"  {form['tokens_per_pod']:,.0f} tokens a pod; the datacenter's network needs {form['pod_threshold']:,.0f}"
        )
    return found
