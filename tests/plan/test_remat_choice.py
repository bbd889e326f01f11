"""Each remat policy is the planner's where it is the best: all policies are tried, and what fits comes before speed."""

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Fixed, Job, plans
from scaling.plan.job import POLICIES

H100 = chip("h100")
BEST = {  # policy: (model, sizes, sequences, their tokens) for which it is the best
    "none": ("llama3-8b", (("tensor", 8),), 8, 8192),  # all is held
    "attention": ("llama3-8b", (("fsdp", 8),), 8, 10_752),  # "none" just does not fit
    "matmuls": ("llama3-70b", (("fsdp", 8), ("tensor", 8)), 128, 8192),
    "block": ("llama3-70b", (("fsdp", 8), ("tensor", 8)), 8, 32768),  # nothing else fits
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_best_remat_policy_is_chosen(policy):
    model, axes, sequences, seq = BEST[policy]
    job, chips = Job(get(model), sequences * seq, seq), 64 if len(axes) > 1 else 8
    fixed = {name: plans(job, H100, chips, Fixed(axes, remat=name))[0] for name in POLICIES}
    best = min(POLICIES, key=lambda name: (not fixed[name].fits, fixed[name].forecast))
    assert (best, fixed[best].fits) == (policy, True)
    assert fixed["none"].fits == (policy in ("none", "matmuls"))
    assert plans(job, H100, chips, Fixed(axes))[0].layout.remat == policy
