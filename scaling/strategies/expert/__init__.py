"""Expert parallelism (Part 4, "Sparsity and Mixture-of-Experts"; Part 12, "Expert Parallelism").

    x[B_X, T, D], router[D, E], W_in[E_X, D, F], W_out[E_X, F, D] -> y[B_X, T, D]

Experts are split over an axis, the data's or another, and do not move. Tokens are sent to them and back by two ragged
AllToAlls, which the backward pass reverses. `layer` has the lines. `routing` reads the axes and decides where each
token goes. It is separate, so that a layer that is recomputed never decides again.
"""

from scaling.strategies.expert.layer import backward, forward, moe
from scaling.strategies.expert.routing import Routing, expert_layout, experts_of, route_tokens, specs

__all__ = ["Routing", "backward", "expert_layout", "experts_of", "forward", "moe", "route_tokens", "specs"]
