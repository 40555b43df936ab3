"""generation_config.json: defaults for requests, and warnings about keys of the file that have no effect here.

A model without this file has the defaults of its config.json.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

logger = logging.getLogger(__name__)

FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """A model's defaults for fields that a request leaves out. None: the model's files do not set the field.

    The bounds are those of a request's fields.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0 are off
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


KEYS = {name: name for name in SamplingDefaults.__struct_fields__} | {"max_tokens": "max_new_tokens"}
# Keys that change the text in transformers, with the values that change nothing. Keys in neither table concern
# training, speed, memory or the form of transformers' answers.
NOT_HONOURED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "constraints": (None, []),
    "diversity_penalty": (None, 0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": (None, []),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, [], ""),
    "suppress_tokens": (None, []),
    "top_h": (None,),
    "typical_p": (None, 1),
    "watermarking_config": (None,),
}


def said_in_config(model: Mapping[str, Any], text_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation settings in config.json, for older models without generation_config.json.

    As in transformers, `model` wins over `text_model`, the text model inside it.
    """
    keys = (*KEYS.values(), *NOT_HONOURED)
    return {key: value for said in (text_model, model) for key in keys if (value := said.get(key)) is not None}


def own_defaults(path: Path, said: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults of a model's own file, whose content is `said`.

    The user did not write the file: a wrong value is left out, and the log names it.
    """
    kept = {}
    for name, key in KEYS.items():
        try:
            kept[name] = _value(name, said.get(key))
        except ValueError as error:
            logger.warning("%s: %s %s: not used", path, key, error)
    _warn_of_no_effect(path, said)
    return SamplingDefaults(**kept)


def chosen_defaults(path: Path, said: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults of a file that the operator named, with content `said`. Raises ValueError if it is wrong."""
    named = {}
    for name, key in KEYS.items():
        try:
            named[name] = _value(name, said.get(key))
        except ValueError as error:
            raise ValueError(
                f"{path}: {key} {error}. Put it right, or do without it: --generation-config octavo"
            ) from None
    _warn_of_no_effect(path, said)
    return SamplingDefaults(**named)


def _value(name: str, written: Any) -> Any:
    """Return a default as a value of a request's field. Raises ValueError for a wrong type or value."""
    try:
        value = getattr(msgspec.convert({name: written}, SamplingDefaults), name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("Expected a finite number")
    except ValueError as error:
        expected = str(error).split(" - at ")[0].removeprefix("Expected ").replace("`", "")
        raise ValueError(f"is {_shown(written)}, expected {expected}") from None
    return 0 if name == "top_k" and value == -1 else value


def _warn_of_no_effect(path: Path, said: Mapping[str, Any]) -> None:
    if ignored := sorted(key for key, neutral in NOT_HONOURED.items() if said.get(key) not in neutral):
        logger.warning("%s: no effect here: %s", path, ", ".join(ignored))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
