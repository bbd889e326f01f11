"""Scale the loss dynamically for gradients that pass through float16 (Micikevicius et al. 2018, arXiv:1710.03740, 3.2).

The loss is multiplied by a scale, so that small gradients stay in float16's range, and the gradients are divided by the
scale before they are used. The scale adapts as in torch.amp.GradScaler. If a gradient is not finite, the step is
skipped and the scale is multiplied by `backoff`, one half; after `interval` good steps it is multiplied by `growth`, 2.
"""

import torch

from scaling import tree
from scaling.common.arguments import flag, positive, whole
from scaling.optim.rules import Optimizer


def loss_scaled(
    rule: Optimizer, first: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
) -> Optimizer:
    """Add a loss scale to the state of `rule`: "scale", in float32, and "good", the number of good steps with it.

    The new `update` takes gradients that are already divided by the scale, and `finite`: whether the gradients of all
    ranks are finite, which must be equal on every rank. If they are not, params and the rule's state do not change.
    """
    positive(first=first, growth=growth, backoff=backoff)
    whole(interval=interval)
    if not (growth > 1 and backoff < 1):
        raise ValueError(
            f"growth={growth}, backoff={backoff}: a scale grows and backs off\n  fix: growth > 1 > backoff"
        )
    if not isinstance(rule, Optimizer):
        raise ValueError(f"loss_scaled({type(rule).__name__})\n  fix: give an optimizer, such as adamw(1e-3)")

    def init(params):
        device = next(iter(tree.leaves(params)), torch.empty(0)).device
        scale = torch.tensor(first, dtype=torch.float32, device=device)
        return rule.init(params) | {"scale": scale, "good": torch.zeros((), dtype=torch.int64, device=device)}

    def update(grads, state, params, *, finite: bool, **options):
        flag(finite=finite)
        if not {"scale", "good"} <= set(state):
            raise ValueError(f"the state holds {list(state)}, and no scale\n  fix: make it by this optimizer's init")
        scale, good = state["scale"], state["good"] + 1
        if not finite:
            return params, state | {"scale": scale * backoff, "good": torch.zeros_like(good)}
        if int(good) == interval:
            scale, good = scale * growth, torch.zeros_like(good)
        inner = {name: part for name, part in state.items() if name not in ("scale", "good")}
        params, inner = rule.update(grads, inner, params, **options)
        return params, inner | {"scale": scale, "good": good}

    def state_specs(specs):
        return rule.state_specs(specs) | {"scale": "scale[]", "good": "good[]"}

    return Optimizer(init, update, state_specs)
