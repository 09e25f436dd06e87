"""Policy "invert" on transformers at their real shapes: bytes against plain torch.compile and eager, error, step time.

    python benchmarks/inversion.py [--pairs 7] [--batch 2] [bert] [gpt2] [llama] [vit]

BERT-base and GPT-2 small (12 layers of width 768, 512 tokens), a Llama of 8 layers of width 1024, ViT-B/16, random weights,
transformers' own code. Bytes that are saved for backward, parameters and inputs not counted: by eager PyTorch (what its saved
tensors' storages hold), by torch.compile, under "invert". The gradient's error is of the same models with 2 layers, against
policy "none". With --pairs, the median ratio of a step's time to policy "none"'s, both through Inductor, 2 layers.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fx_actcomp

MIB = 2**20
Example = tuple[nn.Module, dict[str, Tensor]]


def bert(batch: int, layers: int = 12) -> Example:
    import transformers

    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=2000, num_hidden_layers=layers))
    ids = torch.randint(0, 2000, (batch, 512))
    return model, {"input_ids": ids, "labels": ids}


def gpt2(batch: int, layers: int = 12) -> Example:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=2000, n_layer=layers, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, 2000, (batch, 512))
    return model, {"input_ids": ids, "labels": ids}


def llama(batch: int, layers: int = 8) -> Example:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    ids = torch.randint(0, 2000, (batch, 512))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def vit(batch: int, layers: int = 12) -> Example:
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=layers))
    return model, {"pixel_values": torch.randn(4 * batch, 3, 224, 224), "labels": torch.arange(4 * batch) % 2}


MODELS: dict[str, Callable[..., Example]] = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit}


def typed(example: Example, dtype: torch.dtype) -> Example:
    """The model in another type, its floating-point inputs too."""
    model, inputs = example
    return model.to(dtype), {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}


def eager_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes of the storages that eager's saved tensors hold, those of parameters, buffers and inputs not counted."""
    theirs = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in theirs:
            held[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**inputs).loss
        del loss
    return sum(held.values())


def time_ratio(build: Callable[[], Example], pairs: int) -> float:
    """Median over pairs of steps taken in turn."""

    def stepper(policy: str) -> Callable[[], float]:
        torch.manual_seed(0)
        model, inputs = build()
        call: Any = torch.compile(model, backend="actcomp", options={"policy": policy})

        def step() -> float:
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            call(**inputs).loss.backward()
            return time.perf_counter() - start

        for _ in range(3):
            step()
        return step

    plain, ours = stepper("none"), stepper("invert")
    return statistics.median(ours() / plain() for _ in range(pairs))


def _small(name: str, batch: int, dtype: torch.dtype) -> Example:
    return typed(MODELS[name](batch, layers=2), dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # each policy compiles the same code anew
    rows = []
    for name in args.models or MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            model, inputs = typed(MODELS[name](args.batch), dtype)
            eager = eager_bytes(model, inputs)
            report = fx_actcomp.explain(model, policy="invert", **inputs)
            small, inputs = typed(MODELS[name](1, layers=2), dtype)
            error = fx_actcomp.gradient_error(small, policy="invert", compiler="aot_eager", **inputs)
            build = functools.partial(_small, name, args.batch, dtype)
            ratio = time_ratio(build, args.pairs) if args.pairs else math.nan
            after = report.bytes_after
            rows.append([
                name, str(dtype).removeprefix("torch."), eager / MIB, report.bytes_before / MIB, after / MIB,
                100 * (1 - after / eager), 100 * (1 - after / report.bytes_before), error.relative, ratio,
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    head = [
        "model",
        "dtype",
        "eager, MiB",
        "compiled, MiB",
        "invert, MiB",
        "% under eager",
        "% under compiled",
        "error",
        "step time",
    ]
    print(tabulate(rows, head, floatfmt=("", "", ".0f", ".0f", ".0f", ".1f", ".1f", ".1e", ".3f")))


if __name__ == "__main__":
    main()
