"""Calls on an AbstractMesh, where nothing is sent: `python tests/museum/calls.py NAME` prints what one is answered."""

import torch

from scaling.common.console import Parser
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies.transformer import api

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
CALLS = {
    "experts": (PLAIN.with_(E=4, k=2), {"X": 2, "E": 2}),
    "one_kv_head": (PLAIN.with_(K=1), {"Y": 2}),
    "two_way": (PLAIN, {"Y": 2}),
}


def answer(name: str) -> str:
    """The error that a call gets; "" if it gets none."""
    config, sizes = CALLS[name]
    mesh = AbstractMesh(sizes)
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    try:
        params = api.shard(model.init(config, 0, torch.float32, "meta"), config, mesh)
        api.loss_and_grads(params, tokens, tokens, config, mesh)
    except ValueError as error:
        return f"{type(error).__name__} {error}"
    return ""


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("name", choices=CALLS)
    print(answer(parser.parse_args().name), end="")
