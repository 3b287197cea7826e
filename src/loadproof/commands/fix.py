"""``loadproof fix``: source fixes for deployed engines, over the code that ``fixes/*/apply.py`` runs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import click

import loadproof


class _Folder(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty path, which would be the working directory."""
        if value == "":
            self.fail("an empty path names no folder", param, ctx)
        return super().convert(value, param, ctx)


_ROOT = click.option(
    "--root",
    type=_Folder(path_type=Path),
    metavar="DIR",
    help="A site-packages folder or a source checkout; default: where this Python finds the engine.",
)
_ANY_RELEASE = click.option(
    "--any-release", is_flag=True, help="Go by the code alone where the release isn't a known one."
)
_ALL = click.option("--all", "every", is_flag=True, help="Every fix.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
_NAMES = click.argument("names", nargs=-1, metavar="[NAME...]")


@click.group("fix")
def command() -> None:
    """Check, apply and revert source fixes of deployed engines.

    Exit codes: 0 applied, not needed or reverted; 1 not applied or failed; 2 drifted, or called wrongly.
    """


@command.command("list")
def list_fixes() -> None:
    """Print the fixes, what they affect and what goes wrong."""
    for fix in _chosen((), every=True):
        facts = fix.facts
        click.echo(f"{facts.name}: {facts.distribution} {', '.join(facts.releases)}")
        click.echo(f"  {facts.summary}")


@command.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print a fix's page."""
    fix = _chosen((name,), every=False)[0]
    click.echo(_module("fixpages").page(fix.facts), nl=False)


@command.command("check")
@_NAMES
@_ALL
@_ROOT
@_ANY_RELEASE
@_JSON
def check(names: tuple[str, ...], every: bool, root: Path | None, any_release: bool, as_json: bool) -> int:
    """Say how fixes stand, and write nothing."""
    return _tell([fix.check(root, any_release) for fix in _chosen(names, every)], as_json)


@command.command("apply")
@_NAMES
@_ALL
@_ROOT
@_ANY_RELEASE
@_JSON
def apply(names: tuple[str, ...], every: bool, root: Path | None, any_release: bool, as_json: bool) -> int:
    """Apply fixes that are neither applied nor unneeded."""
    return _tell([fix.apply(root, any_release) for fix in _chosen(names, every)], as_json)


@command.command("revert")
@_NAMES
@_ALL
@_ROOT
@_JSON
def revert(names: tuple[str, ...], every: bool, root: Path | None, as_json: bool) -> int:
    """Undo fixes that are applied."""
    return _tell([fix.revert(root) for fix in _chosen(names, every)], as_json)


def fixes_folder() -> Path:
    """Find the fixes: in the installed package, or beside ``src/`` in a checkout."""
    package = Path(loadproof.__file__).parent
    for folder in (package / "fixes", package.parents[1] / "fixes"):
        if (folder / "fixlib.py").is_file():
            return folder
    raise FileNotFoundError("this installation has no fixes")


def _chosen(names: tuple[str, ...], every: bool) -> list[Any]:
    """Load the fixes of these names, or all."""
    if every == bool(names):
        raise click.UsageError("give the names of fixes, or --all")
    folders = {folder.name: folder for folder in _module("fixfacts").folders(fixes_folder())}
    unknown = [name for name in names if name not in folders]
    if unknown:
        raise click.UsageError(f"no fix {', '.join(unknown)}; there are {', '.join(folders)}")
    return [_load(folders[name]) for name in dict.fromkeys(names or folders)]


def _module(name: str) -> Any:
    """Import a module of the fixes, which aren't a package: they also run where there is no loadproof."""
    folder = str(fixes_folder())
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _load(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"fix of {folder.name}", folder / "apply.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FIX


def _tell(reports: list[Any], as_json: bool) -> int:
    """Print the reports and give the worst of their exit codes."""
    fixcli = _module("fixcli")
    for report in reports:
        fixcli.say(fixcli.as_json(report) if as_json else fixcli.as_text(report))
    return max(int(fixcli.CODES[report.status]) for report in reports)
