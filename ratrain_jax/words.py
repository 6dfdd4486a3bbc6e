"""Words of messages."""


def counted(number: int, word: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "stage"), counted(4, "microbatch")
        ('1 stage', '4 microbatches')
    """
    if number == 1:
        return f"1 {word}"
    return f"{number} {word}{'es' if word.endswith(('ch', 'ss')) else 's'}"
