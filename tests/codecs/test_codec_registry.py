import dataclasses

import pytest
import torch
from torch import nn

import fx_actcomp
from fx_actcomp.codecs import CODECS, Codec, Layout, Traits, codec_named, codec_spec, register_codec

pytestmark = pytest.mark.usefixtures("codecs_as_they_were")


SPELLED = [
    ("int4:group=128", {"codec": "int4", "group": 128}),
    ("int4:group=128,rounding=stochastic", {"codec": "int4", "rounding": "stochastic", "group": 128}),
    ("fp8:format=e5m2", {"codec": "fp8", "format": "e5m2"}),
    ("pool2:means=int8", {"means": "int8", "codec": "pool2"}),
    ("division:side=4", {"codec": "division", "side": 4}),
]


@pytest.mark.parametrize(("name", "data"), SPELLED)
def test_parameters_in_a_name_and_in_a_dict_give_equal_codecs_and_one_spelling(name, data):
    assert codec_spec(data) == codec_spec(name) == name == codec_named(name).name
    assert codec_named(codec_spec(data)) == codec_named(name)
    for key, value in data.items():
        assert key == "codec" or getattr(codec_named(name), key) == value


def test_parameters_leave_the_codec_of_that_name_as_it_was():
    assert codec_named("int4:group=128").group == 128
    assert codec_named("int4").group == 256
    assert codec_named("int4:group=128") != codec_named("int4")


@pytest.mark.parametrize("spec", ["int4", "int4:", "int4:group=256", "int4:rounding=nearest,group=256", {"codec": "int4"}])
def test_defaults_are_left_out_of_the_spelling(spec):
    assert codec_spec(spec) == "int4"
    assert codec_spec({"codec": "fp8", "format": "e4m3fn", "group": 64}) == "fp8:group=64"


def test_spaces_and_order_do_not_change_the_spelling():
    assert codec_spec("int4: rounding = stochastic , group = 128") == "int4:group=128,rounding=stochastic"


def test_an_unknown_codec_lists_the_codecs():
    for given in ("int5", "int5:group=1", {"codec": "int5"}):
        with pytest.raises(ValueError, match="unknown codec 'int5'") as caught:
            codec_spec(given)
        assert all(name in str(caught.value) for name in CODECS)


@pytest.mark.parametrize("given", ["int4:grup=128", {"codec": "int4", "grup": 128}, "int4:bits=2", "int4:name=x"])
def test_an_unknown_parameter_lists_the_parameters_and_their_defaults(given):
    with pytest.raises(ValueError, match=r"codec 'int4' has no parameter .*group=256, rounding=nearest"):
        codec_spec(given)


def test_a_codec_without_parameters_says_so():
    with pytest.raises(ValueError, match=r"codec 'bits' has no parameter 'group'; there are .*: none"):
        codec_named("bits:group=2")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("int4:group=many", "parameter 'group' is 'many'; expected int"),
        ("int4:group", "parameter 'group' is ''; expected int"),
        ("int4:group=1.5", "parameter 'group' is '1.5'; expected int"),
        ("int4:group=0", "group is 0; expected 1 or more"),
        ("int4:rounding=up", "rounding is 'up'; there are: nearest, stochastic"),
        ("fp8:format=e3m4", "format is 'e3m4'; there are: e4m3fn, e5m2"),
        ("pool2:means=int4", "means is 'int4'; there are: exact, int8"),
    ],
)
def test_a_value_that_does_not_suit_says_what_does(given, says):
    with pytest.raises(ValueError, match=says):
        codec_named(given)


@pytest.mark.parametrize("given", [{}, {"group": 128}, {"codec": 4}])
def test_a_dict_without_a_codec_is_refused_with_an_example(given):
    with pytest.raises(TypeError, match=r"expected a dict with the key 'codec'"):
        codec_spec(given)


def test_a_parameter_that_is_no_number_or_string_is_refused():
    with pytest.raises(TypeError, match=r"parameter 'group' is \[128\]; expected a number or a string"):
        codec_spec({"codec": "int4", "group": [128]})


class Half(Codec):
    """Saves in float16; the smallest codec there is."""

    name = "half"
    bits = 11

    def fits(self, layout, traits):  # noqa: ARG002
        return None if layout.dtype is torch.float32 else "not float32"

    def compress(self, x, traits):  # noqa: ARG002
        return (Layout.of(x).to_memory(x).half(),)

    def decompress(self, parts, layout, traits):  # noqa: ARG002
        return layout.from_memory(parts[0].to(layout.dtype))


def test_a_registered_class_is_a_codec_by_name():
    assert register_codec(Half) is Half
    assert isinstance(codec_named("half"), Half)
    with pytest.raises(ValueError, match=r"has no parameter 'group'; there are .*: none"):
        codec_named("half:group=2")


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name_is_a_field", [True, False])
def test_a_registered_dataclass_has_its_fields_as_parameters(frozen, name_is_a_field):
    fields = [("share", float, 0.5), ("side", int, 4), ("mode", str, "a"), ("centred", bool, False)]
    if name_is_a_field:
        fields = [("name", str, "sized"), ("bits", int, 4), *fields]
    made = dataclasses.make_dataclass("Sized", fields, bases=(Half,), frozen=frozen)
    made.name = "sized"
    register_codec(made)
    codec = codec_named("sized:side=8,centred=true,share=0.25")
    assert (codec.share, codec.side, codec.mode, codec.centred) == (0.25, 8, "a", True)
    assert codec.name == codec_spec({"codec": "sized", "centred": True, "side": 8, "share": 0.25})
    assert (codec_named("sized").share, codec_named("sized").centred) == (0.5, False)
    assert codec_named(codec.name).side == 8
    with pytest.raises(ValueError, match="parameter 'centred' is 'maybe'; expected bool"):
        codec_named("sized:centred=maybe")


def test_values_that_the_dataclass_refuses_are_refused_with_its_reason():
    @dataclasses.dataclass
    class Picky(Half):
        side: int = 4

        def __post_init__(self):
            if self.side % 2:
                raise ValueError("side must be even")

    Picky.name = "picky"
    register_codec(Picky)
    with pytest.raises(ValueError, match="codec 'picky:side=3': side must be even"):
        codec_named("picky:side=3")


@pytest.mark.parametrize("given", [Half(), "half", dict, None])
def test_what_is_no_codec_class_is_refused(given):
    with pytest.raises(TypeError, match=r"takes a class that inherits from fx_actcomp.Codec"):
        register_codec(given)


def test_an_unfinished_class_is_refused():
    class Unfinished(Codec):
        name, bits = "unfinished", 4

    with pytest.raises(TypeError, match="abstract"):
        register_codec(Unfinished)
    assert "unfinished" not in CODECS


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a=b", "*", "4bit", None, "-a"])
def test_a_name_that_is_no_word_is_refused(name):
    with pytest.raises(ValueError, match=r"expected a word of letters, digits"):
        register_codec(type("Named", (Half,), {"name": name}))


def test_a_class_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"Nameless.name is None"):
        register_codec(type("Nameless", (Codec,), {key: vars(Half)[key] for key in ("fits", "compress", "decompress", "bits")}))


@pytest.mark.parametrize("name", ["int4", "bits", "none", "lossless", "fp8", "division"])
def test_a_name_of_ours_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=f"the name '{name}' is taken; there are: bits, .*division"):
        register_codec(type("Named", (Half,), {"name": name}))
    assert not isinstance(CODECS.get(name), Half)


@pytest.mark.parametrize("bits", [0, -1, "4", 2.5])
def test_bits_that_are_no_number_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"expected the bits of precision it keeps, or None where lossless"):
        register_codec(type("Named", (Half,), {"bits": bits}))


def test_registering_again_replaces():
    register_codec(Half)
    again = register_codec(type("Half", (Half,), {}))
    assert type(codec_named("half")) is again


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """DropIT: the largest values and where they are; the rest is zero."""

    name: str = "topk"
    bits: int = 1
    keep: float = 0.1

    def fits(self, layout, traits):  # noqa: ARG002
        return None if layout.dtype.is_floating_point and layout.shape else "not floating-point values"

    def compress(self, x, traits):  # noqa: ARG002
        flat = Layout.of(x).to_memory(x).flatten()
        where = flat.abs().topk(int(flat.numel() * self.keep)).indices
        return flat[where], where.to(torch.int32)

    def decompress(self, parts, layout, traits):  # noqa: ARG002
        values, where = parts
        sizes = [layout.shape[d] for d in layout.order]
        flat = values.new_zeros(torch.Size(sizes).numel()).scatter(0, where.long(), values)
        return layout.from_memory(flat.view(sizes))


class Mlp(nn.Module):
    def __init__(self, mark=None):
        super().__init__()
        self.up, self.down, self.mark = nn.Linear(32, 64), nn.Linear(64, 8), mark

    def forward(self, x):
        if self.mark is None:
            return self.down(torch.relu(self.up(x)))
        with fx_actcomp.annotate(self.mark):
            h = torch.relu(self.up(x))
        return self.down(h)


WAYS = {
    "policy": ("topk", {"policy": "topk"}, None, 0.1),
    "policy with parameters": ("topk:keep=0.2", {"policy": {"codec": "topk", "keep": 0.2}}, None, 0.2),
    "override": ("topk", {"policy": "none", "overrides": {"*": "topk"}}, None, 0.1),
    "override with parameters": ("topk:keep=0.2", {"policy": "none", "overrides": {"*": "topk:keep=0.2"}}, None, 0.2),
    "annotation": ("topk", {"policy": "none"}, "topk", 0.1),
    "annotation with parameters": ("topk:keep=0.2", {"policy": "none"}, {"codec": "topk", "keep": 0.2}, 0.2),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_codec_of_one_s_own_gives_its_gradient_and_its_row_in_the_report(way):
    register_codec(TopK)
    name, asked, mark, keep = WAYS[way]
    model, x = Mlp(mark), torch.randn(40, 32)
    call = torch.compile(model, backend="actcomp", options={"compiler": "aot_eager", "min_bytes": 0, "strict": True, **asked})
    y = call(x)
    y.square().mean().backward()

    with torch.no_grad():
        h = torch.relu(x.double() @ model.up.weight.double().T + model.up.bias.double())
        out = h @ model.down.weight.double().T + model.down.bias.double()
        threshold = h.flatten().sort(descending=True).values[int(h.numel() * keep) - 1]
        kept = torch.where(h >= threshold, h, 0.0)
        dy = 2 * out / out.numel()
        du = (dy @ model.down.weight.double()) * (h > 0)
    assert torch.allclose(model.down.weight.grad.double(), dy.T @ kept, atol=1e-7)
    assert not torch.allclose(model.down.weight.grad.double(), dy.T @ h, atol=1e-4)
    assert torch.allclose(model.up.weight.grad.double(), du.T @ x.double(), atol=1e-7)

    (row,) = [row for row in fx_actcomp.report(call).saved if row.kind == "activation"]
    assert row.codec.startswith(name)
    assert row.bytes_after == int(h.numel() * keep) * 8


def test_a_dataclass_that_can_t_be_hashed_works_too():
    methods = {key: vars(TopK)[key] for key in ("fits", "compress", "decompress")}
    fields = [("name", str, "topk"), ("bits", int, 1), ("keep", float, 0.1)]
    register_codec(dataclasses.make_dataclass("Mutable", fields, bases=(Codec,), namespace=methods))
    found = fx_actcomp.explain(Mlp(), torch.randn(40, 32), policy="topk:keep=0.2", compiler="aot_eager", min_bytes=0)
    (row,) = [row for row in found.saved if row.kind == "activation"]
    assert (row.codec, row.bytes_after) == ("topk:keep=0.2", 512 * 8)
    with pytest.raises(TypeError, match="unhashable"):
        hash(codec_named("topk"))


def test_a_wrong_annotation_says_what_there_is():
    for mark, says in [
        ({"codec": "int5"}, "fx_actcomp.annotate: unknown codec 'int5'; there are: bits"),
        ({"codec": "int4", "grup": 1}, "fx_actcomp.annotate: codec 'int4' has no parameter 'grup'; there are"),
        ("int4:group=x", "parameter 'group' is 'x'; expected int"),
    ]:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=says):
            fx_actcomp.explain(Mlp(mark), torch.randn(40, 32), compiler="aot_eager")


def test_traits_tell_nothing_of_their_noise():
    assert Traits(noise=object()) == Traits()
