"""The command line: thin; each command is one dataclass of options and one function of a room."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import tyro

from moetta import __version__
from moetta.suggest import nearest

BENCH_EXTRA = ("matplotlib", "polars", "scipy", "sklearn")
"""What the bench extra brings; the library itself does without."""


@dataclass(frozen=True)
class Command:
    """Where a command lives; imported only when it is called."""

    module: str
    options: str
    function: str
    summary: str


COMMANDS = {
    "demo": Command(
        "moetta.commands.demo",
        "Demo",
        "demo",
        "all methods on one mixed stream; a table and a page",
    ),
    "run": Command("moetta.commands.run", "RunOptions", "run", "run methods on streams and models"),
    "reproduce": Command(
        "moetta.commands.reproduce", "Reproduce", "reproduce", "a table or figure of the paper"
    ),
    "results": Command("moetta.commands.results", "Results", "results", "finished runs in a table"),
    "report": Command(
        "moetta.commands.report",
        "ReportOptions",
        "report_command",
        "finished runs on a page with figures",
    ),
    "methods": Command(
        "moetta.commands.methods", "Methods", "methods", "the methods and their settings"
    ),
    "models": Command("moetta.commands.models", "Models", "models", "the models that need no path"),
    "doctor": Command(
        "moetta.commands.doctor", "Doctor", "doctor", "what this machine has, and a self-test"
    ),
    "corrupt": Command(
        "moetta.commands.corrupt",
        "Corrupt",
        "corrupt",
        "write an ImageNet-C-style tree from a folder of images",
    ),
    "train-model": Command(
        "moetta.commands.train_model",
        "TrainModel",
        "train_model",
        "train one of the shipped models again",
    ),
}


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: moetta COMMAND [OPTIONS]",
            "",
            "Test-time adaptation under mixed distribution shifts.",
            "",
            *lines,
            "",
            "moetta COMMAND --help explains a command; moetta --version prints the version.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"moetta {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"moetta: no command {name!r}; {nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name not in BENCH_EXTRA:
            raise
        print(
            f"moetta {name}: this command needs {error.name}, which is not installed; install "
            "moetta with its bench extra: pip install 'moetta[bench]' (from a checkout: pip "
            "install '.[bench]')",
            file=sys.stderr,
        )
        return 1
    options = tyro.cli(getattr(module, command.options), prog=f"moetta {name}", args=rest)
    try:
        getattr(module, command.function)(options)
    except (ValueError, OSError) as error:
        # Expected refusals explain themselves; a traceback would hide the explanation.
        print(f"moetta {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"\nmoetta {name}: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
