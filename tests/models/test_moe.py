"""Routing to experts on one device: ties, weights, capacity, losses, gradients; and its sizes in Config."""

import pytest

from scaling.configs import Config

SIZES = {"L": 1, "D": 6, "F": 10, "N": 2, "K": 1, "H": 4, "V": 7}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"routing": "hash"}, "unknown routing 'hash': softmax or sigmoid"),
        ({"expert_groups": 3}, "expert_groups=3 must divide E=8"),
        ({"expert_groups": 4, "top_groups": 5}, "top_groups=5 lie in 1..4"),
        ({"expert_groups": 8, "top_groups": 1}, "k=2 experts cannot come from 1 groups"),
        ({"capacity": 0.0}, "capacity must be a factor above 0"),
        ({"aux_coef": -1.0}, "aux_coef must be at least 0"),
        ({"z_coef": float("nan")}, "z_coef must be at least 0"),
        ({"routed_scale": 0.0}, "routed_scale must be above 0"),
    ],
)
def test_config_refuses(wrong, says):
    with pytest.raises(ValueError, match=says):
        Config("m", **SIZES, E=8, k=2, **wrong)
