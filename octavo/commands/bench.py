"""`octavo bench`: the measurements, one module of `bench/` each. Only the typed measurement's module is imported."""

import argparse
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.protocol.extras import require_extras
from octavo.protocol.process import ArgumentParser


class Measurement(NamedTuple):
    summary: str
    extras: tuple[str, ...] = ()  # whose packages its module imports


MEASUREMENTS = {
    "serve": Measurement("load a running server of OpenAI's API", ("bench",)),
    "step": Measurement("time the executor alone, against the floor of this machine", ("executor",)),
    "gateway": Measurement("time the gateway alone", ("gateway",)),
    "scheduler": Measurement("time the scheduler alone"),
}


class MeasurementParser(ArgumentParser):
    """A parser that imports the module `octavo.bench.NAME` for its flags when it has to parse."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        name = self.prog.split()[-1]
        require_extras(self.prog, *MEASUREMENTS[name].extras)
        module = importlib.import_module(f"octavo.bench.{name}")
        self.description = module.SUMMARY
        module.describe(self)
        return super().parse_known_args(args, namespace)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure a running server, or one part of Octavo alone."
    measurements = parser.add_subparsers(title="measurements", metavar="NAME", parser_class=MeasurementParser)
    for name, measurement in MEASUREMENTS.items():
        measurements.add_parser(name, help=measurement.summary)

    def show(flags: Mapping[str, Any]) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show)
