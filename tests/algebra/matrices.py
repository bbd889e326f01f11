"""Types of two matrices, their dense product, and the check of a plan by it."""

import simulated
import torch

SIZES = {"I": 4, "J": 8, "K": 12}


def dense(a, b, out, sizes):
    letters = {dim: chr(97 + i) for i, dim in enumerate(dict.fromkeys(a.dim_names + b.dim_names))}
    sides = ["".join(letters[dim] for dim in spec.dim_names) for spec in (a, b, out)]
    arrays = [torch.randn([sizes[d] for d in s.dim_names], dtype=torch.float64) for s in (a, b)]
    return arrays, torch.einsum(f"{sides[0]},{sides[1]}->{sides[2]}", *arrays)


def check(plan, a, b, out, sizes, mesh):
    arrays, expected = dense(a, b, out, sizes)
    held = {spec: simulated.scatter(spec, array, mesh) for spec, array in zip((a, b), arrays, strict=True)}
    held = simulated.execute(plan.steps, held, mesh)
    got = simulated.gather(out, held[out], [sizes[d] for d in out.dim_names], mesh)
    assert (got - expected).abs().max() < 1e-11, f"{a} * {b} -> {out}\n{plan}"
