"""Post-training: rollouts on a serving mesh, rewards, and a policy gradient on a training mesh (GRPO).

losses   advantages and the loss, functions of log-probabilities     rewards   prompts, and the file that scores
loop     rollouts, exchange, update, push: the whole loop            command   python -m scaling.posttrain
"""

from typing import TYPE_CHECKING

from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling.posttrain.losses import advantages, loss

__all__ = ["advantages", "loss"]

__getattr__, __dir__ = lazy("scaling.posttrain", {"scaling.posttrain.losses": ("advantages", "loss")})
