"""Where the tokens of an echoed prompt begin in its text."""

import pytest

from octavo.gateway.openai.logprobs import CompletionLogprobsWriter
from octavo.gateway.text.delta import TokenLogprob
from octavo.gateway.text.tokenizer import Tokenizer


def offsets(tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
    """Return the tokens of `text` with their offsets, and where the text goes on behind them."""
    token_ids = tokenizer.encode_now(text)
    writer = CompletionLogprobsWriter(tokenizer, skip_special_tokens=True)
    lists = writer.write_prompt(text, token_ids, [TokenLogprob(token_id, -1.0, 1) for token_id in token_ids])
    behind = writer.write([token_ids[-1]], [TokenLogprob(token_ids[-1], -1.0, 1)]).text_offset
    assert behind == [len(text)]
    return list(zip(lists.tokens, lists.text_offset, strict=True))


def test_a_special_token_has_the_place_that_the_prompt_gives_it(demo: Tokenizer) -> None:
    assert offsets(demo, "a<|endoftext|>b") == [("a", 0), ("<|endoftext|>", 1), ("b", 14)]


def test_what_the_tokenizer_puts_before_a_prompt_has_no_place(metaspace: Tokenizer) -> None:
    (first, begin), (second, then), *_ = offsets(metaspace, "the quick")
    assert (first, begin, second[0], then) == ("<s>", 0, " ", 0)
    assert [offset for _, offset in offsets(metaspace, "<s>the")][:2] == [0, 3]


@pytest.mark.parametrize("text", ["the quick brown fox", " two  spaces", "é 龜 </s> stop", "<s></s>"])
def test_each_token_begins_where_its_own_text_does(metaspace: Tokenizer, demo: Tokenizer, text: str) -> None:
    for tokenizer in (metaspace, demo):
        for token, offset in offsets(tokenizer, text):
            if not token.startswith("bytes:") and token.strip() in text and offset:
                assert text.startswith((token, token.strip()), offset)
