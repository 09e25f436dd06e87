"""Every case on two processes, some on four: each rank against one process, against policy "none", and against the others."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .net import batch, build, compiled, gradients, loss_of, told
from .ranks import ROWS, piece
from .readme import BLOCKS

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

TRAINING = {
    2: [
        "data_parallel.buckets", "data_parallel.compiled_inside", "data_parallel.accumulation", "data_parallel.static_graph",
        "data_parallel.unused_parameters", "sharded.resharded", "sharded.kept", "sharded.bfloat16", "sharded.checkpointed",
        "sharded.columns_and_rows", "sharded.sequence", "pipeline.gpipe", "pipeline.one_forward_one_backward",
        "pipeline.interleaved",
    ],
    4: ["data_parallel.buckets", "sharded.rows_and_shards", "pipeline.one_forward_one_backward"],
}  # fmt: skip
POLICIES = ("none", "lossless", "int8")
OTHERS = [
    "ranks.sizes/none", "ranks.sizes/int8", "ranks.thresholds/none", "ranks.thresholds/int8", "ranks.order_of_sets/int8",
    "ranks.draws/none", "ranks.draws/int8:rounding=stochastic", "sharded.columns_and_rows/int8:rounding=stochastic",
    "sharded.held/none", "sharded.held/int8", "data_parallel.through_inductor/none", "data_parallel.through_inductor/int8",
]  # fmt: skip
NAMES = {
    2: [f"{case}/{policy}" for case in TRAINING[2] for policy in POLICIES] + OTHERS + [f"readme.block/{name}" for name in BLOCKS],
    4: [f"{case}/{policy}" for case in TRAINING[4] for policy in POLICIES] + ["ranks.sizes/none", "ranks.sizes/int8"],
}
TIMEOUT = 600  # seconds: what takes longer waits for a rank that doesn't come

TRAINED = [(size, case) for size, cases in TRAINING.items() for case in cases]

training = pytest.mark.parametrize(("size", "case"), TRAINED)
alike = pytest.mark.parametrize(("size", "case"), [(size, case) for size, case in TRAINED if not case.startswith("pipeline")])


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """``run(size, name)``: what each rank wrote of a case; all cases of a size run in one start of its processes."""
    started = functools.cache(lambda size: start(size, tmp_path_factory.mktemp(f"{size}_ranks")))

    def of(size, name):
        ranks, log = started(size)
        found = [rank.get(name, {"error": f"not reached\n{log}"}) for rank in ranks]
        assert [rank["error"] for rank in found if "error" in rank] == []
        return found

    return of


def start(size, folder):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m", "distributed.worker"]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *launch, str(folder), *NAMES[size]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        log, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        log = f"no end after {TIMEOUT} s\n{process.communicate()[0]}"
    files = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(file) if file.exists() else {} for file in files], log


@functools.cache
def one_process(width):
    """Gradients of the whole batch, eagerly."""
    net = build(width)
    loss_of(net(batch(width))).backward()
    return gradients(net)


def distance(expected, got):
    """Relative, over all gradients that ``got`` has."""
    squares = [((got[name].double() - expected[name].double()).norm() ** 2, expected[name].double().norm() ** 2) for name in got]
    return (sum(pair[0] for pair in squares) / sum(pair[1] for pair in squares)).sqrt().item()


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


def choices(rank):
    """What is made of activations, masks and decisions; inputs are numbered otherwise where sizes are symbolic."""
    ours = [row for row in rank["rows"] if row["kind"] not in ("input", "parameter or buffer")]
    return [(row["module"], row["op"], row["kind"], row["codec"]) for row in ours]


def codecs(rank):
    return {row["codec"] for row in rank["rows"]}


@training
def test_none_gives_the_gradients_of_one_process(run, size, case):
    ranks = run(size, f"{case}/none")
    expected = one_process(256 if case.startswith("data_parallel") else 32)
    assert {name for rank in ranks for name in rank["gradients"]} == set(expected)
    assert max(distance(expected, rank["gradients"]) for rank in ranks) < (2e-2 if "bfloat16" in case else 1e-5)


@training
def test_lossless_is_none_to_the_last_bit(run, size, case):
    for expected, got in zip(run(size, f"{case}/none"), run(size, f"{case}/lossless"), strict=True):
        assert differing(expected["exact"] | expected["gradients"], got["exact"] | got["gradients"]) == []


@training
def test_int8_compresses_and_its_gradients_are_near(run, size, case):
    for expected, got in zip(run(size, f"{case}/none"), run(size, f"{case}/int8"), strict=True):
        assert differing(expected["exact"], got["exact"]) == []
        assert 0 < distance(expected["gradients"], got["gradients"]) < 0.01
        assert "int8" in codecs(got)
        assert got["after"] < 0.5 * got["before"]
        assert got["failures"] == []


@pytest.mark.parametrize("policy", POLICIES)
@alike
def test_every_rank_decides_alike(run, size, case, policy):
    first, *others = run(size, f"{case}/{policy}")
    assert [rank["rows"] for rank in others] == [first["rows"]] * (size - 1)


def test_reports_of_buckets_add_up(run):
    """What the cuts move to the graphs' edges is listed there; all else is counted as it is in one graph."""
    net = build(256)
    loss_of(compiled(net, "none")(batch(256)[:4])).backward()
    one, cut = told(net), run(2, "data_parallel.buckets/none")[0]
    assert (one["graphs"], cut["graphs"]) == (1, 5)
    assert {row["graph"] for row in cut["rows"]} == set(range(5))
    assert cut["before"] == sum(row["bytes_before"] for row in cut["rows"])
    first, second = (sum(row["bytes_before"] for row in r["rows"] if row["kind"] in ("activation", "mask")) for r in (one, cut))
    edges = [row for row in cut["rows"] if row["kind"] in ("input", "output") and (row["graph"], row["kind"]) != (0, "input")]
    assert first - second == len(edges) * 16 * 256 * 4


def test_buckets_go_through_inductor(run):
    nones, eights = (run(2, f"data_parallel.through_inductor/{policy}") for policy in ("none", "int8"))
    for none, eight in zip(nones, eights, strict=True):
        assert none["graphs"] == eight["graphs"] == 3
        assert 0 < distance(none["gradients"], eight["gradients"]) < 0.01
        assert eight["after"] < 0.5 * eight["before"]
        assert differing(none["gradients"], nones[0]["gradients"]) == []
        assert eight["rows"] == eights[0]["rows"]


@pytest.mark.parametrize("policy", ["none", "int8"])
def test_no_gathered_parameter_is_held_by_what_is_saved(run, policy):
    for rank in run(2, f"sharded.held/{policy}"):
        assert rank["gathered"] == rank["whole"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("step", range(len(ROWS)))
def test_ranks_may_see_other_sizes_and_recompile_at_other_steps(run, size, step):
    nones, eights = (run(size, f"ranks.sizes/{policy}") for policy in ("none", "int8"))
    expected = {}
    for rank in range(size):
        net = build()
        (loss_of(net(piece(step, rank))) / size).backward()
        expected = {name: expected.get(name, 0) + grad for name, grad in gradients(net).items()}
    for none, eight in zip(nones, eights, strict=True):
        assert distance(expected, none[f"step {step}"]["gradients"]) < 1e-5
        assert 0 < distance(expected, eight[f"step {step}"]["gradients"]) < 0.01
        assert none[f"step {step}"]["compiled"] == eight[f"step {step}"]["compiled"]
        assert choices(eight[f"step {step}"]) == choices(eights[0][f"step {step}"])


def test_ranks_recompile_at_other_steps(run):
    graphs = [[rank[f"step {step}"]["compiled"] for step in range(len(ROWS))] for rank in run(2, "ranks.sizes/int8")]
    assert graphs == [[1, 2, 2], [1, 1, 2]]


def test_ranks_may_decide_otherwise_about_other_sizes(run):
    nones, eights = (run(2, f"ranks.thresholds/{policy}") for policy in ("none", "int8"))
    assert ["int8" in codecs(rank) for rank in eights] == [True, False]
    for none, eight in zip(nones, eights, strict=True):
        assert 0 < distance(none["gradients"], eight["gradients"]) < 0.01


def test_no_decision_hangs_on_the_order_of_a_set(run):
    for rank in run(2, "ranks.order_of_sets/int8"):
        assert rank["codecs"] == {"row": "keep", "column": "keep", "table": "int8"}


def test_ranks_that_draw_apart_round_apart_and_stay_alike(run):
    nones, ranks = run(2, "ranks.draws/none"), run(2, "ranks.draws/int8:rounding=stochastic")
    assert differing(nones[0]["alone"], nones[1]["alone"]) == []
    assert differing(ranks[0]["alone"], ranks[1]["alone"]) != []
    assert differing(ranks[0]["gradients"], ranks[1]["gradients"]) == []
    assert 0 < distance(nones[0]["gradients"], ranks[0]["gradients"]) < 0.02


def test_ranks_of_one_seed_draw_alike_so_replicated_parameters_stay_alike(run):
    """Tensor parallel: the norms' gradients are never averaged, each rank makes its own."""
    first, second = run(2, "sharded.columns_and_rows/int8:rounding=stochastic")
    assert differing(first["gradients"], second["gradients"]) == []
    assert 0 < distance(one_process(32), first["gradients"]) < 0.02


def test_a_report_counts_every_sharded_layer(run):
    for rank in run(2, "sharded.resharded/none"):
        assert rank["graphs"] == 4


@pytest.mark.parametrize("block", BLOCKS)
def test_readme_trains(run, block):
    ranks = run(2, f"readme.block/{block}")
    assert {name for rank in ranks for name in rank["gradients"]} == set(one_process(32))
    for rank in ranks:
        assert 0 < distance(one_process(32), rank["gradients"]) < 0.01
