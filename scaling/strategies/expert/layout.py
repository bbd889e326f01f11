"""The axes of a layer of experts: types of its params, and what of them a mesh has."""

from collections.abc import Sequence
from dataclasses import dataclass

from scaling.configs import Config
from scaling.spec import ShardingError, format_axes, parse

ExpertAxes = str | Sequence[str] | None


def axes_of(axis: ExpertAxes) -> tuple[str, ...]:
    """("X",) of "X", ("X", "Y") of "XY" or ("X", "Y"), ("data",) of "data", () of None and of ()."""
    if not axis:
        return ()
    return parse(f"[I_{axis if isinstance(axis, str) else format_axes(axis)}]").axes


def _on(axes: tuple[str, ...]) -> str:
    """The axes as a subscript: "_XY", or "" if there are none."""
    return "_" + format_axes(axes) if axes else ""


def specs(config: Config, axis: ExpertAxes = "X", tensor: ExpertAxes = None) -> dict:
    """The types of a layer's params: experts over `axis`, F over `tensor` if one is given."""
    X, Y = _on(axes_of(axis)), _on(axes_of(tensor))
    types = {"router": "router[D, E]", "W_in": f"W_in[E{X}, D, F{Y}]", "W_out": f"W_out[E{X}, F{Y}, D]"}
    shared = {"W_in": f"W_in[D, F{Y}]", "W_out": f"W_out[F{Y}, D]"}
    if config.gated:
        types["W_gate"], shared["W_gate"] = f"W_gate[E{X}, D, F{Y}]", f"W_gate[D, F{Y}]"
    if config.routing == "sigmoid":
        types["bias"] = "bias[E]"
    return types | ({"shared": shared} if config.shared else {})


def experts_of(W: dict, config: Config) -> dict:
    """Of a Transformer layer's params those that its experts have, as `specs` names them."""
    return {name: W[name] for name in specs(config) if name in W}


@dataclass(frozen=True)
class ExpertLayout:
    """Which axes of the mesh split what, and how the types write it: the experts' X, F's Y, those of B and T.

    `sequence`: x comes and goes with T split over Y as well, `T_Y`. `ranks`: how many parts the tokens are split into.
    """

    experts: tuple[str, ...]
    tensor: tuple[str, ...]
    batch: tuple[str, ...]
    time: tuple[str, ...]
    sequence: bool
    ranks: int

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.batch + self.time

    @property
    def X(self) -> str:
        return _on(self.experts)

    @property
    def Y(self) -> str:
        return _on(self.tensor)

    @property
    def U(self) -> str:
        """What partial sums over F are typed with."""
        return f" {{U{self.Y}}}" if self.tensor else ""

    @property
    def BT(self) -> str:
        return f"B{_on(self.batch)}, T{_on(self.time)}"

    @property
    def BT_Y(self) -> str:
        return f"B{_on(self.batch)}, T{_on(self.time + self.tensor)}"


def expert_layout(config: Config, mesh, axis, tensor=None, spec: str | None = None) -> ExpertLayout:
    """What of these axes the mesh has. ShardingError if they do not go together, or E does not divide."""

    def there(axes) -> tuple[str, ...]:
        return tuple(a for a in axes if a in mesh.sizes)

    experts, Y = there(axes_of(axis)), there(axes_of(tensor))
    x = parse(spec or f"x[B{_on(axes_of(axis))}, T, D]")
    rule = f"{x}\n  rule: the tokens of a layer of experts are x[B_X, T, D], with D whole, T over the axes of F last"
    fix = "gather or reduce x to such a type"
    if len(x.dims) != 3 or x.unreduced or x.dims[2][1]:
        raise ShardingError(f"{rule}\n  fix: {fix}")
    batch, time = there(x.dims[0][1]), there(x.dims[1][1])
    sequence = bool(Y) and time[-len(Y) :] == Y
    time = time[: -len(Y)] if sequence else time
    if set(Y) & {*batch, *time, *experts}:
        raise ShardingError(f"{rule}\n  fix: split F over axes that split neither tokens nor experts, not {tensor}")
    if not set(experts) <= {*batch, *time}:
        raise ShardingError(f"{rule}\n  fix: split B over the experts' axes {format_axes(experts)}, too")
    if config.E % mesh.size(experts):
        raise ShardingError(
            f"W_in[E{_on(experts)}, D, F]: {config.E} experts do not divide over {mesh.size(experts)} ranks\n"
            f"  fix: give {format_axes(experts)} a size that divides E"
        )
    return ExpertLayout(experts, Y, batch, time, sequence, mesh.size(batch + time))
