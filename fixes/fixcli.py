"""The command line of one fix's ``apply.py``.

Exit codes: 0 = applied, not needed, or reverted; 1 = not applied, or it failed; 2 = the source drifted;
64 = called wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
    parser = _parser(fix)
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
    print(as_json(report) if given.json else as_text(report))
    return CODES[report.status]


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
        type=Path,
        metavar="DIR",
        help="a site-packages folder or a source checkout; default: where this Python finds the package",
    )
    parser.add_argument(
        "--any-release", action="store_true", help="go by the code alone where the release isn't a known one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _diff(fix: Fix, given: argparse.Namespace) -> int:
    try:
        patch = fix.diff(given.root, given.any_release)
    except DriftedError as drift:
        print(as_text(Report(fix.name, DRIFTED, str(drift))), file=sys.stderr)
        return CODES[DRIFTED]
    except OSError as error:
        print(as_text(Report(fix.name, FAILED, str(error))), file=sys.stderr)
        return CODES[FAILED]
    sys.stdout.buffer.write(patch)
    if not patch:
        print(f"{fix.name}: nothing to change", file=sys.stderr)
    return 0
