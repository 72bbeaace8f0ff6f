"""The options of `infer-lab bench`, and the workload that they ask for.

Nothing here loads torch, so that a mistake is told at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infer_lab.bench.traces import fit, fitting_scale, read_trace
from infer_lab.bench.workloads import Job, ragged, random_prompts, shared_prefix

PEERS = ("transformers", "vllm", "llama.cpp")
# Our own engine with a part of it switched off.
VARIANTS: dict[str, dict[str, Any]] = {
    "static": {"batching": "static"},
    "uncached": {"prefix_caching": False},
}


@dataclass(frozen=True)
class Workload:
    """What a `--workload` is made by, and the options that it takes with their defaults."""

    make: Callable[..., list[Job]]
    defaults: dict[str, Any]


def _trace(trace: str, num_prompts: int | None, max_model_len: int, **how: Any) -> list[Job]:
    return fit(read_trace(trace), limit=num_prompts, max_model_len=max_model_len, **how)


WORKLOADS = {
    "random": Workload(
        random_prompts, {"num_prompts": 32, "input_len": 64, "output_len": 64, "rate": None}
    ),
    "shared-prefix": Workload(
        shared_prefix,
        {"num_prompts": 16, "prefix_len": 512, "suffix_len": 32, "output_len": 32, "rate": None},
    ),
    "ragged": Workload(
        ragged, {"num_prompts": 32, "input_len": 64, "output_lens": (8, 256), "rate": [8.0]}
    ),
    "trace": Workload(
        _trace, {"trace": None, "num_prompts": None, "time_scale": 1.0, "length_scale": None}
    ),
}

_SHAPE = {  # option: how many values, their type, their placeholder, what it says
    "num_prompts": (None, int, "N", "requests"),
    "input_len": (None, int, "TOKENS", "of each prompt"),
    "output_len": (None, int, "TOKENS", "of each answer"),
    "prefix_len": (None, int, "TOKENS", "that all prompts begin with"),
    "suffix_len": (None, int, "TOKENS", "of each prompt's own, behind them"),
    "output_lens": (2, int, "TOKENS", "of the shortest and of the longest answer"),
    "rate": ("+", float, "PER_S", "Poisson arrivals; several: one load after the other"),
    "trace": (None, str, "FILE", "Azure's CSV or Mooncake's JSON lines"),
    "time_scale": (None, float, "X", "2: a trace's requests come half as fast"),
    "length_scale": (None, float, "X", "0.5: half as long; default: all fit into the context"),
}


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that `run` reads, except which model on what device."""
    add = command.add_argument
    add("--workload", choices=WORKLOADS, default="random", help="default: random")
    for name, (nargs, kind, placeholder, text) in _SHAPE.items():
        defaults = [
            f"{_words(workload.defaults[name])} ({w})"
            for w, workload in WORKLOADS.items()
            if workload.defaults.get(name) is not None
        ]
        text += f"; default: {', '.join(defaults)}" if defaults else ""
        add(option(name), nargs=nargs, type=kind, metavar=placeholder, help=text)
    add("--concurrency", type=int, metavar="N", help="users of a closed loop; default: all at once")
    add("--seed", type=int, default=0, metavar="N", help="of the workload; default: 0")
    versus = "measure this, too: another engine, or ours with static batching or uncached"
    add("--vs", choices=[*PEERS, *VARIANTS], help=versus)
    add("--peer-python", metavar="PATH", help="the Python in whose environment that engine is")
    add("--repeats", type=int, default=3, metavar="N", help="rounds, warm-up apart; default: 3")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="in a batch; default: 64")
    add("--max-batch-tokens", type=int, default=2048, metavar="N", help="in a step; default: 2048")
    add("--quantization", metavar="KIND", help="of the weights; default: none")
    add("--threads", type=int, metavar="N", help="for both engines; default: torch's choice")
    add("--ttft-objective", type=float, metavar="MS", help="count requests that begin this fast")
    add("--itl-objective", type=float, metavar="MS", help="and none of whose tokens takes longer")
    add(
        "--breakdown", action="store_true", help="and where our engine's time goes, in one more run"
    )
    add("--json", metavar="FILE", help="write everything that was measured")
    add("--plot", metavar="FILE", help="draw it, as a PNG")
    add("--growth", action="store_true", help="measure costs that must not grow, and nothing else")


def check(args: argparse.Namespace) -> None:
    """Fill in the workload's defaults.

    Raises ValueError for options that are out of range or don't go together.
    """
    workload = WORKLOADS[args.workload]
    is_closed = args.concurrency is not None
    if is_closed and (args.rate is not None or args.workload == "trace"):
        other = "--rate" if args.rate is not None else "--workload trace"
        raise ValueError(f"--concurrency is for a closed loop, {other} for an open one: give one")
    for name in _SHAPE:
        if getattr(args, name) is not None and name not in workload.defaults:
            takers = [w for w, each in WORKLOADS.items() if name in each.defaults]
            raise ValueError(
                f"{option(name)} is for --workload {' or '.join(takers)}, not {args.workload}"
            )
        if getattr(args, name) is None and not (name == "rate" and is_closed):
            setattr(args, name, workload.defaults.get(name))
    if args.workload == "trace" and args.trace is None:
        raise ValueError("--workload trace needs a file: --trace FILE")
    for name in ("repeats", "concurrency", "threads", "max_num_seqs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{option(name)} must be >= 1, got {value}")
    for name in ("ttft_objective", "itl_objective"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"{option(name)} must be > 0 ms, got {value:g}")
    if args.peer_python is not None and args.vs not in PEERS:
        raise ValueError(f"--peer-python needs --vs with one of {', '.join(PEERS)}")
    for rate in args.rate or [None]:  # what makes the jobs says what is wrong with the rest
        job_maker(args, rate, vocab_size=2, max_model_len=2**31)("check")


def job_maker(
    args: argparse.Namespace, rate: float | None, vocab_size: int, max_model_len: int
) -> Callable[[str], list[Job]]:
    """The workload that the options ask for, from a name for its seed."""
    workload = WORKLOADS[args.workload]
    how = {name: getattr(args, name) for name in workload.defaults} | {"vocab_size": vocab_size}
    if args.workload == "trace":
        how["max_model_len"] = max_model_len
    else:
        how["rate"] = rate
    return lambda name: workload.make(**how, seed=f"{args.seed}/{name}")


def settle_length_scale(args: argparse.Namespace, max_model_len: int) -> None:
    """Decide how much shorter a trace's requests must be, unless that was said."""
    if args.workload == "trace" and args.length_scale is None:
        args.length_scale = fitting_scale(read_trace(args.trace), max_model_len, args.num_prompts)


def is_open(args: argparse.Namespace) -> bool:
    """Whether requests come at their own times."""
    return args.workload == "trace" or args.rate is not None


def option(name: str) -> str:
    """num_prompts -> --num-prompts."""
    return f"--{name.replace('_', '-')}"


def _words(value: Any) -> str:
    parts: Sequence[Any] = value if isinstance(value, tuple | list) else [value]
    return " ".join(f"{part:g}" for part in parts)
