"""Which tokens end an answer. A GGUF file's eos may only end the texts of its training, so other tokens count too."""

import logging

from octavo.errors import ModelError
from octavo.models.convert.metadata import GGUFFile

logger = logging.getLogger(__name__)

STATED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Tokens that end a turn or a text in every vocabulary that has them. llama.cpp goes by these names too
# (`special_eog_ids` in src/llama-vocab.cpp).
NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
        *("<|im_end|>", "<|endoftext|>"),  # ChatML
        *("</s>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    }
)


def end_token_ids(file: GGUFFile, tokens: list[str], special_tokens: dict[str, str], control: list[str]) -> list[int]:
    """Return the ids of all tokens that end an answer, in order.

    These are the tokens that the file names, the tokens whose text says so, and the control token that the chat
    template puts behind an answer. `special_tokens` are the tokens that the template sees, `control` the texts of
    control tokens.
    """
    stated = {token_id for name in STATED if (token_id := file.token_id(name)) is not None}
    end_of_turn = _end_of_turn(file, special_tokens, control)
    found = stated | {token_id for token_id, token in enumerate(tokens) if token in NAMES or token == end_of_turn}
    if not found:
        logger.warning(
            "%s names no token that ends an answer, and none is known: answers go on to max_tokens or a `stop`",
            file.path,
        )
    return sorted(found)


def _end_of_turn(file: GGUFFile, special_tokens: dict[str, str], control: list[str]) -> str | None:
    """Return the control token with which the chat template ends an answer, if it does."""
    from octavo.gateway.text.chat_template import ChatTemplate
    from octavo.gateway.text.end_of_turn import end_of_turn

    try:
        template = ChatTemplate(file.get("tokenizer.chat_template", str), special_tokens)
    except ValueError:  # the gateway says what is wrong with the template
        return None
    try:
        return end_of_turn(template, control)
    except ValueError as error:
        raise ModelError(f"{file.path}: {error}. Give another file of the model.") from None
