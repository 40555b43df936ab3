"""How much each tenant has been served, for choosing who gives way."""


class TenantUsage:
    """Counts tokens for the tenants that have a sequence here.

    Each token counts once, however often it is computed: recomputing must not change who gives way, or two tenants
    could push each other out for ever. A tenant that comes starts level with the least served of those present, so
    that those who have waited are not pushed out by every newcomer.
    """

    def __init__(self) -> None:
        self._num_served_tokens: dict[str, int] = {}
        self._num_seqs: dict[str, int] = {}

    def join(self, tenant: str) -> None:
        """A sequence of this tenant comes."""
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
