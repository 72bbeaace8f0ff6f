"""The command `infer-lab`: one function per subcommand, one entry each in `build_parser`.

A subcommand imports what it needs when it runs, so `infer-lab --help` answers at once. What a user
can put right (ValueError, FetchError, OSError) is printed as one line; exit status 2. Anything
else is our bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from infer_lab import __version__
from infer_lab.bench.options import add_options as add_bench_options
from infer_lab.generate import add_options as add_generate_options

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

    command = add("generate", generate, "continue prompts, or answer them with --chat")
    add_generate_options(command)
    _add_model_options(command)

    command = add("bench", bench, "how fast it is, alone or beside another engine")
    add_bench_options(command)
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

    command = add("new-chapter", new_chapter, "for authors: a chapter that runs, to be rewritten")
    command.add_argument("track", help="beginner, intermediate or advanced")
    command.add_argument("number", help="1 to 99, free in the track")
    command.add_argument("name", help="such as my_topic")

    command = add("lint", lint, "for authors: does the course keep its rules?")
    command.add_argument("chapter", nargs="*", help="such as beginner/02_sampling; default: all")

    add("index", index, "for authors: write the tracks' indexes, sort and link the glossary")
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
    """Print the model's continuation of each prompt (with --chat, its answer)."""
    from infer_lab.generate import run

    return run(args)


def bench(args: argparse.Namespace) -> int:
    """Send a workload to the engine, beside another one if asked, and say how fast each was."""
    from infer_lab.bench.command import run

    return run(args)


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


def new_chapter(args: argparse.Namespace) -> int:
    """Make the directory TRACK/NN_NAME with a small lesson that runs, its checks and solutions."""
    from infer_lab.course.scaffold import run

    return run(args.track, args.number, args.name)


def lint(args: argparse.Namespace) -> int:
    """Say what is wrong with chapters, indexes and glossary, and how to mend it; status 1 then."""
    from infer_lab.course.lint.course import run

    return run(args.chapter)


def index(args: argparse.Namespace) -> int:
    """Write README.md of each track from its chapters, and sort and link GLOSSARY.md."""
    from infer_lab.course.discovery import course_root
    from infer_lab.course.index import write

    changed = write(root := course_root())
    print(*[f"wrote {path.relative_to(root)}" for path in changed] or ["up to date"], sep="\n")
    return 0
