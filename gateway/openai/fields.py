"""What the fields of a body mean, a sentence each, for the description of the API."""

NO_EFFECT = "Accepted, without effect."

MEANINGS = {
    "model": "A served name of the model; the first of them if absent.",
    "messages": "The conversation, for the model's chat template.",
    "prompt": "The text, or its token ids.",
    "input": "The texts to make vectors of, or their token ids.",
    "encoding_format": "float, or base64 of float32 numbers. Unset: float.",
    "dimensions": "Take only so many numbers of each vector, and make it of length 1 again.",
    "tokens": "The token ids to turn into text.",
    "n": "How many answers to each prompt.",
    "max_tokens": "The most tokens to generate. Unset: 16 on completions, all that fit on chat.",
    "max_completion_tokens": "Another name of max_tokens.",
    "min_tokens": "No stop token is taken before there are this many tokens.",
    "temperature": "0 takes the likeliest token. Unset sampling fields are as the model's generation config says.",
    "top_p": "Take one of the likeliest tokens that together have this probability.",
    "top_k": "Take one of this many of the likeliest tokens; 0 and -1 are off.",
    "min_p": "Leave out tokens whose probability is less than this share of the likeliest token's.",
    "presence_penalty": "Subtracted once from the logit of each token that was generated.",
    "frequency_penalty": "Subtracted from the logit of a token for each time that it was generated.",
    "repetition_penalty": "Divides the logits of tokens of the prompt and the answer; 1 is off.",
    "seed": "The same seed gives the same tokens. Unset: one is drawn for each prompt.",
    "stop": "End before one of these texts; all together may have 4,096 characters.",
    "stop_token_ids": "End at one of these tokens.",
    "ignore_eos": "Do not end at the model's own end of text.",
    "include_stop_str_in_output": "Show the stop string that ended the answer.",
    "skip_special_tokens": "Leave special tokens out of the text. Unset: true.",
    "logit_bias": "Added to the logits of tokens, by their id as a string.",
    "stream": "Answer with server-sent events, each with what is new.",
    "stream_options": "Needs stream.",
    "include_usage": "End the stream with a chunk that has the usage.",
    "continuous_usage_stats": "With include_usage: each chunk has the usage so far.",
    "cache_salt": "Prefixes of requests with different salts are kept apart in the prefix cache.",
    "logprobs": "On chat, whether each token has its log probability; on completions, of how many likeliest tokens.",
    "top_logprobs": "Of how many likeliest tokens; needs logprobs.",
    "echo": "Begin the answer with the prompt.",
    "add_generation_prompt": "End the prompt with the start of an answer. Unset: true, or false to continue a message.",
    "continue_final_message": "The answer goes on with the last message.",
    "chat_template_kwargs": "Values for the chat template.",
    "add_special_tokens": "Put the tokenizer's own tokens, such as BOS, around a text. Unset: true. Not for messages.",
    "return_token_strs": "Answer with the names of the tokens in the vocabulary too.",
    "role": "Who speaks.",
    "content": "The text, or parts of it, which are joined as they are. Only an assistant's may be absent.",
    "name": "The speaker's name, for templates that show it.",
    "type": "The kind of the part.",
    "text": "The text of the part.",
}

ADVISORY = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prompt_cache_breakpoint",
    "moderation",
    "id",
    "timestamp",
    "created_at",
    "annotations",
    "cache_control",
    "provider_specific_fields",
)


def meaning(name: str) -> str:
    """Return a sentence about a field of a body. Raises KeyError if nobody wrote one."""
    return NO_EFFECT if name in ADVISORY else MEANINGS[name]
