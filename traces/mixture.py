"""Lengths as a mixture of lognormals, input and output together.

The logarithms of (input, output) are a mixture of normal distributions with full covariance: each component is a kind
of request with its typical prompt and answer and how they go together. Fit by expectation maximisation for 1 to 8
components on at most 8,000 rows; the Bayesian information criterion picks. A component is never narrower than 2 %, so
a length that many requests share exactly becomes a spike of that width and not a singularity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traces.burstiness import Floats

_SIZES = (1, 2, 3, 4, 6, 8)
_MOST_ROWS = 8000
_ROUNDS = 60
_NARROWEST = 0.02


class Mixture(NamedTuple):
    """K components in d dimensions of logarithms."""

    weights: Floats  # K, sum 1
    means: Floats  # K × d
    covariances: Floats  # K × d × d


def fit(tokens: Floats, generator: np.random.Generator) -> Mixture:
    """Fit a mixture to token counts above 0 (rows × d)."""
    logs = np.log(tokens)
    if len(logs) > _MOST_ROWS:
        logs = logs[generator.choice(len(logs), _MOST_ROWS, replace=False)]
    best, least = None, np.inf
    width = logs.shape[1]
    for size in _SIZES:
        if size > max(1, len(logs) // 20):
            break
        found, likelihood = _maximise(logs, size, generator)
        free = size * (1 + width + width * (width + 1) // 2) - 1
        criterion = -2 * likelihood + free * np.log(len(logs))
        if criterion < least:
            best, least = found, criterion
    assert best is not None
    return best


def _maximise(logs: Floats, size: int, generator: np.random.Generator) -> tuple[Mixture, float]:
    rows, width = logs.shape
    means = logs[_apart(logs, size, generator)]
    covariances = np.repeat(
        (np.cov(logs.T).reshape(width, width) / size + np.eye(width) * _NARROWEST)[None], size, axis=0
    )
    found, before = Mixture(np.full(size, 1 / size), means, covariances), -np.inf
    likelihood = before
    for _ in range(_ROUNDS):
        log_fit = _log_density(logs, found)
        top = log_fit.max(axis=1, keepdims=True)
        share = np.exp(log_fit - top)
        total = share.sum(axis=1, keepdims=True)
        likelihood = float((top + np.log(total)).sum())
        share /= total
        mass = share.sum(axis=0) + 1e-9
        means = share.T @ logs / mass[:, None]
        off = logs[:, None, :] - means
        covariances = np.einsum("nk,nki,nkj->kij", share, off, off) / mass[:, None, None]
        covariances += np.eye(width) * _NARROWEST**2
        found = Mixture(mass / mass.sum(), means, covariances)
        if likelihood - before < 1e-4 * rows:
            break
        before = likelihood
    return found, likelihood


def _apart(logs: Floats, size: int, generator: np.random.Generator) -> np.typing.NDArray[np.intp]:
    """Rows far from each other to start from (k-means++)."""
    chosen = [int(generator.integers(len(logs)))]
    for _ in range(size - 1):
        nearest = np.min([np.square(logs - logs[row]).sum(axis=1) for row in chosen], axis=0)
        total = nearest.sum()
        chosen.append(int(generator.choice(len(logs), p=nearest / total if total > 0 else None)))
    return np.array(chosen)


def _log_density(logs: Floats, mixture: Mixture) -> Floats:
    """Logarithm of weight × density of every row in every component."""
    columns = []
    for weight, mean, covariance in zip(*mixture, strict=True):
        root = np.linalg.cholesky(covariance)
        solved = np.linalg.solve(root, (logs - mean).T)
        norm = np.log(np.diag(root)).sum() + 0.5 * len(mean) * np.log(2 * np.pi)
        columns.append(np.log(weight) - norm - 0.5 * np.square(solved).sum(axis=0))
    return np.stack(columns, axis=1)


def draw(mixture: Mixture, rows: int, generator: np.random.Generator) -> Floats:
    """Token counts (rows × d), not yet rounded."""
    component = generator.choice(len(mixture.weights), size=rows, p=mixture.weights / mixture.weights.sum())
    roots = np.linalg.cholesky(mixture.covariances)
    normal = generator.standard_normal((rows, mixture.means.shape[1]))
    logs = mixture.means[component] + np.einsum("nij,nj->ni", roots[component], normal)
    return np.asarray(np.exp(logs))
