"""What programs for fuzzing are made of: Python source with ``{x}`` for a value, in which other letters are drawn too."""

from __future__ import annotations

UNARY = (
    "torch.relu({x})", "F.gelu({x})", "F.gelu({x}, approximate='tanh')", "F.silu({x})", "torch.tanh({x})",
    "torch.sigmoid({x})", "F.softplus({x})", "F.elu({x})", "F.selu({x})", "F.celu({x}, 0.7)", "F.mish({x})",
    "F.hardswish({x})", "F.hardsigmoid({x})", "F.hardtanh({x}, -0.5, 0.8)", "F.leaky_relu({x}, 0.1)", "F.relu6({x})",
    "F.logsigmoid({x})", "F.softsign({x})", "F.tanhshrink({x})", "F.hardshrink({x}, 0.3)", "F.softshrink({x}, 0.2)",
    "F.threshold({x}, 0.1, -0.2)", "F.rrelu({x}, training=True)", "torch.sin({x})", "torch.cos({x})", "torch.atan({x})",
    "torch.erf({x})", "{x}.clamp(max=2).exp()", "torch.expm1({x}.clamp(max=1))", "({x}.abs() + 0.1).log()",
    "torch.log1p({x}.abs())", "({x} * {x} + 0.1).sqrt()", "torch.rsqrt({x}.square() + 0.2)", "1 / ({x} * {x} + 0.5)",
    "{x}.abs()", "{x}.square()", "{x} ** 3 * 0.2", "{x} * 0.5", "1 - {x}", "-{x}", "{x} + 1", "{x}.clamp(-1, 1)",
    "{x}.clamp(min=0.1)", "{x} * {x}.round()", "{x} * torch.sign({x})", "{x} - {x}.floor()", "{x}.frac()",
    "torch.fmod({x}, 0.7)", "torch.remainder({x}, 0.7)", "torch.nan_to_num({x})", "F.dropout({x}, 0.3)",
    "F.alpha_dropout({x}, 0.2)", "F.dropout({x}, 0.5) + {x}", "{x}.masked_fill({x} < 0, 0.25)",
    "torch.where({x} > 0.1, {x}, 0.3 * {x})", "{x} * ({x} > 0)", "{x} * ({x} > 0).to({x}.dtype)",
    "torch.where({x}.abs() < 1, 0.5 * {x} * {x}, {x}.abs() - 0.5)", "{x}.detach() * {x}", "{x}.clone()", "{x}.contiguous()",
    "({x} > 0).long().cumsum(-1) * 0.05 * {x}", "{x}.long() * 0.2 + {x}", "{x} * torch.rand_like({x})",
    "{x} + torch.bernoulli(torch.full_like({x}, 0.5))", "torch.heaviside({x}, {x}.new_zeros(())) * {x}", "{x}.sigmoid() * {x}",
    "{x}.mul(0.7978845608 * (1 + 0.044715 * {x} * {x})).tanh()", "{x}.to(torch.float32)", "{x}.to(torch.bfloat16)",
    "{x}.to(torch.float16)", "{x}.to(torch.float64)", "{x}.trunc() + {x}", "torch.sinc({x})", "torch.special.i0({x}) * 0.3",
    "torch.erfinv({x}.tanh() * 0.9)", "torch.asinh({x})", "{x}.sin().square()",
    "{x}.masked_fill({x} < 0, -math.inf).sigmoid()", "{x}.masked_fill({x} < 0, -math.inf).tanh() * {x}",
    "F.softplus({x}.masked_fill({x} > 0.5, -math.inf)) + {x}", "torch.nan_to_num({x}.masked_fill({x} > 1, math.nan))",
)  # fmt: skip
"""Pointwise functions."""

IN_PLACE = tuple(
    f"$ = {{x}}.clone()\n${part}.{done}"
    for part in ("", "[..., 0]", "[1:]", ".flatten()", ".detach()")
    for done in (
        "relu_()", "mul_(0.7)", "sub_(0.1)", "tanh_()", "sigmoid_()", "clamp_(-1, 1)", "zero_()", "neg_()",
        f"add_({{y}}{part})", f"mul_({{y}}{part})", f"copy_({{y}}{part})", f"masked_fill_({{y}}{part} > 0.5, 0.1)",
    )
)  # fmt: skip
"""Done to a clone, or to a part of it."""

BINARY = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y}.abs() + 0.5)", "torch.maximum({x}, {y})", "torch.minimum({x}, {y})",
    "torch.where({x} > {y}, {x}, {y} * 0.5)", "{x} * {y}.masked_fill({x} < 0, -math.inf).sigmoid()",
    "torch.lerp({x}, {y}, 0.3)", "torch.addcmul({x}, {y}, {x}, value=0.5)",
    "torch.addcdiv({x}, {y}, {y}.abs() + 1)", "({x}.abs() + 0.5) ** {y}.tanh()", "torch.atan2({x}, {y}.abs() + 0.5)",
    "torch.copysign({x}, {y})", "torch.logaddexp({x}, {y})", "torch.fmod({x}, {y}.abs() + 1)", "{x} * ({y} > 0)",
    "F.silu({x}) * {y}", "F.gelu({x}) * {y}", "{x}.sigmoid() * {y}", "{x}.masked_fill({y} < 0, 0)",
    "torch.hypot({x}, {y} + 3)", "F.smooth_l1_loss({x}, {y}, reduction='none')", "F.mse_loss({x}, {y}, reduction='none')",
    "torch.fmax({x}, {y})", "F.huber_loss({x}, {y}, reduction='none')", "({x} - {y}).abs()",
    "torch.xlogy({x}, {y}.abs() + 0.2)",
)  # fmt: skip
"""Two tensors of one shape, or of shapes that broadcast."""

ALONG = (
    "{x}.sum({d})", "{x}.mean({d}, keepdim=True)", "{x}.amax({d})", "{x}.amin({d}, keepdim=True)", "{x}.max({d}).values",
    "{x}.logsumexp({d})", "({x}.var({d}, keepdim=True) + 0.1).rsqrt()", "({x} - {x}.mean({d}, keepdim=True))",
    "({x} * {x}).sum({d}).add(0.1).sqrt()", "{x}.cumsum({d}) * 0.2", "({x}.sigmoid() + 0.5).cumprod({d})",
    "{x}.tanh().prod({d})", "{x}.median({d}).values", "{x}.sort({d}).values", "{x}.topk(2, {d}).values",
    "{x}.kthvalue(2, {d}).values", "{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.cummax({d}).values",
    "{x}.std({d}, keepdim=True) * {x}", "F.normalize({x}, dim={d})", "{x}.gather({d}, {x}.argsort({d}))",
    "{x} * F.softmax({x}, {d})", "{x}.flip({d})", "{x}.roll(1, {d})", "{x}.narrow({d}, 0, 2)", "{x}.select({d}, 1)",
    "torch.cat([{x}, {x} * 0.5], {d})", "torch.stack([{x}, -{x}], {d})", "{x}.chunk(2, {d})[0] * {x}.chunk(2, {d})[1]",
    "torch.cat({x}.split(3, {d})[::-1], {d})", "{x}.unbind({d})[1]", "{x}.unsqueeze({d})", "{x}.movedim({d}, 0)",
    "{x}.repeat_interleave(2, {d})", "F.glu({x}, {d})", "{x}.diff(dim={d})", "{x}.index_select({d}, torch.tensor([1, 0, 1]))",
    "torch.linalg.vector_norm({x}, dim={d}, keepdim=True) * 0.3", "{x}.scatter_add({d}, {x}.argsort({d}), {x} * 0.5)",
    "{x}.index_add({d}, torch.tensor([1, 0]), {x}.narrow({d}, 0, 2))", "{x} * {x}.argmax({d}, keepdim=True) * 0.1",
    "{x}.amax({d}, keepdim=True) - {x}", "{x}.softmax({d}).square().sum({d})",
    "torch.take_along_dim({x}, ({x} > 0).long(), {d})", "{x}.renorm(2, {d}, 3.0)", "{x}.unfold({d}, 2, 2)",
    "{x}.logcumsumexp({d})", "{x}.masked_fill({x} > 0.3, -math.inf).softmax({d}).masked_fill({x} > 0.3, 0)",
    "{x}.masked_fill({x} > 0, -math.inf).softmax({d}).nan_to_num(0) * {x}",
    "{x}.masked_fill({x} > 0.5, -math.inf).amax({d}).clamp(min=-3)",
)  # fmt: skip
"""Operators along one dimension."""

SHAPED = (
    "{x}.flatten()", "{x}.flatten(0, 1)", "{x}.transpose(0, 1)", "{x}.transpose(0, -1)", "{x}.transpose(-1, -2)",
    "{x}[..., ::2]", "{x}[..., 1:]", "{x}[:, None]", "{x}[1:]", "{x}.mT.contiguous().mT",
    "{x}.unsqueeze(0).expand(2, *[-1] * {x}.dim())", "{x}.tril()", "{x}.triu(1)", "{x}.diagonal(0, -2, -1)",
    "{x}.as_strided((8, 6), (7, 1), 3)", "{x}.as_strided((6, 8), (1, 5))", "{x}.repeat(2, *[1] * ({x}.dim() - 1))",
    "{x}[torch.tensor([1, 0, 0])]", "{x}[:, torch.tensor([1, 0, 1])]", "{x}.squeeze(0)", "{x}.reshape(-1, 2)",
    "{x}.view(2, -1)", "{x}.sum()", "{x}.mean() * {x}", "{x}.std() + {x}", "{x}.norm() * 0.1 + {x}", "F.pad({x}, (1, 2))",
    "F.pad({x}, (0, 1), value=0.3)", "torch.einsum('i...->...i', {x})", "{x}.max() - {x}",
    "{x}.new_ones(3, 1) * {x}.flatten()", "torch.meshgrid({x}.flatten()[:6], {x}.flatten()[:4], indexing='ij')[0]", "{x}.t()",
    "torch.rot90({x})", "{x}.argmax(-1) * 0.1 + {x}.sum(-1)",
)  # fmt: skip
"""Views, copies and whole reductions."""

TIMES = (
    "{x} @ {w}", "F.linear({x}, {v}, {b})", "F.linear({x}, {v})", "torch.relu(F.linear({x}, {v}, {b}))", "F.prelu({x}, {s})",
    "F.layer_norm({x}, ({n},))", "F.layer_norm({x}, ({n},), {g}, {g} - 1)", "F.rms_norm({x}, ({n},), {g})", "{x} * {g}",
    "torch.einsum('...i,ij->...j', {x}, {w})", "F.bilinear({x}, {x}, {q}) * 0.5", "{x} @ {w} @ {w}.t()",
    "F.gelu({x} @ {w}) @ {w}.t()", "torch.matmul({x}, {w}.tanh())",
)  # fmt: skip
"""The last dimension against weights."""

SEQUENCES = (
    "{x} @ {x}.mT * 0.2", "torch.bmm({x}, {x}.mT) * 0.2", "F.scaled_dot_product_attention({x}, {x} * 0.5, {x}.tanh())",
    "F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)", "(({x} @ {x}.mT) * 0.3).softmax(-1) @ {x}",
    "F.conv1d({x}, {k}, {a}, padding=1)", "F.conv1d({x}, {k}, stride=2)", "F.max_pool1d({x}, 2)", "F.avg_pool1d({x}, 2)",
    "F.batch_norm({x}, None, None, {c}, {a}, training=True)", "F.instance_norm({x})", "F.interpolate({x}, scale_factor=2)",
    "F.adaptive_avg_pool1d({x}, 3)", "F.adaptive_max_pool1d({x}, 3)", "torch.relu(F.conv1d({x}, {k}))",
    "F.pad({x}, (1, 1), mode='reflect')", "torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT, beta=0.5, alpha=0.1)",
    "F.group_norm({x}, 1)", "torch.cdist({x}, {x} + 0.5)",
    "F.scaled_dot_product_attention(*({x}.unsqueeze(1),) * 3, dropout_p=0.2)",
)  # fmt: skip
"""Three dimensions."""

IMAGES = (
    "F.conv2d({x}, {k}, {a}, padding=1)", "F.conv2d({x}, {k}, stride=2)", "F.conv2d({x}, {p})",
    "F.conv2d({x}, {k}[:, :1], groups={x}.size(1), padding=1)", "F.max_pool2d({x}, 2)", "F.max_pool2d({x}, 3, 1, 1)",
    "F.avg_pool2d({x}, 2)", "F.adaptive_avg_pool2d({x}, 2)", "F.adaptive_max_pool2d({x}, 2)",
    "F.batch_norm({x}, None, None, {c}, {a}, training=True)",
    "torch.relu(F.batch_norm({x}, None, None, {c}, {a}, training=True))",
    "F.conv2d(F.relu(F.batch_norm({x}, None, None, {c}, {a}, training=True)), {k})", "F.group_norm({x}, 2, {c}, {a})",
    "F.instance_norm({x})", "F.interpolate({x}, scale_factor=2, mode='bilinear')", "F.interpolate({x}, scale_factor=2)",
    "F.pad({x}, (1, 1, 1, 1), mode='reflect')", "F.pad({x}, (1, 1, 1, 1), mode='replicate')",
    "F.conv_transpose2d({x}, {k}, stride=2)", "F.unfold({x}, 2)", "F.lp_pool2d({x}.abs() + 0.1, 2, 2)",
    "F.dropout2d({x}, 0.3)", "F.local_response_norm({x}, 3)", "{x}.contiguous(memory_format=torch.channels_last)",
    "F.channel_shuffle({x}, 2)", "F.pixel_unshuffle({x}[..., :4, :4], 2)", "F.relu(F.conv2d({x}, {k}, {a}, padding=1) + {x})",
    "{x} * {x}.mean((2, 3), keepdim=True).sigmoid()",
    "F.grid_sample({x}, {x}[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)",
    "F.scaled_dot_product_attention({x}, {x}, {x})",
)  # fmt: skip
"""Four dimensions."""

OTHERS = (
    "F.embedding(({x}.abs() * 3).long().clamp(max=11), {t})", "F.embedding({x}.argmax(-1) % 12, {t})",
    "F.embedding_bag(({x}.abs() * 3).long().clamp(max=11).flatten(1), {t}, mode='max')",
    "F.one_hot(({x}.abs() * 3).long().clamp(max=4), 5) * {x}.unsqueeze(-1)",
    "with torch.autocast('cpu', torch.bfloat16):\n    $ = torch.relu({x} @ {w})",
    "with torch.autocast('cpu', torch.float16):\n    $ = F.layer_norm(F.linear({x}, {v}), (12,))",
    "with torch.no_grad():\n    $ = {x} * 2", "$ = checkpoint(lambda x: F.gelu(x @ {w}) @ {w}.t(), {x}, use_reentrant=False)",
    "$ = checkpoint(lambda x: F.dropout(x.relu(), 0.4) * x, {x}, use_reentrant=False)", "torch.ones(()) * {x}",
    "F.cross_entropy({x}.flatten(0, -2), {x}.flatten(0, -2).argmin(-1))",
    "F.kl_div({x}.log_softmax(-1), {x}.flip(-1).softmax(-1))",
    "F.binary_cross_entropy_with_logits({x}, ({x} > 0.1).to({x}.dtype))", "F.cosine_similarity({x}, {y}, dim=-1)",
    "F.nll_loss({x}.flatten(0, -2).log_softmax(-1), torch.arange({x}.flatten(0, -2).size(0)) % {n})",
)  # fmt: skip
"""Integers, autocast, checkpoints, losses."""
