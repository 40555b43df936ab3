"""Finds places where a text can be cut so that the tokens of its parts are exactly the tokens of the whole text.

A cut is between a letter or digit and a character that is never in the same token, such as a space or a comma. A place
is a cut

* if the pre-tokenizer always splits there (`WORDS`: none of these expressions matches a letter or digit together with
  the character after a cut, none looks back, and none looks ahead beyond white space), or
* if the pre-tokenizer never splits, and no token of a BPE vocabulary has the two characters side by side: then no merge
  crosses the cut, and merges on one side do not depend on the other side.

Some tokenizers treat the start of a text differently: so each part begins with the character before the cut, and the
tokens of this character are removed again. Texts for tokenizers of other kinds are not cut.
"""

import re
from collections.abc import Iterator
from typing import Any

SLICE_CHARACTERS = 8192
SPACE = "\u2581"  # SentencePiece's character for a space

# Letters that normalization does not change, without combining marks: Latin, Cyrillic, kana, Han, Hangul.
LETTERS = "A-Za-z\u0400-\u0481\u048a-\u04ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
BREAKS = " \n\t,;:!?\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f"

_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Alternatives of the regular expressions by which families of byte-level tokenizers split text.
WORDS = frozenset(
    [
        r" ?\p{L}+", rf"{_PREFIX}\p{{L}}+", rf"{_PREFIX}[\p{{L}}\p{{M}}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        *(rf"{_PREFIX}{_UPPER}*{_LOWER}+{end}" for end in ("", _ENDINGS + "?")),
        *(rf"{_PREFIX}{_UPPER}+{_LOWER}*{end}" for end in ("", _ENDINGS + "?")),
    ]
)  # fmt: skip
NUMBERS = frozenset([r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"])
OTHERS = frozenset(
    [
        _ENDINGS, "'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "[0-9][0-9][0-9]",
        r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip


def slices(text: str, cut: re.Pattern[str] | None) -> Iterator[tuple[int, int]]:
    """Return the starts and ends of parts of about `SLICE_CHARACTERS`; a part is longer if it has no cut there."""
    start = 0
    while start < len(text) or not text:
        end = _end(text, start, cut) if cut and len(text) - start > SLICE_CHARACTERS else len(text)
        yield start, end
        if end == len(text):
            return
        start = end


def _end(text: str, start: int, cut: re.Pattern[str]) -> int:
    """Return the last cut of the slice that begins at `start`, or else the next cut, or else the text's end."""
    middle, end = start + SLICE_CHARACTERS // 2, start + SLICE_CHARACTERS
    if found := [match.end() for match in cut.finditer(text, middle, end)]:
        return found[-1]
    while end < len(text):  # in pieces: a search holds the interpreter until it returns
        if match := cut.search(text, end - 1, end + SLICE_CHARACTERS):
            return match.end()
        end += SLICE_CHARACTERS - 1
    return len(text)


def find_cuts(content: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern for the character before a cut, for the tokenizer.json `content`; None if it allows no cuts."""
    normalizers, stages, model = parts(content.get("normalizer")), parts(content.get("pre_tokenizer")), content["model"]
    if model.get("dropout") or model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return None
    spells_spaces = any(is_space_replacement(step) for step in normalizers)
    if not all(is_space_replacement(step) or step["type"] in ("NFC", "NFKC", "Prepend") for step in normalizers):
        return None
    if [stage["type"] for stage in stages] == ["Metaspace"] and stages[0].get("split", True):
        before, breaks = LETTERS + "0-9", " "
    elif stages and not spells_spaces and _splits_words(stages):
        before, breaks = LETTERS + "0-9", BREAKS
    elif model.get("type") == "BPE" and _keeps_spaces(stages, spells_spaces):
        before, breaks = _letters_before_no_space(model["vocab"]), " "
    else:
        return None
    return _unless_in_added_tokens(before, breaks, content.get("added_tokens") or [])


def parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps in a normalizer or pre-tokenizer, which may be a sequence of them."""
    if step is None:
        return []
    for name in ("normalizers", "pretokenizers"):
        if step["type"] == "Sequence" and name in step:
            return [part for each in step[name] for part in parts(each)]
    return [step]


def is_space_replacement(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == SPACE


def _splits_words(stages: list[dict[str, Any]]) -> bool:
    """Whether these pre-tokenizers split at every cut, and treat each side of it independently."""
    splits_words = splits_numbers = False
    for stage in stages:
        match stage:
            case {"type": "ByteLevel"}:
                splits_words |= stage.get("use_regex", True)
                splits_numbers |= stage.get("use_regex", True)
            case {"type": "Digits"}:
                splits_numbers = True
            case {"type": "Punctuation", "behavior": "Contiguous" | "Isolated"}:
                pass
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"} if not stage["invert"]:
                alternatives = set(_alternatives(pattern))
                if not alternatives <= WORDS | NUMBERS | OTHERS:
                    return False
                splits_words |= not alternatives.isdisjoint(WORDS)
                splits_numbers |= not alternatives.isdisjoint(NUMBERS)
            case _:
                return False
    return splits_words and splits_numbers


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression: the parts between bars outside its brackets."""
    found, depth = [""], 0
    for token in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


def _keeps_spaces(stages: list[dict[str, Any]], spells_spaces: bool) -> bool:
    """Whether the whole text between control tokens is one word, with spaces written as in SentencePiece."""
    match stages:
        case []:
            return spells_spaces
        case [{"type": "Metaspace", "split": False}]:
            return True
        case [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
        ]:  # no space is left to split at
            return spells_spaces
    return False


def _letters_before_no_space(vocabulary: dict[str, int]) -> str:
    """Return the letters that are tokens themselves and that are never before a space inside a token."""
    joined = {pair for token in vocabulary for pair in re.findall(rf"[A-Za-z](?={SPACE})", token)}
    letters = map(chr, (*range(ord("A"), ord("Z") + 1), *range(ord("a"), ord("z") + 1)))
    return "".join(letter for letter in letters if letter in vocabulary and letter not in joined)


def _unless_in_added_tokens(before: str, breaks: str, added: list[dict[str, Any]]) -> re.Pattern[str] | None:
    """Return the pattern of a cut, unless an added token contains a cut or ends where a cut would be.

    After an added token a new text begins for the tokenizer, and some added tokens include the white space after them.
    """
    inside_or_end = re.compile(rf"[{before}](?:[{re.escape(breaks)}{SPACE}]|\Z)")
    if not before or any(inside_or_end.search(token["content"]) for token in added):
        return None
    return re.compile(rf"[{before}](?=[{re.escape(breaks)}])")
