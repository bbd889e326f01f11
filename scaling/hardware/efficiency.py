"""The shares of its peaks that a chip reaches: data of forecasts, never of bounds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """The shares of its peaks that a chip reaches in a training step, used in forecasts and never in bounds."""

    matmul: tuple[tuple[str, float], ...] = (("bf16", 1.0),)  # (dtype, share of its peak); other dtypes have bf16's
    attention: float = 1.0  # share of the bf16 peak in an attention kernel
    memory: float = 1.0  # share of hbm_bw in operations other than matmuls
    links: float = 1.0  # share of the links' bytes/s
    # share of the collectives on the critical path (over tensor, context and expert axes) that matmuls hide
    hidden: float = 0.0
    cores: float = 0.0  # share of the chip's cores that a collective takes from the matmuls that hide it
    narrow: float = 0.0  # the width F of an expert at which its products reach half of what wide ones do
    routing: float = 0.0  # seconds that a layer of experts takes in a forward pass beside its bytes: sorting, launches
    launch: float = 0.0  # the least seconds that a collective takes

    def __post_init__(self):
        shares = {"attention": self.attention, "memory": self.memory, "links": self.links}
        shares |= {f"matmul.{dtype}": share for dtype, share in self.matmul}
        for name, share in shares.items():
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise ValueError(
                    f"efficiency.{name} is {share!r}\n  fix: give a share of the peak, above 0 and at most 1"
                )
        if not isinstance(self.narrow, (int, float)) or not 0 <= self.narrow < 1e6:
            raise ValueError(f"efficiency.narrow is {self.narrow!r}\n  fix: give a width of experts, below 1e6")
        for name in ("hidden", "cores"):
            if not isinstance(share := getattr(self, name), (int, float)) or not 0 <= share <= 1:
                raise ValueError(f"efficiency.{name} is {share!r}\n  fix: give a share, from 0 to 1")
        for name in ("launch", "routing"):
            if not isinstance(seconds := getattr(self, name), (int, float)) or not 0 <= seconds < 1:
                raise ValueError(f"efficiency.{name} is {seconds!r}\n  fix: give seconds, below 1")

    def of_matmul(self, dtype: str) -> float:
        """Return the share of the peak in `dtype` that matmuls reach."""
        shares = dict(self.matmul)
        return shares.get(dtype, shares.get("bf16", 1.0))
