"""Measures and their standard errors, from the values of samples."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Measure(NamedTuple):
    value: float
    stderr: float | None  # None: there is but one sample
    samples: int


def measure(name: str, values: Sequence[Any]) -> Measure:
    """The mean of samples; of a perplexity or bits_per_byte, from log likelihoods or (log likelihood, words or bytes).

    A ratio Σx/Σw has the error of the sum of x − w·ratio, and a function of it its slope times as much.
    """
    perplexity, bits = name.endswith("perplexity"), name == "bits_per_byte"
    pairs = [value if isinstance(value, tuple | list) else (value, 1) for value in values]
    xs = [-float(x) if perplexity or bits else float(x) for x, _ in pairs]
    weights = [float(w) for _, w in pairs]
    n, total = len(xs), sum(weights)
    value = sum(xs) / total
    rest = sum((x - w * value) ** 2 for x, w in zip(xs, weights, strict=True))
    error = math.sqrt(rest * n / (n - 1)) / total if n > 1 else None
    slope = 1 / math.log(2) if bits else 1.0
    if perplexity:
        try:
            value = slope = math.exp(value)
        except OverflowError:  # of a model that is very sure and very wrong
            value = slope = math.inf
    elif bits:
        value *= slope
    return Measure(value, None if error is None else slope * error, n)
