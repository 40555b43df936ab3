"""Writes a text as one line: escapes replace every character that some program takes for the end of a line."""

import re

ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"} | {
    character: f"\\u{ord(character):04x}" for character in "\v\f\x1c\x1d\x1e\x85\u2028\u2029"
}
CHARACTERS = {escape: character for character, escape in ESCAPES.items()}
ESCAPED = re.compile("|".join(map(re.escape, CHARACTERS)))


def escape(text: str) -> str:
    """Return `text` as one line."""
    return text.translate({ord(character): shown for character, shown in ESCAPES.items()})


def unescape(line: str) -> str:
    """Undo `escape`. A backslash that does not begin an escape stays."""
    return ESCAPED.sub(lambda match: CHARACTERS[match[0]], line)
