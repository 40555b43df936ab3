"""What a server is asked to do, written down so that another server can be asked the same."""

from pathlib import Path
from typing import Literal

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One load. Lengths are texts as `bench.serve.lengths` reads them; a rate or a concurrency is set, or neither.

    With neither all requests are sent at once. `dataset` is the path of a file that prompts come from; without one
    they are random words, `prefix_len` of which are shared by all requests that have the same of `num_prefixes`.
    """

    num_prompts: int = 100
    max_concurrency: int | None = None  # requests under way at a time
    request_rate: float | None = None  # arrivals a second, Poisson
    endpoint: Literal["completions", "chat"] = "completions"
    input_len: str = "128"
    output_len: str = "64"
    prefix_len: int = 0  # tokens before those of input_len
    num_prefixes: int = 1
    dataset: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """The load in short: requests/concurrency/prompt/output, what is not so marked."""
        arrivals = f"{self.request_rate:g} a second" if self.request_rate else str(self.max_concurrency or "all")
        shared = f"{self.prefix_len} shared+" if self.prefix_len else ""
        prompt = f"{shared}{self.input_len}" if self.dataset is None else Path(self.dataset).name
        chat = " (chat)" if self.endpoint == "chat" else ""
        return f"{self.num_prompts}/{arrivals}/{prompt}/{self.output_len}{chat}"
