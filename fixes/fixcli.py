"""The command line of one fix's ``apply.py``.

Exit codes: 0 = applied, not needed, or reverted; 1 = not applied, or it failed; 2 = the source drifted;
64 = called wrongly, or from a folder that isn't whole. That much holds whatever can be printed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from fixlib import APPLIED, DRIFTED, FAILED, NOT_APPLIED, NOT_NEEDED, REVERTED, Fix, Report
from fixsource import DriftedError

CODES = {APPLIED: 0, NOT_NEEDED: 0, REVERTED: 0, NOT_APPLIED: 1, FAILED: 1, DRIFTED: 2}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with a code of its own: 2 means something else here."""
        self.print_usage(sys.stderr)
        self.exit(64, f"{self.prog}: {message}\n")


def main(fix: Fix, args: Sequence[str] | None = None) -> int:
    """Run the command line of a fix and return its exit code."""
    try:
        parser = _parser(fix)
    except (OSError, ValueError, TypeError) as error:
        say(f"apply.py: {fix.folder / 'fix.json'}: {error}: copy the folder of all fixes whole", sys.stderr)
        return 64
    given = parser.parse_args(args)
    if given.diff and given.json:
        parser.error("--diff prints a patch, not JSON")
    if given.revert and given.any_release:
        parser.error("--revert goes by what was applied, whatever the release")
    if given.diff:
        return _diff(fix, given)
    if given.check:
        report = fix.check(given.root, given.any_release)
    elif given.revert:
        report = fix.revert(given.root)
    else:
        report = fix.apply(given.root, given.any_release)
    say(as_json(report) if given.json else as_text(report))
    return CODES[report.status]


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, whatever the stream can take; what was done stays done, and keeps its exit code."""
    stream = stream or sys.stdout
    try:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        _close(stream)


def _close(stream: TextIO) -> None:
    """Let nothing more go to a stream that takes nothing: Python would try again at its end, and fail."""
    with suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def as_text(report: Report) -> str:
    """Say a report in one or two lines."""
    lines = [f"{report.fix}: {report.status}: {report.reason}"]
    if report.file:
        kind = {"editable": ", editable install: this is its checkout", "checkout": ", source checkout"}
        release = report.release or "release unknown"
        lines.append(f"  {report.file} ({release}{kind.get(report.kind or '', '')})")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """Give a report as one line of JSON."""
    return json.dumps({**report._asdict(), "exit_code": CODES[report.status]})


def _parser(fix: Fix) -> argparse.ArgumentParser:
    facts = fix.facts
    parser = _Parser(
        prog="apply.py",
        description=f"{fix.name}: {facts.summary} Applies the fix, unless told otherwise.",
        epilog="Exit codes: 0 applied, not needed or reverted; 1 not applied or failed; 2 source drifted; "
        "64 called wrongly.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say how the fix stands, and write nothing")
    action.add_argument("--revert", action="store_true", help="undo the fix")
    action.add_argument("--diff", action="store_true", help="print the change as a patch, and write nothing")
    parser.add_argument(
        "--root",
        type=_folder,
        metavar="DIR",
        help="a site-packages folder or a source checkout; default: where this Python finds the package",
    )
    parser.add_argument(
        "--any-release", action="store_true", help="go by the code alone where the release isn't a known one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path names no folder")
    return Path(text)


def _diff(fix: Fix, given: argparse.Namespace) -> int:
    report = fix.check(given.root, given.any_release)
    try:
        patch = fix.diff(given.root, given.any_release) if report.status == NOT_APPLIED else b""
    except (DriftedError, OSError) as error:  # it has changed since
        report = Report(fix.name, DRIFTED, str(error))
    if report.status == DRIFTED:
        say(as_text(report), sys.stderr)
        return CODES[DRIFTED]
    if not patch:
        say(f"{fix.name}: nothing to change", sys.stderr)
    elif not _write(patch):
        say(f"{fix.name}: the patch couldn't be written", sys.stderr)
        return CODES[FAILED]
    return 0


def _write(patch: bytes) -> bool:
    if sys.stdout is None:
        return False
    try:
        sys.stdout.buffer.write(patch)
        sys.stdout.flush()
    except OSError:
        _close(sys.stdout)
        return False
    return True
