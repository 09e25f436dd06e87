"""What comes from outside (policy files, names of modules, stored reports) is data: it runs nothing and breaks nothing."""

import ast
import json
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from test_report import report, row
from torch import nn

import fx_actcomp
from fx_actcomp.policy import policy_named

EAGER = {"compiler": "aot_eager", "min_bytes": 0, "strict": True}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
LOADS_CODE = {"pickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "runpy"}
NASTY = "a\n\x1b[2J\x1b]0;owned\x07\r\x00\u202e\x9b31m{0.__class__}%s<script>alert(1)</script>../../etc/passwd"


def test_no_module_runs_text_or_unpickles():
    for path in Path(fx_actcomp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in RUNS_CODE, (path, node.lineno)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not LOADS_CODE & {name.partition(".")[0] for name in named}, (path, node.lineno)
            if isinstance(node, ast.Attribute):
                assert (getattr(node.value, "id", ""), node.attr) not in {("torch", "load"), ("os", "system")}, (
                    path,
                    node.lineno,
                )


HOSTILE = {
    "yaml.json": "!!python/object/apply:os.system ['touch {proof}']",
    "python.json": "__import__('os').system('touch {proof}')",
    "pickle.json": "cos\nsystem\n(S'touch {proof}'\ntR.",
    "codec.json": "{{\"values\": \"__import__('os').system('touch {proof}')\"}}",
    "parameter.json": "{{\"values\": \"int8:group=__import__('os').system('touch {proof}')\"}}",
    "object.json": '{{"values": {{"codec": "int8", "group": {{"__reduce__": ["os.system", "touch {proof}"]}}}}}}',
    "dunder.json": '{{"__class__": "os.system", "name": "touch {proof}"}}',
    "attribute.json": '{{"values": "int8:name=x"}}',
    "include.toml": 'include = "{proof}"',
    "codec.toml": 'values = "os.system:touch {proof}"',
    "deep.json": "[" * 100_000,
    "deep.toml": "a = " + "[" * 100_000,
    "digits.json": '{{"fallbacks": ' + "9" * 10_000 + "}}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_policy_file_is_an_error_and_runs_nothing(tmp_path, name):
    proof, path = tmp_path / "proof", tmp_path / name
    path.write_text(HOSTILE[name].format(proof=proof))
    with pytest.raises((ValueError, TypeError), match=r"can't be read|unknown|expected|no parameter"):
        policy_named(path)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 64, b"\x80\x04\x95"])
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_policy_file_that_is_no_text_is_named(tmp_path, content, suffix):
    path = tmp_path / f"binary{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"binary{suffix} can't be read"):
        policy_named(path)


def test_a_policy_s_name_is_only_a_name(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": NASTY, "values": "int8"}))
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(16, 8)
    found = fx_actcomp.explain(model, x, policy=path, compiler="aot_eager", min_bytes=0)
    assert found.policy == NASTY
    assert_harmless(str(found))


def assert_harmless(text):
    """Nothing in a text but what is printed, and line ends between its own lines."""
    assert all(line.isprintable() for line in text.split("\n")), text


NAMES = [NASTY, "\x1b[31mred", "line\nbreak", "tab\tand\rreturn", "\udcff\ud800", "%n{}{0}", "\u2028\u2029", "-rf /"]


def test_a_text_report_holds_no_control_character_and_one_line_a_row():
    told = report(
        *(row(name, number, op=name, source=name, reason=name, used_by=(f"{name}::{name}",), shape=(name,)) for number, name in
          enumerate(NAMES)),
        policy=NASTY, unmatched=tuple(NAMES), failures=tuple(NAMES),
    )  # fmt: skip
    assert_harmless(str(told))
    assert_harmless(told.table(fold=False, alive=True))
    assert_harmless(told.table(plan=False))
    assert len(str(told).splitlines()) == 2 + len(NAMES) + 3 + 2 * len(NAMES)
    assert_harmless(str(report(policy=NASTY, failures=(NASTY,))))


def test_names_come_back_from_json_as_they_were_and_the_file_is_ascii(tmp_path):
    told = report(*(row(name, number) for number, name in enumerate(NAMES)), policy=NASTY, failures=tuple(NAMES))
    for name in ("report.json", "report.txt"):
        told.save(tmp_path / name)
    (tmp_path / "report.json").read_bytes().decode("ascii")
    assert fx_actcomp.Report.from_json(tmp_path / "report.json") == told


class Named(nn.Module):
    """Modules with names that torch allows: anything without a dot."""

    def __init__(self):
        super().__init__()
        self.names = [name.replace(".", "_") for name in (NASTY, "\x1b[31m", "a\nb")]
        for name in self.names:
            self.add_module(name, nn.Linear(32, 32))

    def forward(self, x):
        for name in self.names:
            x = torch.relu(getattr(self, name)(x))
        return x


def test_names_of_modules_do_nothing_to_a_terminal(tmp_path, capsys):
    model, x = Named(), torch.randn(16, 32)
    call = torch.compile(model, backend="actcomp", options={**EAGER, "report": tmp_path / "r.txt", "overrides": {NASTY: None}})
    with pytest.warns(UserWarning, match="matched no saved activation") as warned:
        call(x).sum().backward()
    assert any("owned" in used for r in fx_actcomp.report(call).saved for used in r.used_by)
    fx_actcomp.print_saved_activations(model, x, compiler="aot_eager")
    error = fx_actcomp.gradient_error(model, x, compiler="aot_eager", min_bytes=0)
    texts = [str(fx_actcomp.report(call)), (tmp_path / "r.txt").read_text(), capsys.readouterr().out, str(error)]
    for text in (*texts, *(str(warning.message) for warning in warned)):
        assert_harmless(text)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("name", ["report.json", "report.txt"])
def test_a_report_has_the_permissions_that_the_umask_gives(tmp_path, mask, name):
    before = os.umask(mask)
    try:
        report(row()).save(tmp_path / name)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask


def test_writing_a_report_never_changes_the_umask(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("another thread would create files that all may write"))
    report(row()).save(tmp_path / "report.json")


def test_a_report_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "report.json").symlink_to(tmp_path / "precious")
    report(row()).save(tmp_path / "report.json")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "report.json").is_symlink()


def test_a_report_that_cannot_be_written_is_a_warning_and_the_model_trains(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(16, 8)
    options = {**EAGER, "report": tmp_path / "missing" / "report.json"}
    with pytest.warns(UserWarning, match=r"could not write its report.*missing"):
        torch.compile(model, backend="actcomp", options={**options, "strict": False})(x).sum().backward()
    assert model[0].weight.grad is not None
    torch._dynamo.reset()
    with pytest.raises(Exception, match="missing"):
        torch.compile(model, backend="actcomp", options=options)(x)


def many(rank):
    return report(*(row(f"rank{rank}.{number}", number) for number in range(50 + 10 * rank)), policy=f"rank {rank}")


def write_often(path, rank, barrier):
    barrier.wait()
    for _ in range(40):
        many(rank).save(path)


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_report_that_several_write_at_once_is_always_one_of_theirs(tmp_path, kind):
    context = multiprocessing.get_context("fork")
    make, barrier = (context.Process, context.Barrier(4)) if kind == "processes" else (threading.Thread, threading.Barrier(4))
    path = tmp_path / "report.json"
    writers = [make(target=write_often, args=(path, rank, barrier)) for rank in range(3)]
    for writer in writers:
        writer.start()
    barrier.wait()
    seen = set()
    while any(writer.is_alive() for writer in writers) or not seen:
        if path.exists():
            seen.add(fx_actcomp.Report.from_json(path))
    for writer in writers:
        writer.join()
    assert seen <= {many(rank) for rank in range(3)}
    assert os.listdir(tmp_path) == ["report.json"]


GOOD = json.loads(json.dumps(report(row(), row("b", 1, shape=("s0", 2))).to_dict()))


def changed(**values):
    return json.dumps({**GOOD, **values})


def changed_row(**values):
    return changed(saved=[{**GOOD["saved"][0], **values}, GOOD["saved"][1]])


DAMAGED = {
    "empty": "", "cut": json.dumps(GOOD)[:-20], "binary": "\x80\x04\x95", "list": "[]", "number": "3", "null": "null",
    "deep": "[" * 100_000, "no policy": json.dumps({key: held for key, held in GOOD.items() if key != "policy"}),
    "a key too many": changed(extra=1), "a row's key too many": changed_row(extra=1), "a row of text": changed(saved=["x"]),
    "bytes of text": changed_row(bytes_before="4096"), "bytes that are no number": changed_row(bytes_before=float("nan")),
    "sums that aren't": changed(bytes_before=1), "graphs of text": changed(graphs="1"),
    "uses of numbers": changed_row(used_by=[3]),
    "a shape of lists": changed_row(shape=[[1]]), "true for one": changed_row(number=True), "no rows": changed(saved=None),
    "failures in a text": changed(failures="why"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_report_is_refused_by_name(tmp_path, name):
    path = tmp_path / "report.json"
    path.write_text(DAMAGED[name], encoding="latin-1")
    with pytest.raises(ValueError, match=r"report\.json is no report, or a damaged one"):
        fx_actcomp.Report.from_json(path)


def test_the_report_that_these_are_made_from_is_none_of_them(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(GOOD))
    assert fx_actcomp.Report.from_json(path).to_dict()["bytes_before"] == GOOD["bytes_before"]
