"""Real models, unchanged, from torchvision and transformers: do they train, what is saved, how far is the gradient?

    python benchmarks/real_models.py [--policy int8] [--compiler aot_eager] [NAME ...]

Each model takes two training steps compiled, then its gradient is held against policy "none". Prints one row a model.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fx_actcomp

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, its inputs and its keyword arguments."""


class Classifier(nn.Module):
    """A vision model with its loss, as transformers' models have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def _vision(name: str, size: int = 64, batch: int = 16, **arguments: Any) -> Callable[[], Example]:
    def build() -> Example:
        import torchvision

        model = Classifier(getattr(torchvision.models, name)(num_classes=10, **arguments))
        return model, (torch.randn(batch, 3, size, size), torch.arange(batch) % 10), {}

    return build


def _text(model: str, config: str, batch: int = 4, length: int = 128, **sizes: Any) -> Callable[[], Example]:
    def build() -> Example:
        import transformers

        settings = getattr(transformers, config)(vocab_size=256, **sizes)
        ids = torch.randint(0, 256, (batch, length))
        return getattr(transformers, model)(settings), (), {"input_ids": ids, "labels": ids}

    return build


def _vit() -> Example:
    import transformers

    settings = transformers.ViTConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, image_size=64, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(settings)
    return model, (), {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.arange(16) % 10}


_DECODER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}

MODELS: dict[str, Callable[[], Example]] = {
    "resnet18": _vision("resnet18"),
    "resnet50": _vision("resnet50"),
    "mobilenet_v2": _vision("mobilenet_v2"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "vit_b_16": _vision("vit_b_16", image_size=64),
    "swin_t": _vision("swin_t"),
    "convnext_tiny": _vision("convnext_tiny"),
    "BERT": _text(
        "BertForMaskedLM", "BertConfig", hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512
    ),
    "GPT-2": _text("GPT2LMHeadModel", "GPT2Config", n_embd=128, n_layer=3, n_head=4, n_positions=128),
    "Llama": _text("LlamaForCausalLM", "LlamaConfig", **_DECODER),
    "Mistral": _text("MistralForCausalLM", "MistralConfig", **_DECODER),
    "T5": _text(
        "T5ForConditionalGeneration", "T5Config", d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4,
        decoder_start_token_id=0,
    ),
    "ViT": _vit,
}  # fmt: skip
"""The models, by name; transformers' are built from small configs, torchvision's at their real size on small images."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one model did.

    Attributes:
        losses: Of the two training steps, compiled.
        error: Whole-gradient relative error against policy "none".
        saving: Bytes of floating-point activations without us over those with us.
        total: The same over everything that is saved.
        report: The report.
    """

    losses: tuple[float, float]
    error: fx_actcomp.GradientError
    saving: float
    total: float
    report: fx_actcomp.Report


def measure(name: str, policy: str = "int8", compiler: str = "aot_eager") -> Result:
    """Train two steps, then compare the gradient."""
    torch.manual_seed(0)
    model, inputs, kwargs = MODELS[name]()
    options = {"policy": policy, "compiler": compiler, "min_bytes": 4096, "strict": True}
    error = fx_actcomp.gradient_error(model, *inputs, policy=policy, compiler=compiler, min_bytes=4096, **kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="actcomp", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        output = compiled(*inputs, **kwargs)
        loss = output.loss if hasattr(output, "loss") else output
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report = fx_actcomp.report(compiled)
    floats = [r for r in report.saved if r.kind == "activation" or r.kind == "decision"]
    saving = sum(r.bytes_before for r in floats) / max(sum(r.bytes_after for r in floats), 1)
    total = report.bytes_before / max(report.bytes_after, 1)
    return Result((losses[0], losses[1]), error, saving, total, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8")
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--verbose", action="store_true", help="print each report")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}")
    args = parser.parse_args()
    rows = []
    for name in args.names or MODELS:
        result = measure(name, args.policy, args.compiler)
        rows.append([name, result.error.relative, result.error.cosine, result.saving, result.total, *result.losses])
        print(f"{name}: {result.error}, {result.saving:.2f} times fewer bytes of activations", flush=True)
        if args.verbose:
            print(result.report)
    head = ["model", "gradient error", "cosine", "activations", "all that is saved", "loss 1", "loss 2"]
    print(tabulate(rows, head, floatfmt=("", ".4f", ".5f", ".2f", ".2f", ".4f", ".4f")))


if __name__ == "__main__":
    main()
