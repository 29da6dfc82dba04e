"""The command line: argument parsing only. A command is one entry of COMMANDS; what it does lives elsewhere.

Mistakes of the user end with a message that names the argument, and exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from poise.report.texts import LANGUAGES, preferred, speaker


class Command(NamedTuple):
    """One subcommand."""

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]  # adds them
    run: Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a stream that is somebody's own
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(prog="poise", description="Exact attention that shows its scores.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.help)
        command.arguments(own)
        own.set_defaults(run=command.run, parser=own)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: nothing more is to be written, at exit either
        sys.stdout = None
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError) as error:
        options.parser.error(str(error))
    return 0


def _walk_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sentence", nargs="?", type=_text, help="what to walk through; default: a cat on a mat")
    parser.add_argument("--model", help=MODEL_HELP + "; default: seeded random embeddings")
    parser.add_argument("--layer", type=int, default=0, help="from 0 on (default 0)")
    parser.add_argument("--head", type=int, default=0, help="from 0 on (default 0)")
    parser.add_argument("--lang", default=preferred(), help=f"{', '.join(LANGUAGES)}; default: that of the locale")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page instead of printing")


def _walk(options: argparse.Namespace) -> None:
    say = speaker(options.lang)
    from poise.report import lesson, page, terminal, walk

    sentence = say("sentence") if options.sentence is None else options.sentence
    if options.model is None:
        taught = lesson.seeded(sentence, options.layer, options.head)
    else:
        taught = lesson.of_model(_directory(options.model), sentence, options.layer, options.head, options.model)
    if options.html is None:
        walk.walk(taught, sentence, say, terminal.Terminal())
    else:
        options.html.write_text(page.page(taught, sentence, say, options.lang), encoding="utf-8")
        print(say("page.written", path=options.html))


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("prompt", type=_text, help="what the text begins with")
    parser.add_argument("--max-tokens", type=int, default=128, help="the most tokens to write (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="only the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="only the likeliest tokens whose probabilities reach this")
    parser.add_argument("--min-p", type=float, help="only tokens at least this times as likely as the likeliest")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions (default 1)")
    parser.add_argument("--beams", type=int, default=1, help="search with that many candidates (default 1: none)")
    parser.add_argument("--stop", action="append", default=[], type=_text, help="end before this text; may be repeated")
    parser.add_argument("--seed", type=int, help="the same draws each time")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="print tokens as they come"
    )


def _generate(options: argparse.Namespace) -> None:
    import torch

    from poise.models import load, tokenizer
    from poise.models.generate import generate, stream
    from poise.models.sampling import Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    directory = _directory(options.model)
    model = load(directory, dtype=options.dtype and getattr(torch, options.dtype))
    asked = {
        "new": options.max_tokens,
        "sampling": sampling,
        "stop_strings": tuple(options.stop),
        "tokenizer": tokenizer(directory),
    }
    if options.stream and options.beams == 1:
        for piece in stream(model, options.prompt, **asked):
            print(piece.text, end="", flush=True)
        print()
    else:
        print(generate(model, options.prompt, beams=options.beams, **asked)[0].text)


def _lab_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="list | run | report", required=True)
    for action, text in (
        ("list", "The claims, and their verdicts where they have been run."),
        ("run", "Measure claims; what is finished is kept, and the same command goes on after an interruption."),
        ("report", "Write what has been run as one HTML page."),
    ):
        own = actions.add_parser(action, help=text, description=text)
        own.add_argument("--out", type=Path, default=Path("runs/lab"), metavar="DIR", help="results (default runs/lab)")
        own.add_argument("--lang", default=preferred(), help=f"{', '.join(LANGUAGES)}; default: that of the locale")
        if action == "run":
            own.add_argument("names", nargs="*", metavar="NAME", help="names or numbers, see `poise lab list`")
            own.add_argument("--all", action="store_true", help="every experiment")
            level = own.add_mutually_exclusive_group()
            quick, full = "everything in under 3 minutes", "whole grids, up to 8 hours"
            level.add_argument("--quick", dest="level", action="store_const", const="quick", help=quick)
            level.add_argument("--full", dest="level", action="store_const", const="full", help=full)
            own.set_defaults(level="default")
            own.add_argument("--seed", type=int, default=0, help="another draw of everything random (default 0)")
        if action == "report":
            own.add_argument(
                "--docs", type=Path, metavar="DIR", help="also as Markdown with plots, a file per language"
            )


def _lab(options: argparse.Namespace) -> None:
    from poise.lab import document, page, runner, texts
    from poise.lab.experiment import experiments, find
    from poise.lab.results import Results

    results, say = Results(options.out), texts.speaker(texts.PAGE, options.lang)
    if options.action == "list":
        for line in runner.listing(results, options.lang):
            print(line)
    elif options.action == "run":
        if options.all == bool(options.names):
            raise ValueError("run takes either NAMEs or --all; `poise lab list` shows the names")
        chosen = experiments() if options.all else [find(name) for name in options.names]
        runner.run_all(chosen, options.level, options.seed, results, options.lang)
    else:
        found = page.entries(results)
        written = [options.out / "lab.html"]
        written[0].write_text(page.page(found, options.lang), encoding="utf-8")
        if options.docs is not None:
            written += document.write(found, options.docs)
        for path in written:
            print(say("page.written", path=path))


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    from poise.inspection.source import HELP

    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--text", action="append", default=[], type=_text, help="a text; may be repeated")
    parser.add_argument("--file", action="append", default=[], type=Path, help="a file that is one text; repeatable")
    parser.add_argument("--dataset", type=Path, metavar="LINES", help="a file of texts, one a line")
    parser.add_argument("--layers", metavar="0,4-7", help="only these layers, by number (default all)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page with the maps of all heads")


def _inspect(options: argparse.Namespace) -> None:
    from poise.inspection import inspect, progress

    texts = [*options.text, *(path.read_text(encoding="utf-8") for path in options.file)]
    if options.dataset is not None:
        texts += [line for line in options.dataset.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        texts = [speaker(language)("sentence") for language in LANGUAGES]
    with progress.shown() as told:
        found = inspect(options.model, texts, layers=options.layers, maps=options.html is not None, progress=told)
    print(found)
    for path, write in ((options.json, found.json), (options.html, found.html)):
        if path is not None:
            write(path)
            print(f"written to {path}")
    if found.interrupted:
        raise KeyboardInterrupt


MODEL_HELP = "a directory with a Hugging Face checkpoint, or minilm or smollm2 (see `make weights`)"
COMMANDS = (
    Command("walk", "Walk through attention on a sentence, step by step.", _walk_arguments, _walk),
    Command("generate", "Continue a text with a language model.", _generate_arguments, _generate),
    Command("lab", "Measure the claims about score scaling, and say which hold.", _lab_arguments, _lab),
    Command("inspect", "Tell what every attention head of a model does.", _inspect_arguments, _inspect),
)


def _directory(model: str) -> Path:
    from poise.testing import weights

    return weights.directory(model)


def _text(argument: str) -> str:
    """An argument whose bytes a locale without UTF-8 has escaped."""
    return argument.encode(errors="surrogateescape").decode(errors="replace")
