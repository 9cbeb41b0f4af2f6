"""The task of `make grpo`, for the program that makes the model and the one that trains it."""

LETTERS = "abcdefgh"
#: Letters of an answer.
LENGTH = 8


def prompt_of(letter: str) -> str:
    """The prompt that asks for a letter."""
    return f"repeat {letter}:"


def share(prompt: str, text: str) -> float:
    """The share of an answer's letters that are the one that was asked for."""
    return text.count(prompt[-2]) / LENGTH
