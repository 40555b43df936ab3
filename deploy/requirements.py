"""Print what pyproject.toml wants for some extras, for `pip install --requirement`: a layer that code does not change.

python deploy/requirements.py gateway
python deploy/requirements.py executor --without triton
"""

import argparse
import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the requirements of some extras, the base included.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a distribution to leave out")
    arguments = parser.parse_args()
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in arguments.extras:
        wanted += project["optional-dependencies"][extra]
    print("\n".join(line for line in wanted if distribution(line) not in arguments.without))


def distribution(requirement: str) -> str:
    """Return the name that `requirement` begins with."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    main()
