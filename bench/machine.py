"""Where and with what something was measured, for the results."""

from datetime import UTC, datetime
from itertools import islice

import msgspec

from octavo.environment import sections


class Place(msgspec.Struct, frozen=True):
    """The machine and the versions that a result stands for. `cpu` has its name, cores and memory in words."""

    date: str  # UTC, ISO 8601
    octavo: str
    python: str
    cpu: dict[str, str]
    system: dict[str, str]
    packages: dict[str, str]


def this_place() -> Place:
    """Return what there is to know of this machine and installation, now."""
    named = dict(islice(sections(), 4))  # the further ones take long
    return Place(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        octavo=named["Octavo"]["version"],
        python=named["Octavo"]["Python"].split()[0],
        cpu=dict(named["CPU and memory"]),
        system=dict(named["System"]),
        packages=dict(named["Packages"]),
    )
