"""Expert parallelism (Part 4, "Sparsity and Mixture-of-Experts"; Part 12, "Expert Parallelism"):

    x[B_X, T, D], router[D, E], W_in[E_X, D, F], W_out[E_X, F, D] -> y[B_X, T, D]

Experts are split over an axis, the data's or one of their own, and stay where they are; tokens go to them and come
back, by two ragged AllToAlls, which the backward pass turns round. `layer` has the lines; `routing` reads the axes, and
decides where each token goes, which is separate, so that a layer that is computed again never decides again.
"""

from scaling.strategies.expert.layer import moe
from scaling.strategies.expert.routing import Routing, experts_of, route_tokens, specs

__all__ = ["Routing", "experts_of", "moe", "route_tokens", "specs"]
