"""Architectures of transformers, torchvision and timm for ``zoo.py``: small, random weights, inputs and a loss.

A model of transformers is its type's own configuration with the sizes cut down by one table (``SIZES``), under the head that
transformers has for its kind; what its forward asks for says what it is given. So a name in ``TRANSFORMERS`` is all that one
more takes, and where its sizes depend on each other a line in ``ADAPTED``. torchvision's and timm's models are the small ones
of their kind, or its class with fewer blocks.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

BATCH, LENGTH, VOCABULARY, IMAGE, VIDEO, FRAMES, SAMPLES, CLASSES = 4, 32, 128, 32, 4, 64, 4000, 2


class Example(NamedTuple):
    """A model, in training mode, and what it is called with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Entry(NamedTuple):
    """One architecture: its library, its kind, and what builds it."""

    family: str
    kind: str
    build: Callable[[], Example]


def loss_of(output: Any) -> Tensor:
    """The loss that a model gives, or the sum of several; else its outputs times fixed numbers: no symmetry hides a gradient."""
    held = getattr(output, "loss", None)
    if isinstance(held, Tensor):
        return held.sum()
    floats = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
    if all(x.dim() == 0 for x in floats):
        return torch.stack(floats).sum()
    draw = torch.Generator().manual_seed(0)
    return torch.stack([(x.float() * torch.randn(x.shape, generator=draw)).sum() / math.sqrt(x.numel()) for x in floats]).sum()


# transformers

SIZES: dict[str, int] = {
    **dict.fromkeys("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers".split(), 2),
    **dict.fromkeys("num_encoder_layers num_decoder_layers num_encoder_blocks depth".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("num_key_value_heads num_kv_heads num_experts_per_tok".split(), 2),
    **dict.fromkeys("hidden_size d_model n_embd dim embed_dim emb_dim embedding_size".split(), 64),
    **dict.fromkeys("projection_dim word_embed_proj_dim".split(), 64),
    **dict.fromkeys("intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner".split(), 128),
    **dict.fromkeys("ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size".split(), 128),
    **dict.fromkeys("head_dim d_kv d_head qk_nope_head_dim v_head_dim num_mel_bins".split(), 16),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), 4),
    "vocab_size": VOCABULARY, "image_size": IMAGE, "patch_size": 8, "num_frames": VIDEO,
}  # fmt: skip
"""A configuration's fields and the most that they may be."""

DEPENDENT = frozenset({"out_features", "_out_features", "stage_names", "out_indices", "_out_indices", "per_layer_config"})
"""Fields that follow from the others: they are left for the configuration to make again."""

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "mask_token_id": 3}
IMAGE_TOKEN = VOCABULARY - 1
SPECIAL |= dict.fromkeys(("image_token_id", "image_token_index"), IMAGE_TOKEN)

_LATENT = {
    "num_key_value_heads": 4, "qk_rope_head_dim": 16, "head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

ADAPTED: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": FRAMES, "patch_size": 16},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "convnextv2": _STAGES,
    "deepseek_v3": _LATENT,
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "num_decoder_layers": 1},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nemotron": {"num_key_value_heads": 2},
    "patchtst": {"patch_length": 8, "patch_stride": 4},  # of 1, all channels would be one series, which the norms take out
    "poolformer": {**_STAGES, "num_encoder_blocks": 4},
    "regnet": {**_STAGES, "embedding_size": 16, "groups_width": 8},
    "swinv2": {"embed_dim": 32, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2},
    "whisper": {"max_source_positions": FRAMES // 2},
}
"""Sizes of single types that depend on each other."""

TRANSFORMERS: dict[str, str] = {
    "encoder": "albert bert deberta-v2 distilbert electra fnet funnel ibert longformer mobilebert modernbert squeezebert xlm",
    "decoder": "bloom cohere2 diffllama falcon gemma2 gpt2 gpt_neo gptj llama nemotron opt phi3 qwen3 xlnet",
    "mixture of experts": "deepseek_v3 gpt_oss granitemoe jetmoe llama4 mixtral qwen2_moe",
    "state space": "bamba jamba lfm2 mamba2 qwen3_next",
    "encoder-decoder": "bart fsmt m2m_100 t5",
    "vision": "beit convnextv2 poolformer regnet segformer siglip swiftformer swinv2 vit",
    "video": "videomae",
    "audio": "audio-spectrogram-transformer sew-d wav2vec2 wavlm whisper",
    "multimodal": "aimv2 blip clip flava git llava vilt",
    "time series": "patchtsmixer patchtst",
}
"""Model types by kind."""

HEADS: dict[str, tuple[str, ...]] = {
    "encoder": ("MaskedLM",),
    "decoder": ("CausalLM",),
    "mixture of experts": ("CausalLM",),
    "state space": ("CausalLM",),
    "encoder-decoder": ("Seq2SeqLM",),
    "vision": ("ImageClassification",),
    "video": ("VideoClassification",),
    "audio": ("CTC", "SpeechSeq2Seq", "AudioClassification"),
    "multimodal": ("ImageTextToText",),
    "time series": (),
}
"""transformers' automatic classes for each kind, best first; where none fits, the bare model."""


def _shrink(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration's sizes cut down, those of the configurations in it too; of a list a layer, the first and the last."""
    layers = next((config[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(config.get(key), int)), 0)
    small: dict[str, Any] = {"use_cache": False}
    for key, given in config.items():
        if key in DEPENDENT:
            continue
        if isinstance(given, dict) and key.endswith("config"):
            small[key] = _shrink(given)
        elif isinstance(given, list) and layers and len(given) == layers:
            small[key] = [given[0], given[-1]]
        elif key in SIZES and isinstance(given, int):
            small[key] = min(given, SIZES[key])
        elif key in SPECIAL and isinstance(given, int):
            small[key] = SPECIAL[key] if given >= VOCABULARY else given
        else:
            small[key] = given
    return small


def _transformer(name: str, kind: str) -> Example:
    import transformers

    transformers.logging.set_verbosity_error()
    known = transformers.CONFIG_MAPPING[name]
    small = {**_shrink(known().to_dict()), **ADAPTED.get(name, {})}
    if kind == "encoder-decoder":
        small["decoder_start_token_id"] = 0
    config = known.from_dict(small)
    heads = [getattr(transformers, f"AutoModelFor{head}") for head in HEADS[kind]]
    head = next((head for head in heads if known in head._model_mapping), transformers.AutoModel)
    model = head.from_config(config).float().train()
    return Example(model, (), _inputs(model, config))


def _inputs(model: nn.Module, config: Any) -> dict[str, Any]:
    """What a model's forward asks for, by the names that transformers gives to it."""
    asked = inspect.signature(model.forward).parameters
    seen = getattr(config, "vision_config", config)
    size, channels = getattr(seen, "image_size", IMAGE), getattr(seen, "num_channels", 3)
    pixels = (BATCH, channels, size, size) if isinstance(size, int) else (BATCH, channels, *size)
    if hasattr(seen, "num_frames") and not hasattr(config, "text_config"):
        pixels = (BATCH, seen.num_frames, *pixels[1:])
    ids = torch.randint(4, VOCABULARY - 8, (BATCH, LENGTH))
    if "input_ids" in asked and "pixel_values" in asked:
        ids[:, 1 : 1 + (size // getattr(seen, "patch_size", 8)) ** 2] = IMAGE_TOKEN
    mel = getattr(config, "num_mel_bins", 16)
    waves = (BATCH, FRAMES, mel) if hasattr(config, "num_mel_bins") else (BATCH, SAMPLES)
    given: dict[str, Any] = {
        "input_ids": ids,
        "pixel_values": torch.randn(pixels),
        "input_values": torch.randn(waves),
        "input_features": torch.randn(BATCH, mel, FRAMES),
        "past_values": torch.randn(BATCH, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1)),
        "return_loss": True,
        "labels": torch.arange(BATCH) % CLASSES,
    }
    if "input_ids" in asked:
        given["labels"] = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    elif type(model).__name__.endswith(("CTC", "ForConditionalGeneration")):
        given["labels"] = torch.randint(4, 20, (BATCH, 8))
    return {name: x for name, x in given.items() if name in asked}


# torchvision and timm


class Classifier(nn.Module):
    """A vision model under its loss, of classes or of classes a pixel; what it gives beside the logits counts half."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        output = self.model(images)
        given = list(output.values()) if isinstance(output, dict) else list(output) if isinstance(output, tuple) else [output]
        losses = [F.cross_entropy(logits, labels) for logits in given if logits is not None]
        return losses[0] + sum(losses[1:]) / 2


def _classifier(build: Callable[[], nn.Module], size: int = 64, frames: int = 0, dense: bool = False) -> Example:
    images = torch.randn(BATCH, 3, *[frames] * bool(frames), size, size)
    labels = torch.randint(0, 10, (BATCH, size, size)) if dense else torch.arange(BATCH) % 10
    return Example(Classifier(build()).train(), (images, labels), {})


def _detector(name: str, size: int = 64) -> Example:
    """A detector, and two boxes an image."""
    from torchvision.models import detection

    sizes = {} if "ssd" in name else {"min_size": size, "max_size": size}
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=4, **sizes)
    boxes = torch.tensor([[4.0, 4.0, 40.0, 36.0], [20.0, 10.0, 60.0, 60.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    return Example(model.train(), ([torch.rand(3, size, size) for _ in range(2)], [target, target]), {})


def _raft() -> Example:
    from torchvision.models import optical_flow

    frames = torch.randn(2, 2, 3, 128, 128)
    return Example(optical_flow.raft_small().train(), (frames[0], frames[1]), {"num_flow_updates": 2})


def _torchvision(name: str, **arguments: Any) -> nn.Module:
    from torchvision import models

    known = getattr(models, name, None) or getattr(models.segmentation, name)
    bare = {"weights_backbone": None} if "backbone" in str(inspect.signature(known)) else {}
    return known(num_classes=10, **bare, **arguments)


def _resnext() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=8, width_per_group=4)


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(16, (2, 2, 2, 2), 32, drop_rate=0.1, num_classes=10)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = [(32, 64), (64, 128), (128, None)]
    return ConvNeXt([CNBlockConfig(i, o, 1) for i, o in widths], stochastic_depth_prob=0.1, num_classes=10)


def _vgg() -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    model = VGG(make_layers([32, "M", 64, "M", 128, "M", 512, "M"], batch_norm=True), num_classes=10)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(512, 128), nn.ReLU(True), nn.Dropout(), nn.Linear(128, 10))
    return model


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 64, 128, dropout=0.1, attention_dropout=0.1, num_classes=10)


def _swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    newer: dict[str, Any] = (
        {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == 2 else {}
    )
    return swin.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], dropout=0.1, num_classes=10, **newer)


def _swin3d() -> nn.Module:
    from torchvision.models.video import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 32, [2, 2], [2, 4], [2, 4, 4], dropout=0.1, num_classes=10)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.1, num_classes=10)


def _video(convolution: str) -> nn.Module:
    from torchvision.models.video import resnet

    stem = resnet.R2Plus1dStem if convolution == "Conv2Plus1D" else resnet.BasicStem
    makers: list[Any] = [getattr(resnet, convolution)] * 4
    if convolution == "Conv3DNoTemporal":  # mixed: the first stage stays three-dimensional
        makers[0] = resnet.Conv3DSimple
    return resnet.VideoResNet(resnet.BasicBlock, makers, [1, 1, 1, 1], stem, num_classes=10)


def _of(name: str, size: int = 64, *, dense: bool = False, **arguments: Any) -> Callable[[], Example]:
    return functools.partial(_classifier, functools.partial(_torchvision, name, **arguments), size, dense=dense)


def _small(build: Callable[[], nn.Module], size: int = 64, frames: int = 0) -> Callable[[], Example]:
    return functools.partial(_classifier, build, size, frames)


TORCHVISION: dict[str, dict[str, Callable[[], Example]]] = {
    "classification": {
        "convnext": _small(_convnext),
        "densenet": _small(_densenet),
        "efficientnet_b0": _of("efficientnet_b0"),
        "googlenet": _of("googlenet", 128, init_weights=True),  # of 64, its last norms would see four numbers a channel
        "maxvit": _small(_maxvit),
        "mnasnet0_5": _of("mnasnet0_5"),
        "mobilenet_v2": _of("mobilenet_v2"),
        "mobilenet_v3_small": _of("mobilenet_v3_small"),
        "regnet_y_400mf": _of("regnet_y_400mf"),
        "resnet18": _of("resnet18"),
        "resnext": _small(_resnext),
        "shufflenet_v2_x0_5": _of("shufflenet_v2_x0_5"),
        "squeezenet1_1": _of("squeezenet1_1"),
        "swin": _small(functools.partial(_swin, 1)),
        "swin_v2": _small(functools.partial(_swin, 2)),
        "vgg": _small(_vgg),
        "vit": _small(_vit, 32),
    },
    "segmentation": {
        name: _of(name, dense=True)
        for name in ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
    },
    "video": {
        "mc3": _small(functools.partial(_video, "Conv3DNoTemporal"), 32, VIDEO),
        "r2plus1d": _small(functools.partial(_video, "Conv2Plus1D"), 32, VIDEO),
        "r3d": _small(functools.partial(_video, "Conv3DSimple"), 32, VIDEO),
        "swin3d": _small(_swin3d, 32, VIDEO),
    },
    "detection": {
        name: functools.partial(_detector, name)
        for name in ("fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large")
    },
    "optical flow": {"raft_small": _raft},
}  # fmt: skip
"""torchvision's, by kind and name; ``vit`` for its class with fewer blocks, ``vit_b_16`` would be the model itself."""

TIMM: dict[str, str] = {
    "convolution": "convnextv2_atto cspnext_tiny darknet17 ese_vovnet19b_dw fasternet_t0 gernet_s hgnetv2_b0 inception_next_atto"
    " lambda_resnet26t lcnet_035 mambaout_femto mobilenetv4_conv_small resnest14d resnet10t skresnet18 starnet_s1 test_byobnet"
    " test_efficientnet test_efficientnet_evos test_nfnet",
    "attention": "edgenext_xx_small efficientvit_b0 pit_ti_224 poolformerv2_s12 pvt_v2_b0 test_vit test_vit4 visformer_tiny",
}
"""timm's, by kind."""


def _timm(name: str, size: int = 64) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, num_classes=10, drop_rate=0.1, img_size=size)
    except TypeError:  # it takes images of any size
        return timm.create_model(name, num_classes=10, drop_rate=0.1)


def _awake(build: Callable[[], Example]) -> Example:
    """A model whose heads, gates and layer scales that start at nothing don't: they would let no gradient through."""
    example = build()
    for path, parameter in example.model.named_parameters():
        if parameter.numel() and parameter.abs().max() < 1e-3 and not path.endswith("bias"):
            nn.init.normal_(parameter, std=0.02 if parameter.dim() >= 2 else 0.5)
    return example


def architectures() -> dict[str, Entry]:
    """All of them, by library and name."""
    found: dict[str, Entry] = {}
    for kind, names in TRANSFORMERS.items():
        for name in names.split():
            build = functools.partial(_transformer, name, kind)
            found[f"transformers/{name}"] = Entry("transformers", kind, functools.partial(_awake, build))
    for kind, builders in TORCHVISION.items():
        for name, build in builders.items():
            found[f"torchvision/{name}"] = Entry("torchvision", kind, functools.partial(_awake, build))
    for kind, names in TIMM.items():
        for name in names.split():
            build = _small(functools.partial(_timm, name))
            found[f"timm/{name}"] = Entry("timm", kind, functools.partial(_awake, build))
    return found
