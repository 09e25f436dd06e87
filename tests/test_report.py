import os
import stat
import threading
import time

import pytest

from fx_actcomp.choice import Choice, Pin, Plan
from fx_actcomp.codecs import Traits
from fx_actcomp.options import parse_options
from fx_actcomp.records import Decision, Kind, Role, SavedActivation, Use
from fx_actcomp.report import MIB, Report, Row
from fx_actcomp.session import Session


def row(module="layers.0", number=0, **changes):
    parts = {
        "number": number, "graph": 0, "name": f"mm_{number}", "module": module, "op": "aten.mm", "source": "model.py:3",
        "shape": (64, 1024), "dtype": "float32", "kind": "activation", "bytes_before": 4 * MIB, "bytes_after": MIB,
        "codec": "int8", "used_by": (f"{module}::aten.mm",), "reason": "",
    }  # fmt: skip
    return Row(**{**parts, **changes})


def report(*rows, **changes):
    return Report(**{"policy": "int8", "saved": tuple(rows), "graphs": 1, **changes})


def body(table):
    """The lines of a table below its head."""
    return table.splitlines()[2:]


def layers(*names, **changes):
    return [row(name, number, **changes) for number, name in enumerate(names)]


def test_identical_layers_share_a_row():
    (line,) = body(report(*layers("layers.0", "layers.1", "layers.2")).table())
    assert "layers.[0-2] x3" in line


def test_a_folded_row_holds_the_sum():
    (line,) = body(report(*layers("layers.0", "layers.1", "layers.2")).table())
    assert "12.000" in line
    assert "3.000" in line


def test_layers_that_are_not_in_a_row_are_listed():
    (line,) = body(report(*layers("layers.0", "layers.2", "layers.7")).table())
    assert "layers.[0,2,7] x3" in line


def test_two_numbers_are_folded_each_on_its_own():
    (line,) = body(report(*layers("layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0")).table())
    assert "layers.[0-1].experts.[0-1] x3" in line


def test_numbers_that_do_not_differ_stay():
    (line,) = body(report(*layers("stage1.blocks.0", "stage1.blocks.1")).table())
    assert "stage1.blocks.[0-1] x2" in line


def test_layers_of_ten_and_more_are_in_numeric_order():
    (line,) = body(report(*layers(*(f"layers.{i}" for i in range(12)))).table())
    assert "layers.[0-11] x12" in line


def test_a_lone_layer_keeps_its_name():
    (line,) = body(report(row("layers.3")).table())
    assert "layers.3 " in line
    assert " x" not in line.replace("64x1024", "")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (64, 512)},
        {"dtype": "bfloat16"},
        {"codec": "keep"},
        {"op": "aten.gelu"},
        {"kind": "mask"},
        {"used_by": ("layers.1::aten.gelu",)},
        {"reason": "use not known"},
        {"bytes_before": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_differ_are_not_folded(change):
    assert len(body(report(row("layers.0"), row("layers.1", 1, **change)).table())) == 2


def test_modules_without_a_number_are_not_folded():
    assert len(body(report(row("stem"), row("stem", 1)).table())) == 2


def test_every_row_is_shown_where_folding_is_off():
    assert len(body(report(*layers("layers.0", "layers.1", "layers.2")).table(fold=False))) == 3


def test_a_group_stands_where_its_first_row_stood():
    rows = [row("layers.0"), row("stem", 1), row("layers.1", 2)]
    assert [line.split()[0] for line in body(report(*rows).table())] == ["0", "1"]


def test_without_a_plan_the_columns_of_a_plan_are_left_out():
    head = report(row()).table(plan=False).splitlines()[0]
    assert "used by" in head
    assert "codec" not in head
    assert "after" not in head


def test_the_sums_are_those_of_the_rows():
    summed = report(*layers("layers.0", "layers.1", "layers.2"))
    assert (summed.bytes_before, summed.bytes_after) == (12 * MIB, 3 * MIB)


def test_the_sums_are_printed():
    printed = str(report(*layers("layers.0", "layers.1", "layers.2")))
    assert "saved for backward: 12.000 MiB -> 3.000 MiB (4.00 times fewer), policy int8, 1 graph" in printed


def test_statistics_are_summed_apart():
    printed = str(report(row(), row("norm", 1, kind="statistic", bytes_after=4 * MIB, codec="keep")))
    assert "saved for backward: 8.000 MiB -> 5.000 MiB (1.60 times fewer)" in printed
    assert "of these, values, masks and indices: 4.000 MiB -> 1.000 MiB (4.00 times fewer)" in printed


def test_what_is_alive_anyway_is_counted_apart():
    printed = str(report(row(), row("fc", 1, kind=Kind.PARAMETER.value, bytes_before=0, bytes_after=0, codec="keep")))
    assert "saved for backward: 4.000 MiB -> 1.000 MiB" in printed
    assert "1 more are parameters, inputs or outputs (or views or casts of them), alive anyway: not counted" in printed


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.INPUT])
def test_parameters_and_inputs_are_listed_on_request_only(kind):
    held = report(row(), row("fc", 1, kind=kind.value, bytes_before=0, bytes_after=0, codec="keep"))
    assert len(body(held.table())) == 1
    assert len(body(held.table(alive=True))) == 2


def test_nothing_left_is_infinitely_less():
    assert "infinitely many times fewer" in str(report(row(bytes_after=0, codec="drop")))


def test_a_report_of_nothing_says_so():
    empty = report()
    assert (empty.bytes_before, empty.bytes_after) == (0, 0)
    assert "no graph of the model saves anything for backward" in str(empty)


@pytest.mark.parametrize("rows", [(), (row(),)], ids=["empty", "one row"])
def test_notes_are_printed(rows):
    printed = str(report(*rows, unmatched=("haed",), failures=("KeyError: 'x'",), rederived=True))
    assert "override 'haed' matched no saved activation" in printed
    assert "left as torch compiles it: KeyError: 'x'" in printed
    assert "planned again by tracing: a compiler cache answered in our stead" in printed


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.INPUT, Kind.OUTPUT, Kind.STATISTIC])
def test_what_others_hold_is_not_ours_to_compress(kind):
    assert not row(kind=kind.value).compressible


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.MASK, Kind.INDEX])
def test_values_masks_and_indices_are_ours_to_compress(kind):
    assert row(kind=kind.value).compressible


def test_a_report_goes_to_json_and_back(tmp_path):
    written = report(
        *layers("layers.0", "stem", shape=("s0", 1024)),
        unmatched=("haed",),
        failures=("why",),
        draws=("rand",),
        copies=("running",),
        rederived=True,
        graphs=2,
    )
    path = tmp_path / "report.json"
    written.to_json(path)
    assert Report.from_json(path) == written


def test_the_suffix_chooses_json_or_text(tmp_path):
    written = report(row())
    written.save(tmp_path / "report.json")
    written.save(str(tmp_path / "report.txt"))
    assert Report.from_json(tmp_path / "report.json") == written
    assert (tmp_path / "report.txt").read_text() == f"{written}\n"


@pytest.mark.parametrize("name", ["report.json", "report.txt"])
def test_writing_leaves_no_other_file(tmp_path, name):
    report(row()).save(tmp_path / name)
    report(row()).save(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["report.json", "report.txt"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report(row()).save(path)
    assert os.listdir(tmp_path) == [name]
    assert path.read_text() == "old"


def test_a_report_is_written_beside_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report(row()).save("report.json")
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_report_has_the_permissions_of_any_new_file(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    report(row()).save(tmp_path / "report.json")
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        report(row()).save(tmp_path / "missing" / "report.json")


def saved(number=0, **changes):
    parts = {
        "number": number, "name": f"relu_{number}", "module": "layers.0", "op": "aten.relu", "source": "model.py:3",
        "shape": (64, 1024), "dtype": "float32", "nbytes": 4 * MIB, "kind": Kind.ACTIVATION, "base": f"relu_{number}",
        "uses": (Use("aten.mm", "layers.1", Role.WEIGHT_GRAD),),
    }  # fmt: skip
    return SavedActivation(**{**parts, **changes})


def choice(codec="int8", nbytes=MIB, dropped=False, **changes):
    tensor = saved(**changes)
    return Choice(tensor, codec, Traits(), "", nbytes, tensor.name, dropped=dropped)


def session(*choices, pins=(), matched=(), **options):
    settings = parse_options({"compiler": "aot_eager", **options})
    return Session(settings, plans=[Plan(settings.policy.name, choices, pins, frozenset(matched))])


def test_a_row_tells_what_becomes_of_a_tensor():
    (found,) = Report.of([session(choice())]).saved
    assert (found.module, found.op, found.shape, found.codec) == ("layers.0", "aten.relu", (64, 1024), "int8")
    assert (found.bytes_before, found.bytes_after) == (4 * MIB, MIB)
    assert found.used_by == ("layers.1::aten.mm",)


def test_a_tensor_is_kept_or_dropped():
    kept, dropped = Report.of([session(choice(codec=None, nbytes=4 * MIB), choice(None, 0, dropped=True, number=1))]).saved
    assert (kept.codec, dropped.codec) == ("keep", "drop")


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.INPUT, Kind.OUTPUT])
def test_what_is_alive_anyway_costs_nothing(kind):
    (found,) = Report.of([session(choice(codec=None, nbytes=4 * MIB, kind=kind))]).saved
    assert (found.bytes_before, found.bytes_after) == (0, 0)


def test_a_use_is_told_once():
    twice = (Use("aten.mm", "layers.1", Role.WEIGHT_GRAD), Use("aten.mm", "layers.1", Role.PRODUCT))
    (found,) = Report.of([session(choice(uses=twice))]).saved
    assert found.used_by == ("layers.1::aten.mm",)


def test_a_pinned_decision_is_a_row_of_its_own():
    decision = Decision("gt", "aten.gt", "layers.0", ("relu_0",), (64, 1024), 1, 8192)
    _, pinned = Report.of([session(choice(), pins=(Pin(decision, "bits"),))]).saved
    assert (pinned.kind, pinned.codec, pinned.bytes_before, pinned.bytes_after) == ("decision", "bits", 0, 8192)
    assert pinned.number == 1


def test_the_graphs_of_a_model_are_added_up():
    added = Report.of([session(choice()), session(choice(), choice(number=1))])
    assert added.graphs == 2
    assert [found.graph for found in added.saved] == [0, 1, 1]
    assert added.bytes_before == 12 * MIB


def test_an_override_that_matched_nothing_is_told():
    overrides = {"layers.0": "int4", "haed": None}
    assert Report.of([session(choice(), matched=["layers.0"], overrides=overrides)]).unmatched == ("haed",)


def test_an_override_that_matched_in_one_graph_matched():
    overrides = {"layers.0": "int4"}
    sessions = [session(choice(), overrides=overrides), session(choice(), matched=["layers.0"], overrides=overrides)]
    assert Report.of(sessions).unmatched == ()


def test_the_policies_of_all_graphs_are_named_once():
    sessions = [session(choice()), session(choice()), session(choice(), policy="int4")]
    assert Report.of(sessions).policy == "int8, int4"


def test_failures_are_told():
    failed = session()
    failed.failures.append("KeyError: 'x'")
    assert Report.of([failed]).failures == ("KeyError: 'x'",)


def test_a_plan_made_again_by_tracing_is_marked():
    cached = session(choice())
    traced, cached.plans = session(*cached.plans[0].choices), []
    cached.rederive = lambda: traced
    again = Report.of([cached])
    assert again.rederived
    assert again.bytes_before == 4 * MIB


def test_no_session_is_an_empty_report():
    assert Report.of([]) == Report("", (), 0)


def test_failures_behind_a_cache_are_told():
    cached, traced = session(), session()
    traced.failures.append("KeyError: 'x'")
    cached.rederive = lambda: traced
    again = Report.of([cached])
    assert again.rederived
    assert again.failures == ("KeyError: 'x'",)


def test_a_graph_that_saves_nothing_was_not_planned_again():
    cached = Session(parse_options({}), rederive=lambda: Session(parse_options({})))
    assert not Report.of([cached]).rederived


def test_a_plan_is_made_again_once_whoever_asks():
    cached, traced, calls = session(), session(choice()), []

    def rederive():
        calls.append(1)
        time.sleep(0.05)
        return traced

    cached.rederive = rederive
    threads = [threading.Thread(target=cached.all_plans) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert cached.all_plans() == traced.plans
