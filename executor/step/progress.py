"""How far the running step has come."""

from dataclasses import dataclass, field

from octavo.protocol.lifeline import Heart


@dataclass(slots=True)
class StepProgress:
    """How far the running step has come. The main thread writes, the reporter reads: either number may lag.

    `heart` beats when there is progress or nothing to do. It does not beat while a device is waited for.
    """

    heart: Heart = field(default_factory=Heart)
    step_id: int = 0
    layers_done: int = 0

    def count_layers(self, num_layers: int) -> None:
        """Count layers that were done in one call."""
        self.layers_done += num_layers
        self.heart.beat()
