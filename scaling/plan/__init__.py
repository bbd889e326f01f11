"""The planner: a model, chips and a batch in, the layout to train on out, with the reason (Parts 5, 6 and 12).

    python -m scaling.plan --model llama3-70b --chip v5p --chips 8960 --batch 4M

    from scaling.plan import Job, plans
    best = plans(Job(get("llama3-70b"), batch=4 * 2**20), chip("v5p"), chips=8960)[0]

job: what is to be trained, and a layout, sizes of the mesh axes and the recipe; work: what a model asks of its chips;
network: where the axes lie, and what runs over them; ledger: what a chip computes and moves; holds: its
memory; evaluate: bound and forecast; candidates: every layout, the best first; report: what is printed. No torch.
"""

from scaling.plan.candidates import plans, search
from scaling.plan.evaluate import Estimate, evaluate
from scaling.plan.job import Fixed, Job, Layout
from scaling.plan.network import tree
from scaling.plan.work import Stack

__all__ = ["Estimate", "Fixed", "Job", "Layout", "Stack", "evaluate", "plans", "search", "tree"]
