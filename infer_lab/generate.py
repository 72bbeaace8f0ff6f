"""What `infer-lab generate` does: prompts and options in, the engine's text out, live if asked."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from infer_lab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infer_lab.engine import Engine
    from infer_lab.sampler import TokenLogprobs
    from infer_lab.tokenize import Tokenizer

# Options that become SamplingParams of the same name: (type, placeholder, help).
_SAMPLING = {
    "max_tokens": (int, "N", "at most so many new tokens"),
    "min_tokens": (int, "N", "no end before so many"),
    "temperature": (float, "T", "0: the likeliest token; default: 0, but 1 with --n, --seed ..."),
    "top_p": (float, "P", "only the likeliest tokens that make up P"),
    "top_k": (int, "K", "only the K likeliest tokens; 0: all"),
    "min_p": (float, "P", "only tokens with P times the likeliest's probability"),
    "repetition_penalty": (float, "X", "above 1 discourages tokens of prompt and output"),
    "presence_penalty": (float, "X", "discourages tokens that the output has"),
    "frequency_penalty": (float, "X", "the same, for each time it has them"),
    "seed": (int, "N", "same seed, same text; default: another one each time"),
    "n": (int, "N", "samples of each prompt"),
    "logprobs": (int, "K", "also print each token's log-probability and the K likeliest"),
}
_DEFAULTS = {"max_tokens": 64, "temperature": None}  # where they are not SamplingParams' own
_DRAWS = ("n", "seed", "top_p", "top_k", "min_p")  # mean nothing where nothing is drawn


def add_options(command: argparse.ArgumentParser) -> None:
    """Everything that `run` reads, except which model on what device."""
    command.add_argument("prompts", nargs="+", metavar="PROMPT", help="- reads standard input")
    command.add_argument("--chat", action="store_true", help="put prompts in the chat template")
    command.add_argument("--stream", action="store_true", help="print text as it is made")
    command.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; can be repeated"
    )
    command.add_argument(
        "--stop-token-id", action="append", type=int, metavar="ID", help="end after this token"
    )
    command.add_argument(
        "--ignore-eos", action="store_true", help="go on after end-of-sequence tokens"
    )
    own = SamplingParams()
    for name, (kind, placeholder, text) in _SAMPLING.items():
        default = _DEFAULTS.get(name, getattr(own, name))
        text += "" if default is None else f"; default: {default}"
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=kind, metavar=placeholder, default=default, help=text)


def run(args: argparse.Namespace) -> int:
    """Print the completions of all prompts; with several texts, each under a heading.

    Raises ValueError for an option out of range.
    """
    if args.temperature is None:
        own = SamplingParams()
        draws = any(getattr(args, name) != getattr(own, name) for name in _DRAWS)
        args.temperature = 1.0 if draws else 0.0
    params = SamplingParams(
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        ignore_eos=args.ignore_eos,
        **{name: getattr(args, name) for name in _SAMPLING},
    )
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    if "" in prompts:
        raise ValueError("prompt must not be empty")

    from infer_lab.engine import Engine  # after the checks: this loads torch

    engine = Engine.from_pretrained(args.model, device=args.device, dtype=args.dtype)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts] if args.chat else []
    ids = [tokenizer.encode_chat(chat) for chat in chats] or prompts
    requests = [engine.add(prompt, params) for prompt in ids]
    names = [(request.id, index) for request in requests for index in range(params.n)]
    headings = [
        f"--- prompt {prompt + 1}, sample {index + 1}\n"
        for prompt in range(len(prompts))
        for index in range(params.n)
    ]
    headings = headings if len(names) > 1 else [""]
    errors = _print_in_order(engine, tokenizer, dict(zip(names, headings, strict=True)), args)
    if errors:
        raise ValueError("; ".join(errors))
    return 0


def _print_in_order(
    engine: Engine,
    tokenizer: Tokenizer,
    headings: dict[tuple[str, int], str],
    args: argparse.Namespace,
) -> list[str]:
    """Run the engine; print the first unfinished text live (or when it ends), then the next.

    Returns the errors that ended texts early.
    """
    texts = list(headings)
    unprinted = dict(headings)  # text -> what has not been printed of it
    tables: dict[tuple[str, int], list[str]] = {text: [] for text in texts}
    errors: list[str] = []
    ended = set()
    while texts:
        for delta in engine.step():
            key = (delta.request_id, delta.index)
            unprinted[key] += delta.text
            pairs = zip(delta.token_ids, delta.logprobs or (), strict=False)
            tables[key] += [_logprob_line(tokenizer, token, logprobs) for token, logprobs in pairs]
            if delta.finish_reason is not None:
                ended.add(key)
            if delta.finish_reason == "error":
                errors.append(f"{delta.request_id}: {delta.stop_reason}")
        while texts and (args.stream or texts[0] in ended):
            key = texts[0]
            print(unprinted.pop(key), end="", flush=True)
            unprinted[key] = ""
            if key not in ended:
                break
            print("".join(f"\n{line}" for line in tables[key]))
            texts.pop(0)
    return errors


def _logprob_line(tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs) -> str:
    """A token, its log-probability, and the likeliest tokens with theirs."""

    def show(token: int, logprob: float) -> str:
        return f"{tokenizer.pieces([token])[0]!r} {logprob:.3f}"

    top = ", ".join(show(token, logprob) for token, logprob in logprobs.top.items())
    return f"  {show(token_id, logprobs.logprob)}" + (f"   of {top}" if top else "")
