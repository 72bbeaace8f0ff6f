"""How fast is it, honestly? Workloads, runners, metrics, and peers to compare with.

    workloads   what is asked           traces     lengths and arrivals of real services
    runners     how it is asked         clock      real time, or simulated
    metrics     what came of it         report     a table, a figure, a JSON file
    peers       other engines           compare    in turn with ours, pair by pair
    growth      costs that must not grow with the load

The names below need no torch.
"""

from infer_lab.bench.clock import PacedEngine, SimulatedClock, WallClock
from infer_lab.bench.metrics import (
    Distribution,
    LoadPoint,
    Objective,
    Summary,
    attainment,
    gaps,
    goodput,
    latency,
    percentile,
    saturation_curve,
    summarize,
    tpot,
    ttft,
)
from infer_lab.bench.runners import Record, Run, closed_loop, open_loop
from infer_lab.bench.workloads import (
    Job,
    check_fits,
    poisson_arrivals,
    ragged,
    random_prompts,
    shared_prefix,
)

__all__ = [
    "Distribution",
    "Job",
    "LoadPoint",
    "Objective",
    "PacedEngine",
    "Record",
    "Run",
    "SimulatedClock",
    "Summary",
    "WallClock",
    "attainment",
    "check_fits",
    "closed_loop",
    "gaps",
    "goodput",
    "latency",
    "open_loop",
    "percentile",
    "poisson_arrivals",
    "ragged",
    "random_prompts",
    "saturation_curve",
    "shared_prefix",
    "summarize",
    "tpot",
    "ttft",
]
