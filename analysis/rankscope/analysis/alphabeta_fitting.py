"""The line T = α·steps + moved/β through points of which some lie. Relative errors count, because sizes span six orders
of magnitude: everything here measures the logarithm of actual over predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import MAD_TO_SIGMA, Floats

# Lines through two points each: enough that many of them join two honest ones, even if a third of all points lies.
_STARTS = 16
_JUDGES = 500
_ITERATIONS = 60
# Beyond so many deviations a point counts for nothing (Tukey's biweight).
_TUKEY = 4.685
# A spread below this is taken as this: real links are not so straight that a point 10 % off is no part of them.
_SMALLEST_SPREAD = 0.03
# A point further off than this (a factor of 2.7) is simply wrong; how wrong says nothing.
_CAP = 1.0
# So many standard errors from zero. A slope out of noise would be a bandwidth out of nothing.
_SURE_OF_ALPHA = 2.0
_SURE_OF_BETA = 4.0
_TINY = 1e-15


@dataclass(frozen=True)
class Line:
    alpha_seconds: float  # never below zero
    beta_bytes_per_second: float | None  # None where nothing surely grows with the size
    alpha_resolved: bool  # False: too small to be told from zero by these points
    loss: float  # mean of the capped squared deviations: to compare lines through the same points


def fit_line(step_count: Floats, moved: Floats, seconds: Floats) -> Line | None:
    """None where the points carry no line. It starts from the line through two of the points that leaves the smallest
    mean deviation, capped so that no point can spoil it, and refines that by those that lie near it."""
    usable = np.isfinite(seconds) & (seconds > 0) & np.isfinite(moved) & np.isfinite(step_count)
    step_count, moved, seconds = step_count[usable], moved[usable], seconds[usable]
    if len(seconds) < 2 or moved.max(initial=0.0) <= 0:
        return None
    unit = float(np.median(moved[moved > 0]))
    columns = np.stack([step_count, moved / unit], axis=1)
    solution = _start(columns, seconds)
    covariance = np.zeros((2, 2))
    for _ in range(_ITERATIONS):
        expected = np.maximum(columns @ solution, _TINY)
        deviation = np.log(seconds / expected)
        spread = max(MAD_TO_SIGMA * float(np.median(np.abs(deviation))), _SMALLEST_SPREAD)
        score = np.minimum(np.abs(deviation) / (_TUKEY * spread), 1.0)
        weights = (1 - score**2) ** 2 / expected**2
        before = solution
        # The time that would have this deviation if it were linear: a slow outlier pulls by its logarithm only.
        solution, covariance = _solve(columns, expected * (1 + deviation), weights)
        if np.allclose(before, solution, rtol=1e-10, atol=_TINY):
            break
    deviation = np.log(seconds / np.maximum(columns @ solution, _TINY))
    alpha, per_unit = solution.tolist()
    alpha_error, slope_error = np.sqrt(np.diag(covariance)).tolist()
    return Line(
        alpha_seconds=alpha,
        beta_bytes_per_second=unit / per_unit if per_unit > _SURE_OF_BETA * slope_error else None,
        alpha_resolved=alpha > _SURE_OF_ALPHA * alpha_error,
        loss=float(np.mean(np.minimum(np.abs(deviation), _CAP) ** 2)),
    )


def _start(columns: Floats, seconds: Floats) -> Floats:
    order = np.argsort(columns[:, 1] / np.maximum(columns[:, 0], _TINY), kind="stable")
    half = len(order) // 2
    low = order[np.unique(np.linspace(0, half - 1, min(half, _STARTS)).astype(int))]
    high = order[np.unique(np.linspace(half, len(order) - 1, min(len(order) - half, _STARTS)).astype(int))]
    one, other = (each.ravel() for each in np.meshgrid(low, high))
    (a, b), (c, d) = columns[one].T, columns[other].T
    size = a * d - b * c
    regular = np.abs(size) > 1e-12 * np.maximum(np.abs(a * d), _TINY)
    size = np.where(regular, size, 1.0)
    alpha = (seconds[one] * d - seconds[other] * b) / size
    slope = (seconds[other] * a - seconds[one] * c) / size
    candidates = np.stack([alpha, slope], axis=1)[regular]
    # Where a pair says "below zero", the pure latency and the pure bandwidth of each point stand in for it.
    candidates = candidates[(candidates >= 0).all(axis=1)]
    points = np.concatenate([low, high])
    ratio = np.divide(seconds, columns[:, 1], out=np.zeros_like(seconds), where=columns[:, 1] > 0)[points]
    wait = np.divide(seconds, columns[:, 0], out=np.zeros_like(seconds), where=columns[:, 0] > 0)[points]
    nothing = np.zeros(len(points))
    pure = [np.stack([nothing, ratio], axis=1), np.stack([wait, nothing], axis=1)]
    candidates = np.concatenate([candidates, *pure])
    judges = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _JUDGES)).astype(int))]
    expected = np.maximum(candidates @ columns[judges].T, _TINY)
    deviation = np.minimum(np.abs(np.log(seconds[judges] / expected)), _CAP).mean(axis=1)
    best: Floats = candidates[int(np.argmin(deviation))]
    return best


def _solve(columns: Floats, seconds: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Weighted least squares with both coefficients at zero or above, and their covariance."""
    normal = columns.T @ (columns * weights[:, None])
    target = columns.T @ (seconds * weights)
    inverse = np.linalg.pinv(normal)
    solution = inverse @ target
    if solution[0] < 0 or solution[1] < 0:
        alone = np.divide(target, np.diag(normal), out=np.zeros(2), where=np.diag(normal) > 0)
        # The coefficient that alone explains more of the times stays.
        kept = int(np.argmax(alone * target))
        solution = np.zeros(2)
        solution[kept] = max(float(alone[kept]), 0.0)
        inverse = np.zeros((2, 2))
        inverse[kept, kept] = 1 / max(float(normal[kept, kept]), _TINY)
    left = seconds - columns @ solution
    freedom = max(float(np.count_nonzero(weights)) - 2, 1.0)
    return solution, inverse * (float(np.sum(weights * left**2)) / freedom)
