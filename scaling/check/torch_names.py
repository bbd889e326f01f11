"""Torch's functions and methods by what they do to types (see scaling.check); an ending `_` makes no difference.

What is in none of these lists is taken to be nonlinear.
"""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# linear, of one array, whose type stays
KEEP = names("""neg negative positive clone detach contiguous to type type_as float double half bfloat16 cpu cuda
    requires_grad real imag conj pin_memory record_stream tril triu alias resolve_conj resolve_neg Parameter
    as_tensor""")

# linear, but the dims change
LOOSE = names("""view reshape flatten unflatten permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze
    expand expand_as view_as reshape_as repeat repeat_interleave tile narrow select index_select gather take_along_dim
    roll flip diagonal diag pad ravel broadcast_to unfold as_strided masked_select T mT H mH t rot90 cumsum trace diff
    fft rfft take adjoint fold""")
ADDED = names(
    "index_put scatter_add index_add index_copy scatter slice_scatter select_scatter"
)  # one array into another
PARTS = names("chunk split tensor_split unbind hsplit vsplit")
JOINS = names("cat concat concatenate stack hstack vstack dstack column_stack row_stack")
SUMS = {"sum": "sum", "nansum": "sum", "mean": "mean", "nanmean": "mean", "amax": "max", "amin": "min"}

# linear in each array, but not in two at once
BILINEAR = names("""mm bmm mv dot inner outer matmul tensordot einsum kron linear vdot ger conv1d conv2d conv3d
    chain_matmul multi_dot""")

# operators by name
SIGNS = {"add": "+", "sub": "-", "subtract": "-", "mul": "*", "multiply": "*", "div": "/", "divide": "/", "pow": "**"}
SIGNS |= {"true_divide": "/", "floor_divide": "//", "remainder": "%", "fmod": "%", "truediv": "/", "rsub": "-"}

# input + a product of the two others
MULTIPLY_ADD = names("addmm baddbmm addbmm addmv addr addcmul")
INTEGERS = names("int8 int16 int32 int64 uint8 int long short bool")  # types that cut fractions off

# arrays that are the same number everywhere
ZEROS = names("zeros zeros_like new_zeros zero")
CONSTANTS = names("""ones ones_like new_ones full full_like new_full tensor arange eye linspace new_tensor scalar_tensor
    logspace empty empty_like new_empty""")

# nonlinear; the type stays
POINTWISE = names("""relu gelu silu sigmoid tanh exp log sqrt rsqrt square abs softplus leaky_relu elu clamp clip sign
    erf reciprocal log1p expm1 dropout mish softmax log_softmax sin cos round floor ceil relu6 hardtanh selu logsigmoid
    absolute sgn nan_to_num celu hardswish normalize clamp_min clamp_max threshold""")

# what gives no array, or a new one, or only looks
PLAIN = names("""size dim numel nelement stride storage_offset data_ptr element_size is_contiguous is_floating_point
    is_complex ndimension get_device untyped_storage register_hook backward retain_grad rand_like randn_like item tolist
    numpy isnan isinf isfinite isneginf equal allclose isclose is_same_size is_tensor save promote_types result_type
    assert_close is_pinned is_shared share_memory grad is_set_to register_post_accumulate_grad_hook""")
