"""The command `infer-lab`: one function per subcommand, one entry each in `build_parser`.

A subcommand imports what it needs when it runs, so `infer-lab --help` answers at once. What a user
can put right (ValueError, FetchError, OSError) is printed as one line; exit status 2. Anything
else is our bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper

from infer_lab import __version__

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (130 after Ctrl-C, 2 after an error)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without UTF-8 shows \\u2192 instead
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return int(status)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.traceback or not isinstance(error, _user_errors()):
            raise
        print(f"infer-lab: error: {error}", file=sys.stderr)
        return 2


def _user_errors() -> tuple[type[Exception], ...]:
    from infer_lab.model.download import FetchError

    return ValueError, OSError, FetchError


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="infer-lab", description="A language model's serving engine, small enough to read."
    )
    parser.add_argument("--version", action="version", version=f"infer-lab {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Command, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    command = add("doctor", doctor, "what is installed, what it runs on, and what is wrong")
    command.add_argument("--verify", action="store_true", help="check the model's hashes too")

    command = add("fetch", fetch, "get the model, unless it is there, and print where it is")
    command.add_argument("model", nargs="?", help=MODEL_HELP)

    command = add("generate", generate, "continue a prompt, or answer it with --chat")
    command.add_argument("prompt", help="the text to continue; - reads it from standard input")
    command.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: 64")
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    command.add_argument("--chat", action="store_true", help="put the prompt in the chat template")
    command.add_argument("--stream", action="store_true", help="print text as it is made")
    _add_model_options(command)

    command = add("demo", demo, "one question answered, every step in view")
    command.add_argument("prompt", nargs="?", default="What is the capital of France?")
    _add_model_options(command)

    command = add("lab", lab, "JupyterLab with a chapter open; Ctrl-C ends it")
    command.add_argument("notebook", nargs="?", help="default: the first chapter")
    command.add_argument("--ip", default="localhost", help="address to listen on")
    command.add_argument("--port", type=int, help="default: 8888, or the next one that is free")
    command.add_argument("--no-browser", action="store_true", help="only print the URL")
    command.add_argument("--verbose", action="store_true", help="show Jupyter's own messages")
    return parser


MODEL_HELP = (
    "directory, .gguf file or hub id; default: $INFER_LAB_MODEL, else SmolLM2-135M-Instruct"
)


def _add_model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help=MODEL_HELP)
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, mps; default: auto")
    command.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16, float16; default: auto"
    )


def doctor(args: argparse.Namespace) -> int:
    """Name versions, device, model and cache; exit status 1 if anything is wrong."""
    from infer_lab.doctor import examine

    report = examine(verify=args.verify)
    print(report)
    return 1 if report.problems else 0


def fetch(args: argparse.Namespace) -> int:
    """Get the model, unless it is there, and print the directory or file that holds it."""
    from infer_lab.model.fetch import resolve

    print(resolve(args.model))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Print the model's continuation of a prompt (with --chat, its answer)."""
    if args.temperature != 0:
        raise ValueError(f"temperature must be 0 (greedy decoding), got {args.temperature}")
    if args.max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {args.max_tokens}")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("prompt must not be empty")
    for text in _generate(prompt, args):
        print(text, end="", flush=args.stream)
    print()
    return 0


def _generate(prompt: str, args: argparse.Namespace) -> Iterator[str]:
    from infer_lab import CacheSpec, ContiguousKVCache, Detokenizer, Tokenizer, load_model
    from infer_lab.decode import generate_tokens

    tokenizer = Tokenizer.from_pretrained(args.model)
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.encode_chat(chat) if args.chat else tokenizer.encode(prompt)
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    room = min(len(ids) + args.max_tokens, model.config.max_position_embeddings)
    cache = ContiguousKVCache(CacheSpec.from_config(model.config, model.dtype), room, model.device)
    detokenizer = Detokenizer(tokenizer)
    for token_id in generate_tokens(model, ids, cache, max_tokens=args.max_tokens):
        yield detokenizer.push(token_id)
    yield detokenizer.finish()


def demo(args: argparse.Namespace) -> int:
    """Answer one chat prompt and show each step: template, ids, prefill, decode, cache."""
    from infer_lab.demo import run

    run(args.prompt, name_or_path=args.model, device=args.device, dtype=args.dtype)
    return 0


def lab(args: argparse.Namespace) -> int:
    """Start JupyterLab with a chapter open; its URL is the last line printed."""
    from infer_lab.lab import serve

    return serve(
        args.notebook,
        ip=args.ip,
        port=args.port,
        browser=not args.no_browser,
        verbose=args.verbose,
    )
