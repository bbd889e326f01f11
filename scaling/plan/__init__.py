"""The planner: a model, chips and a batch in, the mesh to train on out, with the reason (Parts 5 and 6).

    python -m scaling.plan --model llama3-70b --chip v5p --chips 8960 --batch 4M

    from scaling.plan import Job, plans
    best = plans(Job(get("llama3-70b"), batch=4 * 2**20), chip("v5p"), chips=8960)[0]

layer: one layer of a strategy's code on an abstract mesh; network: seconds of its collectives; evaluate: one mesh;
search: all meshes; report: what is printed. Assumptions are the book's: full overlap (`Plan.worst` is without), peak
FLOPs/s and bandwidths, torus axes shared out among mesh axes, shards cut flat where sizes do not divide.
"""

from scaling.plan.evaluate import Job, Plan, evaluate
from scaling.plan.search import fits, networks, plans

__all__ = ["Job", "Plan", "evaluate", "fits", "networks", "plans"]
