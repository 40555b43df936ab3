"""transformers' notices and progress bars: silent, or ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers.utils import logging

from octavo.executor.models.progress_bars import tqdm_disable


@contextmanager
def quiet(progress: bool | None, title: str = "") -> Iterator[None]:
    """Let transformers say nothing below an error, and let its bar be ours: `title` names it, "" shows none.

    `progress` is as in `executor.models.load_model`. Restores what was before.
    """

    def make(_: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        options = {"desc": title, "unit": "tensor", "disable": True if not title else tqdm_disable(progress)}
        return tqdm(*arguments, **keywords | options)

    verbosity, hook = logging.get_verbosity(), logging.set_tqdm_hook(make)
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)


def silence_padding_notice(model: Any) -> None:
    """Keep modelling code from looking for padding among its token ids in every step, which waits for a GPU."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing


def _say_nothing(*_: object) -> None:
    """Stand for a notice."""
