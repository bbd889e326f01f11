"""Post-training: rollouts on a serving mesh, rewards, and a policy gradient on a training mesh (GRPO).

The command is the way in. A program calls `loop.run` on every rank, and `losses.loss` alone needs no mesh.

losses   advantages and the loss, functions of log-probabilities     rewards   prompts, and the file that scores
loop     rollouts, exchange, update, push: the whole loop            command   python -m scaling.posttrain
"""

from typing import TYPE_CHECKING

from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling.posttrain.losses import advantages, loss

__all__ = ["advantages", "loss"]

__getattr__, __dir__ = lazy("scaling.posttrain", {"scaling.posttrain.losses": ("advantages", "loss")})
