"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 pair", "2 pairs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
