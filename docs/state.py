"""Draws docs/state.png: a matrix state beside a tensor state, to scale, with what a token writes and reads."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

K, R, V = 24, 24, 48  # a head of the paper's layer; Gated DeltaNet's beside it is 24×48
GREY, BLUE, ORANGE, GREEN = "#5f6b7a", "#0072b2", "#d55e00", "#009e73"
DEPTH = np.array([0.62, 0.42])  # where the third mode goes on paper


def face(ax: Axes, corner: np.ndarray, a: np.ndarray, b: np.ndarray, colour: str, alpha: float) -> None:
    points = np.array([corner, corner + a, corner + a + b, corner + b])
    ax.fill(*points.T, facecolor=colour, alpha=alpha, edgecolor="none")
    ax.plot(*np.vstack([points, points[:1]]).T, color=colour, lw=1.2)


def ruled(ax: Axes, corner: np.ndarray, a: np.ndarray, b: np.ndarray, n: int, colour: str) -> None:
    """Lines along b, n along a: the cells of a face."""
    for i in range(1, n):
        ax.plot(*np.array([corner + a * i / n, corner + a * i / n + b]).T, color=colour, lw=0.25, alpha=0.5)


def box(ax: Axes, corner: np.ndarray, width: float, height: float, depth: float, colour: str) -> None:
    x, y, z = np.array([width, 0.0]), np.array([0.0, height]), depth * DEPTH
    for start, a, b, alpha, cells in (
        (corner, x, y, 0.16, (V, K)),
        (corner + y, x, z, 0.28, (V, R)),
        (corner + x, y, z, 0.40, (K, R)),
    ):
        if depth or (a is x and b is y):
            face(ax, start, a, b, colour, alpha)
            ruled(ax, start, a, b, cells[0], colour)
            ruled(ax, start, b, a, cells[1], colour)


def arrow(ax: Axes, start: np.ndarray, end: np.ndarray, label: str, colour: str, offset: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2})
    ax.text(*((start + end) / 2 + np.array(offset)), label, color=colour, ha="center", va="center", fontsize=13)


def main() -> None:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(63, 83))
    for ax in (left, right):
        ax.set_aspect("equal")
        ax.axis("off")
    origin = np.zeros(2)

    box(left, origin, V, K, 0, GREY)
    arrow(left, np.array([0, -4.0]), np.array([V, -4.0]), "v", GREEN, (0, -3))
    arrow(left, np.array([-4.0, 0]), np.array([-4.0, K]), "k", ORANGE, (-3, 0))
    left.set_title(f"A matrix: {K} × {V} = {K * V:,} numbers a head", loc="left", fontweight="bold", fontsize=12)
    left.text(0, -13, "write  S + v ⊗ k        read  <S, q>", fontsize=12)

    box(right, origin, V, K, R, BLUE)
    side = np.array([V, 0]) + np.array([3.5, -1.5])
    arrow(right, np.array([0, -4.0]), np.array([V, -4.0]), "v", GREEN, (0, -3))
    arrow(right, np.array([-4.0, 0]), np.array([-4.0, K]), "k", ORANGE, (-3, 0))
    arrow(right, side, side + R * DEPTH, "r", ORANGE, (3, -2))
    right.set_title(
        f"A tensor: {K} × {R} × {V} = {K * R * V:,} numbers a head", loc="left", fontweight="bold", fontsize=12
    )
    right.text(0, -13, "write  S + v ⊗ k ⊗ r        read  <S, q, u>", fontsize=12)
    for ax in (left, right):
        ax.set_xlim(-9, 74 if ax is right else 54)
        ax.set_ylim(-15, 38)
    fig.tight_layout()
    fig.savefig(Path(__file__).with_suffix(".png"), dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
