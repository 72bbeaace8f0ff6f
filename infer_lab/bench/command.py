"""What `infer-lab bench` does: options in, engines in turn, then a table, a figure and a file."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer_lab.bench.breakdown import watch
from infer_lab.bench.compare import Contestant, Load, Ours, take_turns
from infer_lab.bench.metrics import Objective
from infer_lab.bench.options import (
    PEERS,
    VARIANTS,
    check,
    is_open,
    job_maker,
    settle_length_scale,
)
from infer_lab.bench.report import (
    LoadResult,
    agreement_in_words,
    curves,
    document,
    table,
    to_json,
)
from infer_lab.bench.workloads import check_fits

if TYPE_CHECKING:
    from infer_lab.engine import Engine


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write what was asked for.

    Raises ValueError for bad options, OSError when another engine or a file fails.
    """
    for name in ("json", "plot"):  # now, not when all is measured
        file = getattr(args, name)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"--{name} must lie in a directory that exists, got {file!r}")
    if args.growth:
        return _growth(args)
    check(args)

    import torch  # after the checks: this takes a second

    from infer_lab.bench import machine
    from infer_lab.engine import Engine

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    engine = Engine.from_pretrained(
        args.model,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        max_num_seqs=args.max_num_seqs,
        max_batch_tokens=args.max_batch_tokens,
    )
    settle_length_scale(args, engine.max_model_len)
    rounds = _Rounds(args, engine)
    versions: dict[str, Any] = {"infer_lab": machine.versions()}
    header = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hardware": machine.hardware(),
        "versions": versions,
        "settings": _settings(args, engine),
    }
    with contextlib.ExitStack() as stack:
        contestants: list[Contestant] = [Ours(engine)]
        if args.vs in PEERS:
            peer = stack.enter_context(_peer(args, engine))
            versions[args.vs] = peer.versions
            contestants.append(peer)
        elif args.vs in VARIANTS:
            contestants.append(Ours(_variant(args, engine), args.vs))
        loads = rounds.run(contestants)
    for load in loads:
        print(table(load))
        if load.agreement is not None:
            print(f"\n{agreement_in_words(load.agreement)}")
    if args.breakdown:
        with watch(engine) as found:
            rounds.one_more(Ours(engine))
        header["breakdown"] = asdict(found)
        print(f"\n{found.table()}")
    if args.json is not None:
        Path(args.json).write_text(to_json(document(loads, header)) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    if args.plot is not None:
        print(f"wrote {args.plot}: {_plot(loads, Path(args.plot))}")
    return 0


def _growth(args: argparse.Namespace) -> int:
    from infer_lab.bench import growth, machine
    from infer_lab.bench.figures import growth_figure
    from infer_lab.viz.style import to_png

    found = growth.measure()
    print(growth.table(found))
    if args.json is not None:
        each = [{**asdict(one), "exponent": one.exponent} for one in found]
        header = {"hardware": machine.hardware(), "versions": machine.versions()}
        Path(args.json).write_text(to_json(header | {"growth": each}) + "\n", encoding="utf-8")
    if args.plot is not None:
        fig, words = growth_figure(found)
        Path(args.plot).write_bytes(to_png(fig))
        print(f"wrote {args.plot}: {words}")
    return 0


def _settings(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """The options as they were understood, and what was left to the engine."""
    import torch

    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    return options | {
        "device": str(engine.model.device),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_model_len": engine.max_model_len,
        "kv_memory": engine.kv.describe(),
    }


_NOT_SETTINGS = ("run", "traceback", "json", "plot", "growth", "breakdown")


def _peer(args: argparse.Namespace, engine: Engine) -> Any:
    from infer_lab.bench.peers import Peer
    from infer_lab.model.fetch import resolve

    settings = _settings(args, engine)
    keys = ("dtype", "device", "threads", "max_num_seqs", "max_model_len")
    same = {key: settings[key] for key in keys}
    return Peer(args.vs, resolve(args.model), python=args.peer_python, **same)


def _variant(args: argparse.Namespace, engine: Engine) -> Engine:
    from infer_lab.engine import Engine

    sizes = {"max_num_seqs": args.max_num_seqs, "max_batch_tokens": args.max_batch_tokens}
    return Engine(engine.model, engine.tokenizer, **sizes, **VARIANTS[args.vs])


class _Rounds:
    """The loads that the options ask for."""

    def __init__(self, args: argparse.Namespace, engine: Engine) -> None:
        """Raises ValueError if a request is too long for the engine."""
        self.args = args
        self.load = Load(is_open(args), args.concurrency)
        self.rates: Sequence[float | None] = args.rate or [None]
        sizes = (engine.model.config.vocab_size, engine.max_model_len)
        self.makers = [job_maker(args, rate, *sizes) for rate in self.rates]
        self.tokens = 0  # of one engine, at one rate
        for number in range(1, args.repeats + 1):
            jobs = self.makers[0](f"round-{number}")
            check_fits(jobs, engine.max_model_len)
            self.tokens += sum(job.output_len for job in jobs)

    def run(self, contestants: Sequence[Contestant]) -> list[LoadResult]:
        """Each load with all engines in turn, under one progress bar."""
        from tqdm import tqdm

        args = self.args
        # Other weights give other numbers, and llama.cpp has an arithmetic of its own.
        same_numbers = args.quantization is None and args.vs != "llama.cpp"
        comparable = same_numbers or args.vs in VARIANTS
        loads = []
        total = self.tokens * len(contestants) * len(self.rates)
        with tqdm(total=total, unit=" tokens", disable=None, leave=False) as bar:
            for rate, make in zip(self.rates, self.makers, strict=True):
                runs = take_turns(contestants, make, args.repeats, self.load, bar.update)
                loads.append(LoadResult(rate, runs, comparable, _objective(args)))
        return loads

    def one_more(self, contestant: Contestant) -> None:
        """The first load once again, for one engine alone."""
        contestant.run(self.makers[0]("one more"), self.load)


def _objective(args: argparse.Namespace) -> Objective | None:
    limits = {"ttft": args.ttft_objective, "itl": args.itl_objective}
    given = {name: limit / 1e3 for name, limit in limits.items() if limit is not None}
    return Objective(**given) if given else None


def _plot(loads: Sequence[LoadResult], path: Path) -> str:
    """Draw one load's distributions, or the curve of several; returns the figure in words."""
    from infer_lab.bench.figures import latency_figure, saturation_figure
    from infer_lab.viz.style import to_png

    if len(loads) == 1:
        fig, words = latency_figure(loads[0].runs)
    else:
        fig, words = saturation_figure(curves(loads))
    path.write_bytes(to_png(fig))
    return words
