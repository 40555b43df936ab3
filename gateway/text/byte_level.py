"""The characters by which byte-level vocabularies write bytes."""


def _bytes_of_characters() -> dict[str, bytes]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's `bytes_to_unicode`, reversed)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTES_OF_CHARACTERS = _bytes_of_characters()
