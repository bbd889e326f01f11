"""One decoder-only transformer as data, in the book's letters (Part 4, "Transformer Accounting").

L layers, D d_model, F d_ff, N query heads, K KV heads, H head dim, V vocabulary, E experts with k active ones.
"""

from dataclasses import dataclass, field, replace

from scaling.common.arguments import check_fields, check_within
from scaling.configs.attention import Latent, Linear, RopeScaling
from scaling.spec import dtype_bytes

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu")
ABOVE = "(0, inf)"
WITHIN: dict[str, str | tuple] = {
    **dict.fromkeys("DFNKHVk", "[1, 1e9]"),
    **dict.fromkeys("LE", "[1, 1e5]"),  # layers and experts are listed
    **dict.fromkeys(("theta", "local_theta", "eps", "clamp", "routed_scale", "capacity", "head_clip"), ABOVE),
    **dict.fromkeys(("embed_scale", "residual_scale", "logit_scale", "score_scale", "score_cap", "logit_cap"), ABOVE),
    **dict.fromkeys(("aux_coef", "z_coef", "shared", "F_shared", "F_dense"), "[0, inf)"),
    **dict.fromkeys(("dropout", "attention_dropout", "embed_dropout"), "[0, 1)"),
    "learned_positions": "[0, 1e9]",
    "growth_every": "[1, 1e9]",
    "rotary_share": "(0, 1]",
    "routing": ("softmax", "sigmoid", "inputs"),
    "norms": ("before", "after", "both", "shared"),
    "balance_by": ("batch", "sequence"),
    "activation": (None, *ACTIVATIONS),
}


@dataclass(frozen=True)
class Config:
    """One decoder-only transformer. Defaults: dense (E = k = 1), gated MLP of 3 matrices, separate unembedding.

    Attributes:
        Model:
            name: Its name in tables and errors.
            L, D, F, N, K, H, V: Its sizes, in the book's letters. With experts F is the width of each routed one.
            tied: Whether the unembedding is the embedding's transpose.
            dtype: The dtype in which params are stored.
            source: The origin of the numbers.
            uncomputed: Features that no code here computes; a model with any is only counted.
            model_type: The class of the file that the model was read from, if its tensors differ from other classes'.
        MLP:
            gated: Whether it has a gate, and so three matrices.
            activation: silu, gelu, gelu_tanh, relu, relu2, its square, or xielu, which has two learned numbers in each
                layer (Apertus); None is silu with a gate and gelu without.
            mlp_bias: Whether its products have biases.
        Experts:
            E, k: The numbers of routed experts, and of those active per token.
            shared: The number of experts that are always active.
            F_shared: The width of the shared experts together; 0: each is as wide as a routed one.
            shared_gate: Whether the shared experts' output is multiplied by a sigmoid of the token (Qwen2-MoE).
            dense_layers, F_dense: The layers with a dense MLP instead, and the width of that MLP. A number means
                so many first layers, and a tuple holds the numbers of the layers (Llama 4 Maverick).
            routing: "softmax" (Mixtral), "sigmoid" (DeepSeek-V3), or "inputs", sigmoids that multiply an expert's input
                and not its output (Llama 4).
            norm_topk, routed_scale: A token's k weights are its scores times `routed_scale`, divided by their sum if
                `norm_topk`.
            expert_groups, top_groups: A token's experts come from the best `top_groups` of `expert_groups`.
            capacity: An expert takes at most capacity * tokens * k / E tokens, rounded up; None drops none.
            aux_coef, z_coef: The weights of the losses that balance the load and keep the logits small.
            balance_by: Even out the load over the whole "batch", or within each "sequence" (DeepSeek-V3).
            balance_first: Whether only the first of a token's k choices counts for the balance (Switch, GShard).
            expert_bias: Whether the router and the experts' products have biases (GPT-OSS).
            clamp: The bound within which the experts' products are kept (GPT-OSS).
        Positions:
            theta: The base of rotary positions.
            rope_scaling: How their frequencies are scaled for longer texts.
            local_theta: The base in layers with a window, which have no `rope_scaling` then (Gemma 3).
            rotary_share: The share of each head's dims that is rotated (GLM-4.5).
            unrotated: The layers that rotate no query or key by its position (SmolLM3).
            query_growth, growth_every: An unrotated layer multiplies the nth query of a text by
                1 + query_growth ln(1 + floor(n / growth_every)) (Llama 4).
            learned_positions: n: each of a text's first n positions has a vector that is added to the embedding
                (GPT-2), and longer texts are refused.
            max_positions: The longest text that the model was made for, before its positions are scaled (Hugging Face's
                max_position_embeddings); 0 if unknown.
        Dot-product attention:
            window: A query sees itself and the window - 1 tokens before it. One number, or one for each layer, where
                None sees all.
            chunked: Whether a text is cut into chunks of `window` tokens, and a query sees its own chunk (Llama 4).
            latent: The ranks and widths of latent attention.
            linear: The layers of linear attention, and their heads.
            cached: The number of layers with cached keys and values, if others (`linear` ones) have none; None is all.
            attention_bias, output_bias: Whether there are biases b_Q, b_K and b_V, and whether there is a b_O.
            head_clip: The bound within which elements of queries, keys and values are kept (OLMo).
            head_gate: Whether a head's result is multiplied by a sigmoid of the token (Qwen3-Next).
            sinks: Whether each head has a score of a key without a value (GPT-OSS).
            score_scale: The factor of scores; None is 1/sqrt(H) (Granite gives one).
            score_cap: The bound within which tanh keeps scores (Gemma 2).
        Norms of queries and keys:
            qk_norm: Whether there is an RMSNorm over the H of every query and key.
            qk_wide: Whether it norms all heads of a token together (OLMo).
            qk_layernorm: Whether it is a LayerNorm, with gains of each head (Command R+).
            qk_turned: Whether it norms rotated queries and keys (Hunyuan).
            qk_bare: Whether it norms heads of rotated layers alone, after rotating and without gains (Llama 4).
        Norms of the residual stream:
            norms: "before" a block, on its input, "after" it, on its output to the stream (OLMo 2), "both" (Gemma 2),
                or "shared": one norm of the stream that both blocks of a `parallel` layer read (Cohere).
            parallel: Whether a layer's blocks read the same stream.
            centered: Whether norms are LayerNorm, not RMSNorm.
            norm_gain, norm_bias: Whether norms have a gain; whether they have a bias.
            unit_offset: Whether norms multiply by 1 + their gain (Gemma).
            eps: The epsilon of norms.
        Scales, biases and bounds of the stream and the logits:
            embed_scale: The factor of embeddings (Granite, Gemma).
            residual_scale: The factor of a block's output to the residual stream (Granite).
            logit_scale: The divisor of logits (Granite).
            unembed_bias: Whether logits have a bias.
            logit_cap: The bound within which tanh keeps logits (Gemma 2).
        Dropout:
            dropout: The share of elements that training drops from a block's output to the residual stream (GPT-2's
                resid_pdrop).
            attention_dropout, embed_dropout: The same share of attention's weights, and of embeddings. Neither is
                computed, so a model with either is not trained.
    """

    name: str
    L: int
    D: int
    F: int
    N: int
    K: int
    H: int
    V: int
    gated: bool = True
    tied: bool = False
    E: int = 1
    k: int = 1
    shared: int = 0
    F_shared: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    clamp: float | None = None
    dense_layers: int | tuple[int, ...] = 0
    F_dense: int = 0
    norms: str = "before"
    parallel: bool = False
    centered: bool = False
    norm_gain: bool = True
    norm_bias: bool = False
    mlp_bias: bool = False
    routing: str = "softmax"
    expert_groups: int = 1
    top_groups: int = 1
    norm_topk: bool = True
    routed_scale: float = 1.0
    capacity: float | None = None
    aux_coef: float = 0.0
    z_coef: float = 0.0
    balance_by: str = "batch"
    balance_first: bool = False
    theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rotary_share: float = 1.0
    local_theta: float | None = None
    learned_positions: int = 0
    eps: float = 1e-5
    attention_bias: bool = False
    output_bias: bool = False
    unembed_bias: bool = False
    head_clip: float | None = None
    qk_norm: bool = False
    qk_wide: bool = False
    qk_layernorm: bool = False
    qk_turned: bool = False
    qk_bare: bool = False
    window: int | tuple[int | None, ...] | None = None
    chunked: bool = False
    activation: str | None = None
    dropout: float = 0.0
    embed_dropout: float = 0.0
    attention_dropout: float = 0.0
    unit_offset: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    head_gate: bool = False
    unrotated: tuple[int, ...] = ()
    query_growth: float = 0.0
    growth_every: int = 8192
    cached: int | None = None
    uncomputed: tuple[str, ...] = ()
    latent: Latent | None = None
    linear: Linear | None = None
    max_positions: int = field(default=0, compare=False)
    model_type: str = field(default="", compare=False)
    dtype: str = "bf16"
    source: str = ""

    def __post_init__(self):
        if isinstance(self.rope_scaling, dict):  # as files have it; they also have lists
            object.__setattr__(self, "rope_scaling", RopeScaling.of(self.rope_scaling))
        for name in ("window", "uncomputed", "unrotated", "dense_layers"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        check_fields(self, f"{self.name}: ", WITHIN)
        if self.N % self.K:
            raise ValueError(
                f"{self.name}: K={self.K} KV heads must divide N={self.N} query heads\n  fix: give K a divisor of N"
            )
        if self.k > self.E:
            raise ValueError(
                f"{self.name}: {self.k} experts cannot be active of E={self.E}\n  fix: choose k from 1 to E"
            )
        if isinstance(self.dense_layers, int):
            check_within(f"{self.name}: dense_layers", self.dense_layers, f"[0, {self.L}]")
        for name, layers in (("unrotated", self.unrotated), ("dense_layers", self.dense)):
            if any(not isinstance(l, int) or not 0 <= l < self.L for l in layers):
                what = f"{self.name}: {name}={layers!r:.60}: layers are 0 to {self.L - 1}"
                raise ValueError(f"{what}\n  fix: give numbers of layers")
        if self.dense and self.F_dense < 1:
            what = f"{self.name}: {len(self.dense)} dense layers of width F_dense={self.F_dense}"
            raise ValueError(f"{what}\n  fix: give both, or neither")
        dense = tuple(sorted({*self.dense}))
        object.__setattr__(self, "dense_layers", len(dense) if dense == (*range(len(dense)),) else dense)
        dtype_bytes(self.dtype)
        self._check_routing()
        self._check_attention()

    def _check_routing(self) -> None:
        if self.F_shared and not self.shared:
            raise ValueError(
                f"{self.name}: F_shared={self.F_shared} of {self.shared} shared experts\n  fix: give both, or neither"
            )
        if self.expert_groups < 1 or self.E % self.expert_groups or not 1 <= self.top_groups <= self.expert_groups:
            raise ValueError(
                f"{self.name}: expert_groups={self.expert_groups} must divide E={self.E}, and top_groups="
                f"{self.top_groups} lie in 1..{self.expert_groups}\n  fix: leave both out, or choose such numbers"
            )
        if self.k > self.top_groups * (self.E // self.expert_groups):
            raise ValueError(
                f"{self.name}: k={self.k} experts cannot come from {self.top_groups} groups"
                "\n  fix: choose a smaller k, or more groups"
            )

    def _check_attention(self) -> None:
        if linear := self.linear:
            if len({*linear.layers} & {*range(self.L)}) != len(linear.layers) or not 0 < len(linear.layers) < self.L:
                what = f"{self.name}: linear layers {linear.layers!r:.60} of layers 0 to {self.L - 1}"
                raise ValueError(f"{what}\n  fix: name at least one layer, each once, and leave at least one out")
            object.__setattr__(self, "cached", self.L - len(linear.layers))
        if self.latent and (self.latent.value != self.H or self.K != self.N):
            raise ValueError(
                f"{self.name}: latent attention has heads of H={self.latent.value}, its value, and K=N={self.N} of them"
                f"; got H={self.H}, K={self.K}\n  fix: give these H and K"
            )
        if isinstance(self.window, tuple) and len(self.window) != self.L:
            raise ValueError(
                f"{self.name}: window has {len(self.window)} entries for L={self.L} layers"
                "\n  fix: give one window, or one for each layer"
            )
        if any(w is not None and (isinstance(w, bool) or not isinstance(w, int) or w < 1) for w in self.windows):
            what = f"{self.name}: a window is a whole number of tokens of at least 1, got {self.window!r}"
            raise ValueError(f"{what}\n  fix: give such a number, or None for layers without a window")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.L

    @property
    def nonlinearity(self) -> str:
        """The name of the activation, with its default filled in."""
        return self.activation or ("silu" if self.gated else "gelu")

    @property
    def sizes(self) -> dict[str, int]:
        """The dims of the params by letter.

        S is the width of the shared experts together, and J counts learned positions. L counts the layers of one stack;
        the dense layers beside those with experts are G, of width O. In latent attention R (D if queries have no
        latent) and C are the ranks of queries and of keys and values, M = C + rope, A = nope + rope is a query's width,
        and W = nope + value is the width of a key and a value. Linear layers have lower-case letters, and L then counts
        the others.
        """
        sizes = {letter: getattr(self, letter) for letter in "LDFNKHVE"} | {"S": self.S, "J": self.learned_positions}
        if count := len(self.dense):
            sizes |= {"L": self.L - count, "G": count, "O": self.F_dense}
        if latent := self.latent:
            sizes |= {"R": latent.q_rank or self.D, "C": latent.kv_rank, "M": latent.kv_rank + latent.rope}
            sizes |= {"A": latent.nope + latent.rope, "W": latent.nope + latent.value}
        return sizes | (self.linear.sizes | {"L": len(self.attending)} if self.linear else {})

    @property
    def dense(self) -> tuple[int, ...]:
        """The numbers of the layers with a dense MLP in a model with experts."""
        given = self.dense_layers
        return tuple(range(given)) if isinstance(given, int) else given

    @property
    def kinds(self) -> tuple[str, ...]:
        """The stack of params to which each layer belongs: "dense", "linear" or "layers"."""
        kinds = ["layers"] * self.L
        for l in self.linear.layers if self.linear else ():
            kinds[l] = "linear"
        for l in self.dense:
            kinds[l] = "dense"
        return tuple(kinds)

    @property
    def attending(self) -> tuple[int, ...]:
        """The numbers of the layers with attention, which are not linear."""
        return tuple(l for l in range(self.L) if self.linear is None or l not in self.linear.layers)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each layer in its kind's cache: its number among the linear layers or among the others."""
        linear = self.linear.layers if self.linear else ()
        return tuple((linear if l in linear else self.attending).index(l) for l in range(self.L))

    @property
    def rotary(self) -> int:
        """The number of dims of a head that positions rotate."""
        return self.latent.rope if self.latent else int(self.H * self.rotary_share)

    @property
    def G(self) -> int:
        """Query heads that share a KV head."""
        return self.N // self.K

    @property
    def S(self) -> int:
        """The width of the shared experts together."""
        return self.F_shared or self.shared * self.F

    @property
    def matrices(self) -> int:
        """Matrices of one MLP: 3 with a gate, 2 without."""
        return 3 if self.gated else 2

    @property
    def layer_norms(self) -> int:
        """The number of norms of a layer's blocks."""
        return {"before": 2, "after": 2, "both": 4, "shared": 1}[self.norms]

    @property
    def moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.E > 1

    def with_(self, **changes) -> "Config":
        """Return a Config with these fields changed."""
        return replace(self, **changes)
