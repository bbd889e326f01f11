"""The planner: from a model, chips and a batch to the layout to train on, with the reason (Parts 5, 6 and 12).

    python -m scaling.plan --model llama3-70b --chip v5p --chips 8960 --batch 4M

    from scaling.plan import Job, plans
    best = plans(Job(get("llama3-70b"), batch=4 * 2**20), chip("v5p"), chips=8960)[0]

None of these files needs torch:

- job: the training task, and a layout, which is the sizes of the mesh axes and the recipe
- work: the FLOPs and bytes that a model asks of its chips
- network: where the axes lie, and which collectives run over them
- ledger: a chip's computation and its messages; holds: its memory
- evaluate: bound and forecast
- candidates: every layout, the best first; report: the printed text
"""

from scaling.plan.candidates import plans, search
from scaling.plan.evaluate import Estimate, evaluate
from scaling.plan.job import Fixed, Job, Layout
from scaling.plan.network import tree

__all__ = ["Estimate", "Fixed", "Job", "Layout", "evaluate", "plans", "search", "tree"]
