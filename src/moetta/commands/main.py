"""The command line. Each command is a dataclass of options and a function, in its own file."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import tyro

from moetta import __version__
from moetta.suggest import nearest

EXTRAS = {
    **dict.fromkeys(("matplotlib", "polars", "scipy", "sklearn"), "bench"),
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "python_multipart"), "serve"),
    "ray": "ray",
    "transformers": "hf",
}
"""Which extra installs a package that the library itself does not need."""


PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Command:
    """Where to find a command; it is imported only when called."""

    module: str
    options: str
    function: str
    summary: str


COMMANDS = {
    "demo": Command(
        "moetta.commands.demo",
        "Demo",
        "demo",
        "compare all methods on one mixed stream: a table and a page",
    ),
    "run": Command("moetta.commands.run", "RunOptions", "run", "run methods on streams and models"),
    "reproduce": Command(
        "moetta.commands.reproduce",
        "Reproduce",
        "reproduce",
        "reproduce a table or figure of the paper",
    ),
    "results": Command(
        "moetta.commands.results", "Results", "results", "show finished runs in a table"
    ),
    "report": Command(
        "moetta.commands.report",
        "ReportOptions",
        "report_command",
        "make a page of finished runs, with figures",
    ),
    "serve": Command(
        "moetta.commands.serve", "Serve", "serve", "serve an adapting classifier over HTTP"
    ),
    "methods": Command(
        "moetta.commands.methods", "Methods", "methods", "list the methods and their settings"
    ),
    "models": Command("moetta.commands.models", "Models", "models", "list the named models"),
    "doctor": Command(
        "moetta.commands.doctor", "Doctor", "doctor", "check this machine and the installation"
    ),
    "corrupt": Command(
        "moetta.commands.corrupt",
        "Corrupt",
        "corrupt",
        "write corrupted copies of a folder of images, like ImageNet-C",
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
    try:
        with _messages_to_stderr():
            _call(name, COMMANDS[name], rest)
    except (ValueError, OSError) as error:
        # Expected errors explain themselves; a traceback would hide the explanation.
        if _follows():
            # torchrun ends all ranks once one has failed: let the first one finish its sentence.
            time.sleep(PATIENCE_SECONDS)
        else:
            print(f"moetta {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        if not _follows():
            print(f"\nmoetta {name}: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    return 0


def _follows() -> bool:
    """Whether torchrun started this process as one of several ranks; the first one talks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def _call(name: str, command: Command, arguments: list[str]) -> None:
    try:
        module = importlib.import_module(command.module)
        options = tyro.cli(getattr(module, command.options), prog=f"moetta {name}", args=arguments)
        with _sigterm_as_ctrl_c():
            getattr(module, command.function)(options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        raise ValueError(
            f"this command needs {package}, which is not installed; install moetta with its "
            f"{extra} extra: pip install 'moetta[{extra}]' (from a checkout: pip install "
            f"'.[{extra}]')"
        ) from error


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _messages_to_stderr() -> Iterator[None]:
    """Within the block the library's messages appear on stderr as plain lines, once each."""
    logger, handler = logging.getLogger("moetta"), _StderrHandler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # whoever configures the root logger must not print them again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _StderrHandler(logging.Handler):
    """Writes to the current stderr: a live table replaces it for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
