"""Pages of documentation: what is made from the source is as the source says, and links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_OURS = {"build", "dist", "shared"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the repository's pages; folders that are links are the same pages again."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS]
    found = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return sorted(page for page in found if page.resolve() == page.absolute())


def prose(page: Path) -> str:
    """Return the text of `page` without its blocks of code."""
    return CODE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings of `page` can be linked to."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    return {heading.replace(" ", "-") for heading in plain}


def test_the_page_of_settings_is_what_the_source_says() -> None:
    made = subprocess.run(
        [sys.executable, "docs/settings.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs/settings.md").read_text() == made, "run `make docs`"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading"


def test_pages_are_at_most_120_characters_wide() -> None:
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages()
        for number, line in enumerate(prose(page).splitlines(), 1)
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not wide
