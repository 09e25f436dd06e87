"""Inductor's caches across processes: what must be answered by them is, what must not be isn't. Real processes, few of them."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fx_actcomp

PACKAGE = Path(fx_actcomp.__file__).parent
BASE = {"policy": "int8", "min_bytes": 0, "strict": True}
CODEC = """
import torch
from fx_actcomp import Codec, register_codec

@register_codec
class Mine(Codec):
    name, bits = "mine", 8
    def fits(self, layout, traits): return None
    def compress(self, x, traits): return (x.to(torch.float16),)
    def decompress(self, parts, layout, traits): return layout.restore(parts[0].to(layout.dtype))
"""


@dataclass(frozen=True)
class Place:
    """Where the processes run: a cache, and copies of the package."""

    folder: Path

    def package(self, name, change=""):
        """A copy of the package in a folder of its own, all files new, one source changed."""
        if not (self.folder / name).exists():
            copied = self.folder / name / PACKAGE.name
            shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
            with open(copied / "plan.py", "a") as file:
                file.write(change)
        return self.folder / name

    def run(self, steps, package, cache="cache", **job):
        """One process."""
        environment = {
            **os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / cache), "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": {"here": "1", "elsewhere": "2"}.get(package.name, "3"),
            "HOME": str(package), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        program = [sys.executable, "-W", "error::UserWarning", Path(__file__).with_name("cache_process.py")]
        done = subprocess.run(
            [*program, json.dumps({"steps": steps, **job})],
            capture_output=True, text=True, env=environment, cwd=self.folder, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not re.search("pickl|bypass|warning", done.stderr, re.IGNORECASE), done.stderr
        told = json.loads(done.stdout)
        assert told["package"] == str(package / PACKAGE.name)
        assert [step["bypassed"] for step in told["steps"]] == [[]] * len(steps)
        return told


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def cold(place):
    return place.run([{"options": {**BASE, "report": "cold.json"}}], place.package("here"), save="artifacts")


VARIANTS = {
    "policy": {"options": {**BASE, "policy": "int4"}},
    "a codec's parameter": {"options": {**BASE, "policy": "int8:group=64"}},
    "an override": {"options": {**BASE, "overrides": {"no.such.layer": "int4"}}},
    "an annotation": {"options": BASE, "annotate": "int8"},
    "another annotation": {"options": BASE, "annotate": "int4"},
    "min_bytes": {"options": {**BASE, "min_bytes": 1}},
    "the content of a policy file": {"options": {**BASE, "policy": "int8.json"}},
    "a user's codec": {"options": {**BASE, "policy": "mine"}, "codec": "one.py"},
    "the source of a user's codec": {"options": {**BASE, "policy": "mine"}, "codec": "other.py"},
}
"""Steps that differ from the first one, or from the one before, in a single thing; most compile to the same code."""


@pytest.fixture(scope="module")
def warm(place, cold):  # noqa: ARG001 - after it
    """Another process, with the package elsewhere, another hash seed and another home: first the same, then all variants."""
    (place.folder / "int8.json").write_text(json.dumps({"values": "int8", "fallbacks": []}))
    (place.folder / "one.py").write_text(CODEC)
    (place.folder / "other.py").write_text(CODEC + "# longer\n")
    steps = [{"options": {**BASE, "report": "warm.json"}}, {"options": BASE, "autograd": False}]
    told = place.run([*steps, *VARIANTS.values()], place.package("elsewhere"))
    return {**told, "variants": dict(zip(VARIANTS, told["steps"][2:], strict=True))}


def hits(step):
    return {name for name, number in step["counted"].items() if "hit" in name and number}


def misses(step):
    return {name for name, number in step["counted"].items() if "miss" in name and number}


def plain(report):
    """A report but for how it was come by."""
    return {key: held for key, held in report.items() if key != "rederived"}


def assert_same(one, other):
    assert one["gradients"] == other["gradients"]
    assert plain(one["report"]) == plain(other["report"])


def test_the_first_process_finds_nothing(cold):
    (first,) = cold["steps"]
    assert not hits(first)
    assert "autograd_cache_miss" in misses(first)
    assert not first["report"]["rederived"]
    assert {row["codec"] for row in first["report"]["saved"] if row["kind"] == "activation"} == {"int8"}


def test_a_second_process_is_answered_by_the_cache_and_right(cold, warm):
    again = warm["steps"][0]
    assert "autograd_cache_hit" in hits(again)
    assert not misses(again)
    assert_same(cold["steps"][0], again)


def test_its_report_is_complete_and_says_that_it_was_made_again(cold, warm):
    assert warm["steps"][0]["report"]["rederived"]
    assert warm["steps"][0]["report"]["saved"] == cold["steps"][0]["report"]["saved"]


@pytest.mark.usefixtures("warm")
def test_its_report_file_is_written_too(place):
    first, again = (json.loads((place.folder / f"{name}.json").read_text()) for name in ("cold", "warm"))
    assert first["saved"]
    assert plain(first) == plain(again)
    assert (first["rederived"], again["rederived"]) == (False, True)


def test_the_graph_cache_alone_answers_and_the_partitioner_runs(cold, warm):
    again = warm["steps"][1]
    assert hits(again) == {"fxgraph_cache_hit"}
    assert not misses(again)
    assert not again["report"]["rederived"]
    assert_same(cold["steps"][0], again)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_change_is_a_miss(warm, name):
    assert not hits(warm["variants"][name])
    assert "autograd_cache_miss" in misses(warm["variants"][name])
    assert not warm["variants"][name]["report"]["rederived"]


def test_a_change_has_its_effect(warm):
    used = {
        name: {row["codec"] for row in step["report"]["saved"] if row["kind"] == "activation"}
        for name, step in warm["variants"].items()
    }
    assert used["policy"] == used["another annotation"] == {"int4"}
    assert used["a user's codec"] == used["the source of a user's codec"] == {"mine"}
    assert used["an override"] == used["an annotation"] == {"int8"}


def test_a_change_of_our_own_sources_is_a_miss(place, cold):
    told = place.run([{"options": BASE}], place.package("changed", "# another version\n"))
    assert not hits(told["steps"][0])
    assert_same(cold["steps"][0], told["steps"][0])
    assert [one == other for one, other in zip(told["keys"], cold["keys"], strict=True)] == [False, False, False, True]


def test_keys_are_the_same_wherever_the_package_lies_and_whatever_the_hash_seed(cold, warm):
    assert cold["keys"] == warm["keys"]
    assert len(set(map(str, cold["keys"]))) == len(cold["keys"])


def test_artifacts_fill_the_cache_of_another_machine(place, cold):
    (same,) = place.run([{"options": BASE}], place.package("elsewhere"), cache="other", load="artifacts")["steps"]
    assert "autograd_cache_hit" in hits(same)
    assert not misses(same)
    assert_same(cold["steps"][0], same)
    assert same["report"]["rederived"]
