"""The allow-table of uses: what each operator of a backward graph does to a value that may be lossy.

Names are ATen packets. ``nodes.original`` maps the pieces of a decomposed operator back to it, so the table reads the same
with and without decompositions. What is not here is not known, and a use that is not known keeps the tensor exact.
"""

from __future__ import annotations


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


LIPSCHITZ = _aten(
    "add sub rsub neg mul sum mean clone _to_copy expand cat stack constant_pad_nd slice_scatter select_scatter"
    " index gather index_select where masked_fill relu clamp clamp_min clamp_max maximum minimum abs amax amin flip roll"
    " cumsum tril triu repeat mm bmm addmm baddbmm convolution avg_pool2d _adaptive_avg_pool2d upsample_nearest2d"
    " upsample_bilinear2d leaky_relu hardtanh hardsigmoid contiguous lift_fresh_copy addcmul copy reflection_pad2d"
    " reflection_pad1d replication_pad2d replication_pad1d _unsafe_index _unsafe_view"
) | {"prims.convert_element_type", "prims.fma"}
"""Their output moves no more than in proportion to their inputs: the error stays an error of the value."""

VALUE_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "aten.index": (0,),
    "aten._unsafe_index": (0,),
    "aten.gather": (0,),
    "aten.index_select": (0,),
    "aten.where": (1, 2),
    "aten.masked_fill": (0, 2),
}
"""Arguments of such operators that are values; the others are indices, predicates or denominators."""

SATURATING = _aten(
    "tanh sigmoid gelu silu erf softplus elu celu selu mish hardswish log_sigmoid log_sigmoid_forward atan _prelu_kernel"
    " tanh_backward sigmoid_backward gelu_backward silu_backward softplus_backward elu_backward mish_backward"
    " hardswish_backward hardsigmoid_backward log_sigmoid_backward leaky_relu_backward hardtanh_backward glu glu_backward"
    " _prelu_kernel_backward prelu leaky_relu hardtanh hardsigmoid relu6"
)
"""Nonlinear functions and derivatives with a bounded slope everywhere: they bear 8 bits."""

NORM = _aten(
    "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward"
    " batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward _native_batch_norm_legit_functional"
    " native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm"
    " _batch_norm_with_update_functional _fused_rms_norm"
)
SPATIAL_NORM = frozenset(name for name in NORM if "batch_norm" in name or "group_norm" in name)
"""Norms over height and width."""

HIDE_DECISIONS = _aten(
    "leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward elu_backward _prelu_kernel_backward"
    " threshold_backward hardshrink_backward softshrink_backward"
)
"""Whole operators that compare inside: decomposed, their comparisons can be pinned; whole, their input stays exact."""

ATTENTION_OPERANDS: dict[str, tuple[int, ...]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, 3, 4),
    "aten._scaled_dot_product_flash_attention_backward": (1, 2, 3, 4),
    "aten._scaled_dot_product_efficient_attention_backward": (1, 2, 3, 5),
    "aten._scaled_dot_product_cudnn_attention_backward": (1, 2, 3, 4),
    "aten._flash_attention_backward": (1, 2, 3, 4),
    "aten._efficient_attention_backward": (1, 2, 3, 5),
}
"""Positions of query, key, value and output; logsumexp, masks and random state beside them are exact."""

SIZE_ONLY: dict[str, tuple[int, ...]] = {
    "aten.max_pool2d_with_indices_backward": (1,),
    "aten.max_pool3d_with_indices_backward": (1,),
    "aten.avg_pool2d_backward": (1,),
    "aten.avg_pool3d_backward": (1,),
    "aten._adaptive_avg_pool2d_backward": (1,),
    "aten._adaptive_avg_pool3d_backward": (1,),
    "aten.adaptive_max_pool2d_backward": (1,),
    "aten.adaptive_max_pool3d_backward": (1,),
    "aten.reflection_pad1d_backward": (1,),
    "aten.reflection_pad2d_backward": (1,),
    "aten.replication_pad2d_backward": (1,),
    "aten.zeros_like": (0,),
    "aten.empty_like": (0,),
    "aten.ones_like": (0,),
    "aten.full_like": (0,),
    "aten.new_zeros": (0,),
    "aten.new_empty": (0,),
    "aten.new_full": (0,),
    "aten.sym_size": (0,),
    "aten.sym_numel": (0,),
    "aten.sym_stride": (0,),
}

STEPS = _aten("sign sgn floor ceil round trunc fix floor_divide heaviside")
"""Decisions that are floating-point numbers."""

PIECEWISE_CONSTANT = STEPS | _aten(
    "argmax argmin sort topk searchsorted bucketize nonzero signbit isnan isinf isfinite eq ne lt le gt ge logical_not"
    " logical_and logical_or kthvalue mode"
)
"""Decisions whatever their type; so is every operator that makes a bool or an integer of a float."""

EXACT: dict[str, str] = {
    **dict.fromkeys(_aten("exp exp2 expm1 _softmax _log_softmax logsumexp linalg_matrix_exp"), "exp: its range has no bound"),
    **dict.fromkeys(_aten("log log2 log10 log1p"), "argument of a logarithm"),
    **dict.fromkeys(_aten("sqrt rsqrt reciprocal pow"), "argument of a root, power or reciprocal"),
    **dict.fromkeys(_aten("fmod remainder"), "argument of a remainder"),
    **dict.fromkeys(_aten("sin cos tan"), "argument of a periodic function"),
    **dict.fromkeys(_aten("var var_mean std norm linalg_vector_norm"), "statistics would be recomputed from it"),
    "aten.div": "a denominator, or divided by one: where both vanish, no error is small",
}
"""Uses in which a small error of the value can be a large error of the result, with the reason that the report prints."""

MATMULS = _aten("mm bmm addmm baddbmm")
SIGN_TESTS = _aten("gt le ne eq lt ge sign")
GRADIENT_PASSING = _aten("add sum clone _to_copy squeeze unsqueeze") | {"prims.convert_element_type"}
"""What may stand between a weight gradient's matrix product and the graph's output."""
