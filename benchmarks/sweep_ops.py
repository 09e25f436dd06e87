"""Every entry of PyTorch's operator and module data bases that has gradients, forward and backward through this backend.

    python benchmarks/sweep_ops.py [--sample N] [--only NAME ...] [--policies lossless int8] [--workers 1] [--verbose]

Each sample runs under policy "none", the reference, then under the others with min_bytes=0, all with the same seeds and
deterministic algorithms:

* outputs (and a module's buffers) are the reference's to the last bit, under every policy;
* so are the gradients, where the report says that nothing lossy was saved;
* elsewhere they are within ``BOUNDS``.

A sample that plain torch.compile can't run either is refused, with a reason from the closed list ``Refusal``; an error inside
our pass is a failure, though a user would get a warning and torch's own partition. An entry failed if one of its samples did,
and is refused if all of them are; the exit status is 1 where an entry failed or more than a tenth are refused. The entries
run in processes of their own: one that crashes or hangs doesn't end the sweep.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import logging
import multiprocessing
import queue
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from op_cases import entries
from op_checks import BESIDE, Refusal, Result, sweep
from tabulate import tabulate
from tqdm import tqdm

DEFAULT_POLICIES = ("lossless", "int8")
MOST_REFUSED, MANY = 0.1, 100
"""Largest share of entries that may be refused, and how many it takes for a share to mean anything."""


def _work(connection: Connection) -> None:
    """A worker: takes an entry's name and settings, gives its result."""
    prepare()
    known = entries()
    while True:
        name, settings = connection.recv()
        try:
            result = sweep(known[name], stage=lambda *where: connection.send(where), **settings)
        except Exception:
            result = Result(name, failures=[f"{name}: the sweep itself: {traceback.format_exc()}"])
        connection.send(result)


def prepare() -> None:
    """The same sums in the same order, memory that isn't written filled with NaN, recurrent modules captured, no chatter."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what has no such algorithm runs, and is then run twice
    torch._dynamo.config.allow_rnn = True
    torch._logging.set_logs(dynamo=logging.CRITICAL, aot=logging.CRITICAL)
    warnings.simplefilter("ignore")


class Worker:
    """A process that runs entries one after the other, and is started anew when it crashes, hangs or has run many."""

    RUNS = 60

    def __init__(self, settings: dict[str, Any], timeout: float, work: Callable[[Connection], None] = _work) -> None:
        self.settings, self.timeout, self.work, self.left = settings, timeout, work, 0
        self.process: multiprocessing.process.BaseProcess | None = None

    def _start(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=self.work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.left = self.RUNS

    def run(self, name: str) -> Result:
        """Run one entry; a crash or a hang is its failure, or under policy "none" torch's."""
        if not self.left:
            self._start()
        self.left -= 1
        where = (name, "none")
        self.connection.send((name, self.settings))
        end = "hangs"
        try:
            while self.connection.poll(self.timeout):
                told = self.connection.recv()
                if isinstance(told, Result):
                    return told
                where = told
        except EOFError:
            end = "crashes"
        self.left = 0
        case, policy = where
        if policy == "none":
            return Result(name, refused=collections.Counter({Refusal.FAILS_WITHOUT_US: 1}))
        return Result(name, failures=[f"{case}: policy {policy}: it {end}"])

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def sweep_all(names: Sequence[str], workers: int, timeout: float, settings: dict[str, Any]) -> Iterator[Result]:
    """Run the entries, in whatever order they come out."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    crew = [Worker(settings, timeout) for _ in range(workers)]
    for worker in crew:
        idle.put(worker)

    def one(name: str) -> Result:
        worker = idle.get()
        try:
            return worker.run(name)
        finally:
            idle.put(worker)

    try:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for future in concurrent.futures.as_completed([pool.submit(one, name) for name in names]):
                yield future.result()
    finally:
        for worker in crew:
            worker.stop()


def summary(results: Sequence[Result], policies: Sequence[str]) -> str:
    """Two tables: what became of the entries, and what of the samples."""
    verdicts = collections.Counter(result.verdict for result in results)
    order = ["passed", *(reason.value for reason in Refusal), "failed"]
    rows = [[_refused(verdict), verdicts[verdict]] for verdict in order if verdicts[verdict]]
    lines = [tabulate(rows, ["entries", len(results)])]
    refused = sum((result.refused for result in results), collections.Counter())
    counts = {
        "samples compared": sum(result.ran for result in results),
        "save an activation": sum(result.saving for result in results),
        "save something lossy": sum(result.lossy for result in results),
        **{f"refused: {reason.value}": refused[reason] for reason in Refusal if refused[reason]},
        "failures": sum(len(result.failures) for result in results),
    }
    lines.append(tabulate(list(counts.items())))
    for policy in policies:
        errors = sorted(((result.worst.get(policy, 0.0), result.name) for result in results), reverse=True)[:5]
        lines.append(f"largest gradient errors, {policy}: " + ", ".join(f"{name} {error:.2e}" for error, name in errors))
    return "\n\n".join(lines)


def _refused(verdict: str) -> str:
    return verdict if verdict in {"passed", "failed"} else f"refused: {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many entries, drawn at random; without it all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of entries, or globs: nn.functional.*")
    parser.add_argument("--policies", nargs="+", default=DEFAULT_POLICIES)
    parser.add_argument("--most", type=int, default=6, help="so many fp32 samples of an entry, drawn at random")
    parser.add_argument("--beside", type=int, default=1, help=f"so many more of each of: {', '.join(BESIDE)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one policy of one sample")
    parser.add_argument("--verbose", action="store_true", help="a line for every entry that isn't passed")
    args = parser.parse_args()
    names = [name for name in entries() if args.only is None or any(fnmatch.fnmatch(name, glob) for glob in args.only)]
    if args.sample is not None:
        names = random.Random(args.seed).sample(names, min(args.sample, len(names)))
    settings = {"policies": args.policies, "most": args.most, "beside": args.beside, "seed": args.seed}
    results: list[Result] = []
    bar = tqdm(sweep_all(names, args.workers, args.timeout, settings), total=len(names), unit="entry")
    for result in bar:
        results.append(result)
        bar.set_postfix(failed=sum(bool(r.failures) for r in results), last=result.name)
        for failure in result.failures:
            tqdm.write(f"failed: {failure}")
        if args.verbose and result.verdict not in {"passed", "failed"}:
            tqdm.write(f"refused: {result.name}: {result.verdict}")
    print(summary(results, args.policies))
    refused = sum(result.verdict not in {"passed", "failed"} for result in results)
    if len(results) >= MANY and refused > MOST_REFUSED * len(results):
        print(f"\n{refused} entries are refused; at most {MOST_REFUSED:.0%} may be")
        return 1
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
