"""Writes the fixes' pages from their data: ``fixes/*/README.md``, ``fixes/README.md`` and ``docs/fixes.md``.

``python fixes/fixpages.py`` writes them; with ``--check`` it writes nothing, and exits 1 if one is stale.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import fixfacts
from fixfacts import Facts

_ROOT = Path(__file__).resolve().parent
_INTRO = """\
Source fixes for deployed engines: for operators who run a released engine for months while a fix waits
upstream. Each is applied, checked and reverted by one command, edits one statement that it finds in the
syntax tree, and leaves the rest of the file byte for byte as it was.

"""
_USE = """
## Use

Copy or mount this folder where the engine runs. It needs nothing but Python 3.9 or later:

    python3 fixes/NAME/apply.py --check    # writes nothing: 0 applied or not needed, 1 not applied, 2 drifted
    python3 fixes/NAME/apply.py            # applies the fix; then restart the engine
    python3 fixes/NAME/apply.py --revert   # gives the file its bytes back
    python3 fixes/NAME/apply.py --diff     # prints the change as a patch, for `patch -p1` in an image's build

`--root DIR` names a site-packages folder or a source checkout; by default it is where this Python finds the
engine, which is never imported. `--json` prints one JSON object. Where loadproof is installed, `loadproof
fix` with `list`, `show`, `check`, `apply` or `revert` does the same, by name or for `--all`.

A file that is neither in the known faulty form nor right, or is of a release that the fix doesn't know, is
left alone: exit 2 says why. `--any-release` goes by the code alone. What a fix needs to go back lies beside
the file in `.loadproof-fixes`. An upgrade of the engine overwrites its fixes: check again after it.

Exit codes: 0 applied, not needed or reverted; 1 not applied or failed; 2 drifted; 64 called wrongly, by an
older Python, or from a folder that wasn't copied whole.
"""


def page(facts: Facts) -> str:
    """Give one fix's page."""
    releases = ", ".join(f"v{release}" for release in facts.releases)
    table = (
        ("Affects", facts.distribution),
        ("Releases", releases),
        ("Patches", f"`{facts.file}`: {facts.patches}"),
        ("Upstream", f"[{facts.upstream}]({facts.upstream_url}), {facts.upstream_state}"),
        ("Test", f"`{facts.test}`"),
    )
    commands = f"    python3 fixes/{facts.name}/apply.py --check\n    python3 fixes/{facts.name}/apply.py"
    sections = (
        ("Problem", facts.problem),
        ("Symptom", facts.symptom),
        ("Who is affected", facts.affected),
        ("The fix", facts.fix),
        ("Verify", [commands, *facts.verify]),
    )
    rows = "".join(f"| {label} | {value} |\n" for label, value in table)
    text = "".join(
        f"\n## {title}\n\n" + "\n\n".join(map(_wrap, paragraphs)) + "\n" for title, paragraphs in sections
    )
    return f"# {facts.name}\n\n{facts.summary}\n\n| | |\n| --- | --- |\n{rows}{text}"


def index(all_facts: list[Facts], link: str) -> str:
    """Give the table of all fixes and how to use them; ``link`` leads to a fix's page, given its name."""
    head = "| fix | affects | releases | upstream | what goes wrong |\n| --- | --- | --- | --- | --- |\n"
    rows = "".join(
        f"| [{facts.name}]({link.format(facts.name)}) | {facts.distribution} "
        f"| {', '.join(f'v{release}' for release in facts.releases)} "
        f"| [{facts.upstream}]({facts.upstream_url}), {facts.upstream_state} | {facts.summary} |\n"
        for facts in all_facts
    )
    return f"# Fixes\n\n{_INTRO}{head}{rows}{_USE}"


def pages(root: Path) -> dict[Path, str]:
    """Give every generated file of a folder of fixes, and its text."""
    all_facts = [fixfacts.read(folder) for folder in fixfacts.folders(root)]
    texts = {root / facts.name / "README.md": page(facts) for facts in all_facts}
    texts[root / "README.md"] = index(all_facts, "{}/README.md")
    details = "".join(
        "\n" + page(facts).replace("\n## ", "\n### ").replace("# ", "## ", 1) for facts in all_facts
    )
    texts[root.parent / "docs" / "fixes.md"] = index(all_facts, "#{}") + details
    return texts


def _wrap(paragraph: str) -> str:
    if paragraph.startswith("    "):
        return paragraph
    return textwrap.fill(paragraph, 110, break_long_words=False, break_on_hyphens=False)


def main(args: list[str]) -> int:
    """Write the pages, or check them."""
    stale = {path: text for path, text in pages(_ROOT).items() if _read(path) != text}
    for path, text in stale.items():
        print(f"{'stale' if '--check' in args else 'wrote'}: {path.relative_to(_ROOT.parent)}")
        if "--check" not in args:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in args else 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
