"""The route of OpenAI's Responses API."""

from octavo.gateway.asking.prepare import prepare_prompts
from octavo.gateway.http.generate import GeneratingDoor
from octavo.gateway.responses.answers import ResponseWriter, error_event
from octavo.gateway.responses.ask import ask_responses
from octavo.gateway.responses.types import responses_decoder

RESPONSES = GeneratingDoor(
    name="responses",
    decoder=responses_decoder,
    ask=ask_responses,
    prepare=prepare_prompts,
    renderer=ResponseWriter,
    id_prefix="resp",
    error_event=error_event,
)
