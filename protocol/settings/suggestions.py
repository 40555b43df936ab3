"""What to say about a name that does not exist: which existing name was probably meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher

from octavo.protocol.settings.other_servers import OTHER_NAMES, sentence

LEAST_LIKENESS = 0.65  # of the whole name, of 1
LEAST_WORD_LIKENESS = 0.58  # of each typed word; a beginning of a word, such as "mem" of "memory", counts as alike


def setting_suggestion(typed: str, known: Iterable[str]) -> str:
    """Return what to say about the unknown setting `typed`.

    A setting that only other servers have gets "; " and what to do instead, any other name a `suggestion`.
    """
    known = list(known)
    said = "" if _bare(typed) in map(_bare, known) else sentence(_bare(typed))
    return f"; {said}" if said else suggestion(typed, known)


def suggestion(typed: str, known: Iterable[str], *, least_likeness: float = LEAST_LIKENESS) -> str:
    """Return "; did you mean X?" with the name of `known` that is most like `typed`, or nothing if none is like it.

    Names may be flags (--max-num-seqs), variables (OCTAVO_MAX_NUM_SEQS), keywords (max_num_seqs) or values.
    """
    name, names = _bare(typed), {_bare(other): other for other in known}
    meant = OTHER_NAMES.get(name, "")
    if meant not in names:
        meant = max(
            (other for other in names if _means(name, other, least_likeness)),
            key=lambda other: _likeness(name, other),
            default="",
        )
    return f"; did you mean {names[meant]}?" if meant else ""


def _bare(name: str) -> str:
    return name.removeprefix("OCTAVO_").lower().replace("-", "_").strip("_")


def _means(typed: str, known: str, least_likeness: float) -> bool:
    """Return whether each typed word is like a word of `known`. One word that is like none rules `known` out."""
    if len(typed) < 3 or _likeness(typed, known) < least_likeness:
        return False
    words = known.split("_")
    return all(
        any(word.startswith(part) or _likeness(part, word) >= LEAST_WORD_LIKENESS for word in words)
        for part in typed.split("_")
    )


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, other, one).ratio()
