"""The memory that training frameworks hold beyond the plan's: whole logits, and blocks that the allocator keeps.

The plan's own step computes the loss in chunks and reserves no memory beyond its use. `logits` and `sequence` are from
the frameworks' code: torchtitan's loss (components/loss.py) is cross entropy of `pred.float()`, so bf16 logits, their
copy in fp32, its log-softmax and its gradient are whole; Megatron-LM's (core/tensor_parallel/cross_entropy.py) works in
place on one copy in fp32. Megatron's sequence parallelism keeps norms' outputs split over tensor and gathers them again
in the backward pass (arXiv:2205.05198; its training/theoretical_memory_usage.py). `reserved` is fitted to torchtitan's
13 published peaks (benchmarks/llama3_h100_202412_torchtitan.md), which are of reserved memory.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """The memory that a framework holds beyond the plan.

    `logits`: bytes of each logit, 0 for a loss in chunks; `sequence`: whether norms' outputs are split over tensor;
    `reserved`: the share by which activations and buffers are above their actual use.
    """

    logits: float = 0.0
    sequence: bool = False
    reserved: float = 0.0


FRAMEWORKS = {
    "this": Framework(),
    "torchtitan": Framework(logits=14, reserved=0.15),
    "megatron": Framework(logits=6, sequence=True, reserved=0.15),
}
