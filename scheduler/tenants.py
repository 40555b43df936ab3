"""How much each tenant has been served, to choose whose sequence is preempted."""


class TenantUsage:
    """Counts tokens for the tenants that have a sequence here.

    Each token counts once, however often it is computed: if recomputing changed the order, two tenants could preempt
    each other for ever. A new tenant starts with the count of the least served tenant present, so that newcomers do
    not preempt everybody who has waited.
    """

    def __init__(self) -> None:
        self._num_served_tokens: dict[str, int] = {}
        self._num_seqs: dict[str, int] = {}

    def join(self, tenant: str) -> None:
        """A sequence of this tenant has come."""
        if tenant not in self._num_seqs:
            self._num_served_tokens[tenant] = min(self._num_served_tokens.values(), default=0)
            self._num_seqs[tenant] = 0
        self._num_seqs[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of this tenant has ended."""
        self._num_seqs[tenant] -= 1
        if not self._num_seqs[tenant]:
            del self._num_seqs[tenant], self._num_served_tokens[tenant]

    def serve(self, tenant: str, num_tokens: int) -> None:
        self._num_served_tokens[tenant] += num_tokens

    def num_served_tokens(self, tenant: str) -> int:
        return self._num_served_tokens[tenant]

    @property
    def num_seqs(self) -> int:
        return sum(self._num_seqs.values())
