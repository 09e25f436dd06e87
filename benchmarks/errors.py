"""How far each policy moves the gradient, and how many bytes it leaves, on the ResNet-18 and the GPT.

    python benchmarks/errors.py [--compiler aot_eager] [--policies lossless int8 int4] [resnet18] [gpt]

Whole-gradient relative error and cosine against policy "none" (random weights, seed 0); bytes saved for backward, and the
same over what may be compressed; bits an element as really stored, metadata counted, over the compressed values.
"""

from __future__ import annotations

import argparse
import math

import models
from tabulate import tabulate

import fx_actcomp

MODELS = {"resnet18": models.resnet18, "gpt": models.gpt}
WIDTHS = {"float32": 32, "float64": 64, "float16": 16, "bfloat16": 16}


def bits_per_element(report: fx_actcomp.Report) -> float:
    """Stored bits over elements, of the values that are compressed; a shared base counts once."""
    rows = [row for row in report.saved if row.kind == "activation" and row.codec not in ("keep", "drop")]
    stored = sum(row.bytes_after for row in rows) * 8
    elements = sum(row.bytes_before * 8 / WIDTHS[row.dtype] for row in rows)
    return stored / elements if elements else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--policies", nargs="*", default=["lossless", "int8", "int4"])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    rows = []
    for name in args.models or MODELS:
        for policy in args.policies:
            model, inputs = MODELS[name]()
            report = fx_actcomp.explain(model, *inputs, policy=policy, compiler=args.compiler)
            error = fx_actcomp.gradient_error(model, *inputs, policy=policy, compiler=args.compiler)
            taken = [row for row in report.saved if row.codec != "keep"]
            after = sum(row.bytes_after for row in taken)
            over = sum(row.bytes_before for row in taken) / after if after else math.nan
            total = report.bytes_before / report.bytes_after
            rows.append([name, policy, error.relative, error.cosine, total, over, bits_per_element(report)])
            print(name, policy, error, flush=True)
    head = ["model", "policy", "gradient error", "cosine", "times fewer bytes", "over what is compressed", "bits an element"]
    print(tabulate(rows, head, floatfmt=("", "", ".5f", ".6f", ".2f", ".2f", ".3f")))


if __name__ == "__main__":
    main()
