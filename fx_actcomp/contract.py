"""Part of stage 4: a pointwise convolution's backward, taken from the small tensors that a codec contracts to."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from .codecs import Codec, Layout, Parts
from .nodes import value
from .splice import insert, trace


def contract(convolution: fx.Node, parts: Sequence[fx.Node], codec: Codec, layout: Layout) -> None:
    """Replace a pointwise convolution's backward by one that doesn't read its full-size input.

    Args:
        convolution: The ``aten.convolution_backward`` node; it loses its users.
        parts: The backward nodes of the input's parts.
        codec: The codec that made them.
        layout: The input's layout.
    """
    gradient, _, weight, _, stride, padding, dilation, _, output_padding, groups, _ = convolution.args
    assert isinstance(gradient, fx.Node)
    assert isinstance(weight, fx.Node)
    made = {user.args[1]: user for user in convolution.users if user.target is operator.getitem}
    input_gradient = value(made[0]) if 0 in made else None
    restored = None if input_gradient is None else Layout.of(input_gradient)

    def backward(dy: Tensor, w: Tensor, *held: Tensor) -> Parts:
        found = []
        if restored is not None:  # the convolution's own backward would want an input, if only for its shape
            dx = torch.ops.aten.convolution.default(dy, w, None, stride, padding, dilation, True, output_padding, groups)
            found.append(restored.restore(dx))
        if 1 in made:
            small, means, factor = codec.contract(dy, held, layout)
            how = (None, stride, padding, dilation, False, output_padding, groups, [False, True, False])
            found.append(torch.ops.aten.convolution_backward.default(small, means.to(dy.dtype), w, *how)[1] * factor)
        if 2 in made:
            found.append(dy.sum([0, *range(2, dy.dim())]))
        return tuple(found)

    inputs = [gradient, weight, *parts]
    results = insert(trace(backward, inputs), convolution.graph, inputs, convolution, convolution)
    for (_, user), result in zip(sorted(made.items()), results, strict=True):
        user.replace_all_uses_with(result)
