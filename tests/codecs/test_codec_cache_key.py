import importlib.util
import sys

import pytest

from fx_actcomp.codecs import codec_sources
from fx_actcomp.options import parse_options
from fx_actcomp.partition import ActcompPartitioner

pytestmark = pytest.mark.usefixtures("codecs_as_they_were")


def key(**options):
    return ActcompPartitioner(parse_options(options)).uuid()


def test_the_cache_key_differs_with_parameters_and_not_with_their_spelling():
    specs = ["int4", "int4:group=128", "int4:rounding=stochastic", "int4:group=128,rounding=stochastic"]
    assert len({key(policy=spec) for spec in specs}) == len(specs)
    assert len({key(overrides={"a": spec}) for spec in specs}) == len(specs)
    assert key(policy={"codec": "int4", "group": 128}) == key(policy="int4:group=128")
    assert key(overrides={"a": "int4:group=256"}) == key(overrides={"a": "int4"})


SOURCE = """
import torch
from fx_actcomp import Codec, Layout, register_codec

@register_codec
class Mine(Codec):
    name, bits = "mine", 8
    def fits(self, layout, traits): return None
    def compress(self, x, traits): return (x.to({dtype}),)
    def decompress(self, parts, layout, traits): return layout.restore(parts[0].to(layout.dtype))
"""


def load(path, monkeypatch):
    spec = importlib.util.spec_from_file_location("users_codec", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "users_codec", module)
    spec.loader.exec_module(module)


def test_the_cache_key_changes_with_the_file_that_defines_a_codec_where_it_is_asked_for(tmp_path, monkeypatch):
    path, seen, others = tmp_path / "users_codec.py", [], []
    for text in (SOURCE.format(dtype="torch.float16"), SOURCE.format(dtype="torch.bfloat16") + "# longer\n"):
        path.write_text(text)
        load(path, monkeypatch)
        seen.append((codec_sources(["mine"]), key(policy="mine"), key(overrides={"a": "mine"})))
        others.append((codec_sources(["int4"]), key(policy="int4")))
    assert all(one != other for one, other in zip(*seen, strict=True))
    assert others[0] == others[1]
    assert codec_sources(["int4", "fp8:format=e5m2"]) == ()


def typed(source):
    """What tells a codec apart that was typed into a prompt, or stands in a notebook."""
    exec(source, {"__name__": "__console__"})
    return codec_sources(["mine"])


TYPED = SOURCE.format(dtype="torch.float16")
OTHERS = {
    "a number": TYPED + "    def contracts(self, traits): return 3 > 5\n",
    "a type": SOURCE.format(dtype="torch.bfloat16"),
    "a method": TYPED.replace(".to(torch.float16)", ".half()"),
    "another method": TYPED.replace(".to(torch.float16)", ".bfloat16()"),
    "an attribute": TYPED.replace('name, bits = "mine", 8', 'name, bits, side = "mine", 8, 4'),
    "another attribute": TYPED.replace('name, bits = "mine", 8', 'name, bits, side = "mine", 8, 2'),
}
for dtype in ("float16", "bfloat16"):
    OTHERS[f"an attribute of {dtype}"] = TYPED.replace('"mine", 8', f'"mine", 8; kind = torch.{dtype}')
    OTHERS[f"an argument of {dtype}"] = TYPED + f"    def more(self, kind=torch.{dtype}): return kind\n"
DATACLASS = TYPED.replace("@register_codec", "from dataclasses import dataclass\n@register_codec\n@dataclass")
for n in (2, 4):
    fields = f'name: str = "mine"\n    bits: int = 8\n    side: int = {n}'
    OTHERS[f"a default of {n}"] = DATACLASS.replace('name, bits = "mine", 8', fields)


@pytest.mark.parametrize(("one", "other"), [
    ("a number", "a type"),
    ("a type", "a method"),
    ("a method", "another method"),
    ("an attribute", "another attribute"),
    ("a default of 2", "a default of 4"),
    ("an attribute of float16", "an attribute of bfloat16"),
    ("an argument of float16", "an argument of bfloat16"),
])  # fmt: skip
def test_codecs_typed_into_a_prompt_are_told_apart(one, other):
    assert typed(OTHERS[one]) != typed(OTHERS[other])


BODIES = {
    "plain": "return (x.half(),)",
    "nested": "return tuple([part.half() for part in (x,)])",
    "a function in an argument": "return (lambda y, then=(lambda z: z): then(y.half()),)[0](x),",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_codec_typed_into_a_prompt_again_is_the_same(body):
    source = TYPED.replace("return (x.to(torch.float16),)", body)
    assert body in source
    assert typed(source) == typed(source)
