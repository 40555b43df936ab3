"""The routes of Anthropic's Messages API."""

from octavo.gateway.anthropic.answers import MessageWriter, error_event
from octavo.gateway.anthropic.messages import ask_count, ask_messages
from octavo.gateway.anthropic.types import CountRequest, TokenCount, count_decoder, encode, messages_decoder
from octavo.gateway.asking.encode import PreparedPrompt, encode_only
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.asking.prepare import prepare_prompts
from octavo.gateway.http.generate import GeneratingDoor
from octavo.gateway.http.tokenization import TokenDoor


def _write_count(body: CountRequest, prompt: PreparedPrompt, model: ServedModel) -> bytes:
    return encode(TokenCount(len(prompt.token_ids)))


MESSAGES = GeneratingDoor(
    name="messages",
    decoder=messages_decoder,
    ask=ask_messages,
    prepare=prepare_prompts,
    renderer=MessageWriter,
    id_prefix="msg",
    error_event=error_event,
)
COUNT_TOKENS = TokenDoor(
    name="count_tokens", decoder=count_decoder, ask=ask_count, prepare=encode_only, write=_write_count
)
