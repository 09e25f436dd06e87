import dataclasses
from pathlib import Path

import pytest

from fx_actcomp.options import COMPILERS, REPORT_SUFFIXES, Settings, disabled, parse_options
from fx_actcomp.policy import POLICIES, Policy

OPTIONS = ["policy", "overrides", "min_bytes", "compiler", "mode", "inductor", "report", "strict"]
MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("options", [None, {}])
def test_the_defaults(options):
    settings = parse_options(options)
    assert settings == Settings()
    assert settings.policy == POLICIES["int8"]
    assert settings.min_bytes == 65536
    assert settings.compiler == "inductor"
    assert settings.overrides == ()
    assert settings.inductor == {}
    assert settings.report is None
    assert not settings.strict


def test_every_option_is_read():
    settings = parse_options({
        "policy": "int4", "overrides": {"head": None}, "min_bytes": 0, "compiler": "aot_eager", "mode": "default",
        "inductor": {"max_fusion_size": 8}, "report": "report.json", "strict": True,
    })  # fmt: skip
    assert settings == Settings(
        POLICIES["int4"], (("head", "none"),), 0, "aot_eager", {"max_fusion_size": 8}, Path("report.json"), True
    )


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().min_bytes = 0


def test_options_are_not_changed():
    options = {"overrides": {"head": None}, "inductor": {}}
    parse_options(options, mode="max-autotune")
    assert options == {"overrides": {"head": None}, "inductor": {}}


def test_an_unknown_option_lists_what_there_is():
    with pytest.raises(ValueError, match="unknown option 'polcy'") as caught:
        parse_options({"polcy": "int4"})
    assert all(name in str(caught.value) for name in OPTIONS)


def test_an_unknown_policy_lists_what_there_is():
    with pytest.raises(ValueError, match="unknown policy 'int5'") as caught:
        parse_options({"policy": "int5"})
    assert all(name in str(caught.value) for name in [*POLICIES, ".toml", ".json"])


def test_a_policy_may_be_a_policy_or_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('values = "int4"')
    assert parse_options({"policy": path}).policy == parse_options({"policy": Policy("mine", "int4")}).policy


def test_an_unknown_codec_in_an_override_lists_what_there_is():
    with pytest.raises(ValueError, match=r"unknown codec 'int5'; there are: .*int4.*int8.*None"):
        parse_options({"overrides": {"head": "int5"}})


def test_no_overrides_may_be_none():
    assert parse_options({"overrides": None}).overrides == ()


def test_an_unknown_compiler_lists_what_there_is():
    with pytest.raises(ValueError, match="option 'compiler' is 'eager'") as caught:
        parse_options({"compiler": "eager"})
    assert all(name in str(caught.value) for name in COMPILERS)


def test_an_unknown_mode_lists_what_there_is():
    with pytest.raises(ValueError, match="option 'mode' is 'fast'") as caught:
        parse_options({"mode": "fast"})
    assert all(mode in str(caught.value) for mode in MODES)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_inductors_is_known(mode):
    assert parse_options({"mode": mode}) == parse_options(None, mode=mode)


def test_a_mode_is_patches_of_inductors():
    assert parse_options({"mode": "max-autotune"}).inductor["max_autotune"] is True


def test_a_patch_wins_over_the_mode():
    options = {"mode": "max-autotune", "inductor": {"max_autotune": False}}
    assert parse_options(options).inductor["max_autotune"] is False


def test_the_mode_in_the_options_wins():
    assert parse_options({"mode": "default"}, mode="max-autotune").inductor == {}


def test_another_partitioner_is_refused():
    with pytest.raises(ValueError, match="custom_partitioner_fn, which is how this backend works; remove it"):
        parse_options({"inductor": {"custom_partitioner_fn": object()}})


@pytest.mark.parametrize("report", ["report.pdf", "report"])
def test_an_unknown_kind_of_report_lists_what_there_is(report):
    with pytest.raises(ValueError, match="option 'report' is") as caught:
        parse_options({"report": report})
    assert all(suffix in str(caught.value) for suffix in REPORT_SUFFIXES)


@pytest.mark.parametrize("suffix", REPORT_SUFFIXES)
def test_every_kind_of_report_is_taken(suffix):
    assert parse_options({"report": f"a/b{suffix}"}).report == Path(f"a/b{suffix}")
    assert parse_options({"report": Path(f"a/b{suffix}")}).report == Path(f"a/b{suffix}")


def test_bytes_below_zero_are_refused():
    with pytest.raises(ValueError, match="option 'min_bytes' is -1; expected 0 or more"):
        parse_options({"min_bytes": -1})


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("policy", 8, "str or dict or PathLike or Policy"),
        ("policy", None, "str or dict or PathLike or Policy"),
        ("min_bytes", "64k", "int"),
        ("min_bytes", 1.5, "int"),
        ("min_bytes", True, "int"),
        ("compiler", None, "str"),
        ("mode", 3, "str or NoneType"),
        ("inductor", [("a", 1)], "dict"),
        ("strict", 1, "bool"),
        ("strict", "yes", "bool"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_is_expected(key, given, expected):
    with pytest.raises(TypeError) as caught:
        parse_options({key: given})
    assert str(caught.value) == f"option {key!r} is {given!r}; expected {expected}"


def test_overrides_of_the_wrong_type_say_what_is_expected():
    with pytest.raises(TypeError, match="expected a dict such as"):
        parse_options({"overrides": ["head"]})


def test_a_report_of_the_wrong_type_says_what_is_expected():
    with pytest.raises(TypeError, match="option 'report' is True; expected a path"):
        parse_options({"report": True})


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "on"])
def test_the_environment_turns_us_off(monkeypatch, value):
    monkeypatch.setenv("ACTCOMP_DISABLE", value)
    assert disabled()


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "off"])
def test_the_environment_leaves_us_on(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("ACTCOMP_DISABLE", value)
    assert not disabled()
