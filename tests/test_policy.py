import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_actcomp.codecs import CODECS
from fx_actcomp.policy import POLICIES, Policy, policy_named

LOSSY = [name for name, codec in CODECS.items() if codec.bits is not None]
LOSSLESS = [name for name, codec in CODECS.items() if codec.bits is None]
property_test = settings(max_examples=50, deadline=None, derandomize=True)
policies = st.builds(
    Policy,
    st.text(),
    st.one_of(st.none(), st.sampled_from(LOSSY)),
    st.booleans(),
    st.lists(st.sampled_from(LOSSY), unique=True).map(tuple),
)


@property_test
@given(policies)
def test_a_policy_goes_to_a_dict_and_back(policy):
    assert Policy.from_dict(policy.to_dict()) == policy


@property_test
@given(policies)
def test_a_policy_goes_to_json_and_back(policy):
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@property_test
@given(policies, policies)
def test_policies_are_equal_where_their_parts_are(one, other):
    assert (one == other) == (one.to_dict() == other.to_dict())
    assert one != other or hash(one) == hash(other)


def test_policies_that_differ_are_not_equal():
    policy = Policy("mine", "int4")
    assert policy != dataclasses.replace(policy, exact=False)
    assert policy != dataclasses.replace(policy, fallbacks=())
    assert policy != dataclasses.replace(policy, values=None)
    assert policy != dataclasses.replace(policy, name="yours")


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES["int8"].values = "int4"


def test_a_policy_prints_its_parts():
    assert (
        repr(Policy("mine", "int4"))
        == "Policy(name='mine', values='int4', exact=True, fallbacks=('int8',), images=False, invert=False)"
    )


@pytest.mark.parametrize("name", POLICIES)
def test_presets_are_found_by_name(name):
    assert policy_named(name) is POLICIES[name]
    assert POLICIES[name].name == name


def test_none_changes_nothing_and_lossless_no_value():
    assert POLICIES["none"].values is None
    assert not POLICIES["none"].exact
    assert POLICIES["lossless"].values is None
    assert POLICIES["lossless"].exact


def test_a_policy_is_itself():
    policy = Policy("mine", "int4")
    assert policy_named(policy) is policy


def test_an_unknown_preset_lists_what_there_is():
    with pytest.raises(ValueError, match="unknown policy 'int5'") as caught:
        policy_named("int5")
    assert all(name in str(caught.value) for name in [*POLICIES, "a Policy", ".toml", ".json"])


def test_a_toml_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('values = "int4"\nexact = false\nfallbacks = ["int8"]\n')
    assert policy_named(path) == policy_named(str(path)) == Policy("mine", "int4", exact=False)


def test_a_json_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(Policy("named", "int8", fallbacks=()).to_dict()))
    assert policy_named(path) == Policy("named", "int8", fallbacks=())


def test_a_file_with_nothing_in_it_has_the_defaults(tmp_path):
    path = tmp_path / "empty.toml"
    path.touch()
    assert policy_named(path) == Policy("empty")


@pytest.mark.parametrize("name", ["broken.toml", "broken.json"])
def test_a_broken_file_says_which_and_why(tmp_path, name):
    path = tmp_path / name
    path.write_text("values = [")
    with pytest.raises(ValueError, match="can't be read") as caught:
        policy_named(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('["int4"]')
    with pytest.raises(ValueError, match="holds list; expected a table with the keys of a policy"):
        policy_named(path)


def test_a_missing_file_is_missing():
    with pytest.raises(FileNotFoundError, match=r"nowhere.toml"):
        policy_named("nowhere.toml")
    with pytest.raises(FileNotFoundError, match=r"nowhere.json"):
        policy_named(Path("nowhere.json"))


@pytest.mark.parametrize("suffix", [".yaml", ""])
def test_another_kind_of_file_lists_what_there_is(tmp_path, suffix):
    path = tmp_path / f"policy{suffix}"
    path.touch()
    with pytest.raises(ValueError, match=r"or a path to a .toml or .json file"):
        policy_named(path)


def test_an_unknown_key_lists_what_there_is():
    with pytest.raises(ValueError, match="unknown policy key 'value'") as caught:
        Policy.from_dict({"value": "int4"})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(Policy))


@pytest.mark.parametrize(
    ("key", "given_here", "expected"),
    [
        ("name", 3, "str"),
        ("values", 4, "str or dict or NoneType"),
        ("exact", "yes", "bool"),
        ("exact", 1, "bool"),
        ("fallbacks", "int8", "list or tuple"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_is_expected(key, given_here, expected):
    with pytest.raises(ValueError, match=f"policy key '{key}' is {given_here!r}; expected {expected}$"):
        Policy.from_dict({key: given_here})


@pytest.mark.parametrize("data", [{"values": "int5"}, {"fallbacks": ["int5"]}, {"fallbacks": [8]}])
def test_an_unknown_codec_lists_the_codecs(data):
    with pytest.raises(ValueError, match="unknown codec") as caught:
        Policy.from_dict(data)
    assert all(name in str(caught.value) for name in CODECS)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_a_codec_for_masks_is_refused_for_values_with_those_there_are(codec):
    for make in (lambda: Policy("mine", codec), lambda: Policy("mine", fallbacks=(codec,))):
        with pytest.raises(ValueError, match=f"codec '{codec}' is for masks and indices") as caught:
            make()
        assert all(name in str(caught.value) for name in LOSSY)


PARAMETERS = [
    ("int4:group=128", {"codec": "int4", "group": 128}),
    ("int8:rounding=stochastic", {"codec": "int8", "rounding": "stochastic"}),
    ("fp8:format=e5m2", {"codec": "fp8", "format": "e5m2"}),
    ("int1:group=512", {"codec": "int1", "group": 512}),
]
by_parameters = pytest.mark.parametrize(("spec", "data"), PARAMETERS)


@by_parameters
def test_a_codec_with_parameters_is_a_policy_by_name_and_by_dict(spec, data):
    policy = policy_named(spec)
    assert policy == policy_named(data)
    assert (policy.name, policy.values, policy.exact) == (spec, spec, True)


@by_parameters
def test_a_policy_keeps_the_one_spelling_of_its_codecs(spec, data):
    policy = Policy("mine", data, fallbacks=(data, "int8:group=256"))
    assert policy == Policy("mine", spec, fallbacks=(spec, "int8"))
    assert (policy.values, policy.fallbacks) == (spec, (spec, "int8"))
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert hash(policy) == hash(Policy("mine", spec, fallbacks=(spec, "int8")))


@by_parameters
def test_files_hold_parameters_by_name_and_by_dict(tmp_path, spec, data):
    toml, js = tmp_path / "mine.toml", tmp_path / "mine.json"
    toml.write_text(f'values = "{spec}"\n')
    js.write_text(json.dumps({"values": data, "fallbacks": [data]}))
    assert policy_named(toml) == Policy("mine", spec)
    assert policy_named(js) == Policy("mine", spec, fallbacks=(spec,))


def test_a_preset_with_parameters_keeps_the_rest_of_the_preset():
    assert policy_named("pool2:means=int8") == Policy("pool2:means=int8", "pool2:means=int8", fallbacks=())


@pytest.mark.parametrize("spec", ["int8:group=256", {"codec": "int8"}, {"codec": "int8", "rounding": "nearest"}, "int8:"])
def test_a_preset_whose_parameters_are_the_defaults_is_that_preset(spec):
    assert policy_named(spec) is POLICIES["int8"]


def test_a_codec_that_is_no_preset_is_a_policy_of_its_own():
    assert policy_named("int1") == Policy("int1", "int1")
    assert policy_named({"codec": "bits"}) == Policy("bits")


@pytest.mark.parametrize("given_here", ["int4:grup=1", {"codec": "int4", "grup": 1}])
def test_an_unknown_parameter_of_a_policy_lists_what_there_is(given_here):
    for make in (lambda: policy_named(given_here), lambda: Policy("mine", given_here)):
        with pytest.raises(ValueError, match=r"no parameter 'grup'; there are .*group=256, rounding=nearest"):
            make()


def test_a_dict_that_is_no_codec_s_is_refused_with_an_example():
    with pytest.raises(TypeError, match="expected a dict with the key 'codec'"):
        policy_named({"values": "int4"})
