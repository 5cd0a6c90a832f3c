"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 pair", "2 pairs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(share: float, decimals: int = 1) -> str:
    """Return the fraction `share` as a percentage; zero has no sign: -1e-9 -> 0.0%."""
    return f"{share:z.{decimals}%}"
