import pytest

from fx_actcomp.codecs import CODECS
from fx_actcomp.overrides import check_codec, find_override, parse_overrides
from fx_actcomp.policy import POLICIES
from fx_actcomp.records import Kind, SavedActivation


def saved(module, op="aten.mm"):
    return SavedActivation(0, "mm", module, op, "", (4,), "float32", 16, Kind.ACTIVATION, "mm", ())


def codec_for(overrides, module, op="aten.mm"):
    found = find_override(parse_overrides(overrides), saved(module, op))
    return found[1] if found else None


def test_an_exact_name_matches_its_module():
    assert codec_for({"layers.0.attn": "int4"}, "layers.0.attn") == "int4"


def test_an_exact_name_covers_the_modules_inside():
    assert codec_for({"layers.0": "int4"}, "layers.0.attn.qkv") == "int4"


def test_an_exact_name_does_not_cover_a_longer_name():
    assert codec_for({"layers.1": "int4"}, "layers.10") is None


def test_nothing_matches_nothing():
    assert codec_for({}, "layers.0") is None
    assert codec_for({"head": "int4"}, "layers.0") is None


@pytest.mark.parametrize("pattern", ["layers.*", "*.attn", "layers.?.attn", "layers.[0-3].attn", "*"])
def test_globs(pattern):
    assert codec_for({pattern: "int4"}, "layers.2.attn") == "int4"


def test_globs_mind_case():
    assert codec_for({"Layers.*": "int4"}, "layers.0") is None


def test_a_glob_is_of_the_whole_name():
    assert codec_for({"*.attn": "int4"}, "layers.0.attn.qkv") is None


@pytest.mark.parametrize("pattern", [r"re:attn", r"re:layers\.\d+\.", r"re:^layers", r"re:(attn|mlp)$"])
def test_regular_expressions_are_searched_for(pattern):
    assert codec_for({pattern: "int4"}, "layers.12.attn") == "int4"


def test_regular_expressions_mind_their_anchors():
    assert codec_for({"re:^attn": "int4"}, "layers.12.attn") is None


@pytest.mark.parametrize("op", ["aten.gelu", "gelu"])
@pytest.mark.parametrize("module", ["layers.0", "layers.*", r"re:layers\.\d", "*"])
def test_an_operator_narrows_any_kind_of_pattern(module, op):
    overrides = {f"{module}::{op}": "int4"}
    assert codec_for(overrides, "layers.0", "aten.gelu") == "int4"
    assert codec_for(overrides, "layers.0", "aten.mm") is None


def test_an_operator_alone_is_one_at_top_level():
    assert codec_for({"::aten.gelu": "int4"}, "", "aten.gelu") == "int4"
    assert codec_for({"::aten.gelu": "int4"}, "", "aten.mm") is None


def test_a_pattern_may_be_copied_from_a_report():
    item = saved("layers.0", "aten.gelu")
    assert find_override(parse_overrides({item.target: "int4"}), item) == ("layers.0::aten.gelu", "int4")


@pytest.mark.parametrize("order", [1, -1])
def test_exact_comes_before_re_before_glob_in_any_order(order):
    pairs = [("layers.0.attn", "int8"), ("re:attn", "int4"), ("layers.*", "lossless")]
    overrides = dict(pairs[::order])
    assert codec_for(overrides, "layers.0.attn") == "int8"
    assert codec_for(overrides, "layers.1.attn") == "int4"
    assert codec_for(overrides, "layers.1.mlp") == "lossless"


@pytest.mark.parametrize("patterns", [("layers.*", "*.attn"), ("*.attn", "layers.*"), ("re:attn", "re:layers"), ("re:l", "re:a")])
def test_within_a_kind_the_first_wins(patterns):
    first, second = patterns
    assert codec_for({first: "int4", second: "int8"}, "layers.0.attn") == "int4"


@pytest.mark.parametrize("order", [1, -1])
def test_among_exact_names_the_innermost_wins(order):
    overrides = dict([("layers", "int8"), ("layers.0.attn", "int4"), ("layers.0", "lossless")][::order])
    assert codec_for(overrides, "layers.0.attn.qkv") == "int4"
    assert codec_for(overrides, "layers.0.mlp") == "lossless"
    assert codec_for(overrides, "layers.1") == "int8"


def test_none_leaves_alone():
    assert codec_for({"head": None, "*": "int4"}, "head") == "none"


def test_the_pair_that_applied_is_told():
    assert find_override(parse_overrides({"layers.*": "int4"}), saved("layers.0")) == ("layers.*", "int4")


def test_overrides_keep_the_users_order():
    assert parse_overrides({"b": "int8", "a": None}) == (("b", "int8"), ("a", "none"))


@pytest.mark.parametrize("codec", [*CODECS, *POLICIES])
def test_every_codec_and_policy_may_be_asked_for(codec):
    assert parse_overrides({"head": codec}) == (("head", codec),)


def test_an_unknown_codec_lists_what_there_is():
    with pytest.raises(ValueError, match="unknown codec 'int5'") as caught:
        parse_overrides({"head": "int5"})
    message = str(caught.value)
    assert "'head'" in message
    assert all(name in message for name in [*CODECS, *POLICIES, "None"])


@pytest.mark.parametrize("codec", [4, True, ["int4"], {}])
def test_a_codec_that_is_no_name_is_refused(codec):
    with pytest.raises(TypeError, match=r"expected a codec's name, a dict such as|expected a dict with the key 'codec'"):
        parse_overrides({"head": codec})


@pytest.mark.parametrize("given", ["int4", ["head"], 3, None])
def test_what_is_no_dict_is_refused_with_an_example(given):
    with pytest.raises(TypeError, match="expected a dict such as"):
        parse_overrides(given)


@pytest.mark.parametrize("pattern", [3, None, ""])
def test_what_is_no_pattern_is_refused_with_what_there_is(pattern):
    with pytest.raises(TypeError, match=r"expected a module name, a glob, 're:...' or 'module::aten.op'"):
        parse_overrides({pattern: "int4"})


@pytest.mark.parametrize("pattern", ["re:(", "re:[::aten.mm", "re:*"])
def test_a_broken_regular_expression_is_refused_with_the_cause(pattern):
    with pytest.raises(ValueError, match="not a regular expression") as caught:
        parse_overrides({pattern: "int4"})
    assert repr(pattern) in str(caught.value)


def test_check_codec_says_where():
    with pytest.raises(ValueError, match=r"^annotate: unknown codec 'x'"):
        check_codec("x", "annotate")
    assert check_codec(None, "annotate") == "none"


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ({"codec": "int4", "group": 128}, "int4:group=128"),
        ("int4:rounding=stochastic,group=64", "int4:group=64,rounding=stochastic"),
        ({"codec": "pool2", "means": "int8"}, "pool2:means=int8"),
        ({"codec": "int4", "group": 256}, "int4"),
        ("fp8:format=e4m3fn", "fp8"),
    ],
)
def test_a_codec_with_parameters_has_one_spelling(given, spelled):
    assert parse_overrides({"head": given}) == (("head", spelled),)
    assert codec_for({"*": given}, "head") == spelled
    assert check_codec(given, "here") == spelled


@pytest.mark.parametrize("given", ["int5:group=1", {"codec": "int5"}])
def test_an_unknown_codec_with_parameters_lists_what_there_is(given):
    with pytest.raises(ValueError, match="override 'head': unknown codec 'int5'") as caught:
        parse_overrides({"head": given})
    assert all(name in str(caught.value) for name in [*CODECS, *POLICIES, "None"])


@pytest.mark.parametrize("given", ["int4:grup=1", {"codec": "int4", "grup": 1}])
def test_an_unknown_parameter_says_where_and_lists_what_there_is(given):
    with pytest.raises(ValueError, match=r"^override 'head': codec 'int4' has no parameter 'grup'.*group=256, rounding=nearest"):
        parse_overrides({"head": given})


@pytest.mark.parametrize("given", ["int4:group=x", {"codec": "int4", "rounding": "up"}, "fp8:format=e3m4"])
def test_a_value_that_does_not_suit_says_where(given):
    with pytest.raises(ValueError, match=r"^override 'head': .*(expected int|there are: )"):
        parse_overrides({"head": given})


def test_a_preset_without_a_codec_takes_no_parameters():
    for name in ("none:group=1", "lossless:group=1"):
        with pytest.raises(ValueError, match=r"unknown codec '(none|lossless)'"):
            parse_overrides({"head": name})
