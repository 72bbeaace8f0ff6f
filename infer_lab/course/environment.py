"""The first cell of every chapter: what this notebook runs on."""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import version

import torch

import infer_lab
from infer_lab.model.fetch import resolve
from infer_lab.model.load import pick_device, pick_dtype

# tqdm, which transformers imports, asks in a notebook for a widget package that the course has no
# use for. A lesson's output should hold what the lesson is about.
warnings.filterwarnings("ignore", message="IProgress not found")


def banner(*, device: str = "auto", dtype: str = "float32") -> None:
    """Print versions, device, dtype and model; fetches the default model if it isn't there yet.

    The chapters ask for float32 by name, so that results hold from one machine to the next.
    """
    picked = pick_device(device)
    print(f"infer_lab    {infer_lab.__version__}")
    print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"torch        {torch.__version__}, transformers {version('transformers')}")
    print(f"device       {_device_name(picked)}")
    print(f"dtype        {str(pick_dtype(dtype, picked)).removeprefix('torch.')}")
    print(f"model        {resolve(None).name}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"
