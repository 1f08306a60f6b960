"""The figures of the tables: bars beside what was published, curves of calibration and gates, recall against state."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

LENGTH_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")
SEED: dict[str, Any] = {"marker": "o", "color": "black", "markeredgecolor": "white", "markersize": 4, "linestyle": ""}
ORDERS = {"order 2": ("#E69F00", "o"), "order 3": ("#0072B2", "s"), "order 4": ("#009E73", "^")}
SERIES = {
    **{order: (*look, ":") for order, look in ORDERS.items()},  # with the paper's gate, which may let them start late
    **{f"{order}, sigmoid gate": (*look, "-") for order, look in ORDERS.items()},
    "RunningTensor, r = k, u = q": ("#56B4E9", "P", ""),
    "Gated DeltaNet, 131k state": ("#D55E00", "D", ""),
    "Gated DeltaNet, 131k state, sigmoid gate": ("#D55E00", "*", ""),
    "Gated DeltaNet, 131k state, no gate": ("#D55E00", "X", ""),
    "Gated DeltaNet, 131k state, no gate, matrices of 0.02": ("#D55E00", "^", ""),
    "Gated DeltaNet, 131k state, no gate, float32": ("#D55E00", "<", ""),
    "Gated DeltaNet, no gate": ("#D55E00", "X", "-"),
    "Gated DeltaNet, published": ("#D55E00", "D", ""),
    "Flash-VQG, published": ("#000000", "v", ""),
}
GATES = {
    "sigmoid gate": "#0072B2",
    "no gate": "#009E73",
    "SiLU gate": "#D55E00",
    "SiLU gate, otherwise changed": "0.75",
}
OTHERS: list[tuple[str, str, str]] = [("#CC79A7", marker, "") for marker in "op^<>hd8"]


def plot_recall(
    lines: Sequence[tuple[str, int, float | None, float | None, Sequence[float]]],
    figure: Path,
    title: str,
    caption: str,
) -> None:
    """A group of bars a row, a bar a length; on it a dot for each seed, and where it was published a diamond. What was
    not run says so. A line: row, length, published, ours, each seed of ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows, lengths = list(dict.fromkeys(x[0] for x in lines)), sorted({x[1] for x in lines})
    colours = dict(zip(lengths, LENGTH_COLOURS, strict=False))
    thick = 0.8 / len(lengths)
    shape, ax = plt.subplots(figsize=(10, 1.2 + 0.24 * len(lines)), layout="constrained")
    for row, length, published, ours, seeds in lines:
        y = rows.index(row) + (lengths.index(length) - (len(lengths) - 1) / 2) * thick
        if ours is not None:
            ax.barh(y, ours, 0.9 * thick, color=colours[length])
            ax.plot(seeds, [y] * len(seeds), **SEED, zorder=4, clip_on=False)
        text, grey = ("not run", "0.6") if ours is None else (f"{ours:.2f}", "0.1")
        ax.annotate(text, (110, y), ha="right", va="center", fontsize="small", color=grey)
        if published is not None:
            ax.plot(published, y, "D", color="white", markeredgecolor="black", markersize=7.5, zorder=3, clip_on=False)
    for length in lengths:
        ax.barh(0, 0, color=colours[length], label=f"{length:,} tokens")
    ax.plot([], [], **SEED, label="a seed")
    ax.plot([], [], "D", color="white", markeredgecolor="black", markersize=7.5, label="published")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)  # from above; what was not run has no bar to make room for it
    ax.set_xlim(0, 110)
    ax.set_xticks(range(0, 101, 20))
    ax.set_title(title, loc="left", fontweight="bold")
    ax.grid(alpha=0.25, axis="x")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    shape.legend(loc="outside lower center", ncols=len(lengths) + 2, frameon=False)
    shape.suptitle(caption, fontsize="small", color="0.35")
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def plot_calibration(
    curves: dict[str, list[tuple[bool, list[float], list[float]]]],
    published: dict[str, float],
    figure: Path,
    caption: str,
) -> None:
    """Of each model a panel: accuracy against the share of its steps, bold under the protocol, faint in its drafts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shape, axes = plt.subplots(
        1, len(curves), figsize=(4 * len(curves), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for ax, (name, runs) in zip(axes[0], curves.items(), strict=True):
        for chosen, shares, accuracies in sorted(runs):
            look = {"color": "#0072B2", "linewidth": 2.5} if chosen else {"color": "0.75", "linewidth": 1}
            ax.plot(shares, accuracies, **look)
        ax.axhline(published[name], color="#D55E00", linestyle="--", linewidth=1)
        ax.text(0, published[name] - 1, "the paper", color="#D55E00", va="top", fontsize="small")
        ax.set_title(name, loc="left", fontweight="bold")
        ax.set_xlabel("steps (%)")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("recall (micro-F1, %): bold under the protocol,\nfaint in drafts of it; a line a run")
    shape.suptitle(caption, fontsize="small", color="0.35")
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def plot_gates(panels: dict[str, list[tuple[str, list[int], list[float]]]], figure: Path, caption: str) -> None:
    """Accuracy against steps, a line a run: of each panel, by its name, those runs with their kind, a key of GATES."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    across = (len(panels) + 1) // 2
    shape, axes = plt.subplots(
        2, across, figsize=(4 * across, 6), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax, (name, runs) in zip(axes.flat, panels.items(), strict=False):
        for kind, steps, accuracies in sorted(runs, key=lambda run: -[*GATES].index(run[0])):  # grey ones below
            ax.plot(steps, accuracies, color=GATES[kind], linewidth=1 if "otherwise" in kind else 1.8)
            ax.plot(steps[-1], accuracies[-1], "o", color=GATES[kind], markersize=3.5)
        ax.set_title(name, loc="left", fontweight="bold")
        ax.set_ylim(-3, 103)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("training steps")
    for ax in axes[:, 0]:
        ax.set_ylabel("recall (%), a line a run")
    handles = [axes[0][0].plot([], [], color=colour, label=kind)[0] for kind, colour in GATES.items()]
    shape.legend(handles=handles, loc="outside lower center", ncols=len(GATES), frameon=False)
    shape.suptitle(caption, fontsize="small", color="0.35")
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def plot_capacity(
    points: list[tuple[str, int, int, Sequence[float]]], unjoined: set[str], figure: Path, caption: str
) -> None:
    """Accuracy against the floats of a state, a panel for each length of the test: the mean of seeds, with a
    bar from the least to the most. Hollow: what others published, means too, and sizes with the paper's gate. A series
    that lacks a size is not joined by lines. A point: series, length, floats, seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({point[1] for point in points})
    found = dict.fromkeys(point[0] for point in points)
    styles = {name: style for name, style in SERIES.items() if name in found}
    styles |= dict(zip([name for name in found if name not in styles], OTHERS, strict=False))
    shape, axes = plt.subplots(
        1, len(lengths), figsize=(4 * len(lengths), 4.6), layout="constrained", sharey=True, squeeze=False
    )
    for ax, length in zip(axes[0], lengths, strict=True):
        for name, (colour, marker, line) in styles.items():
            own = sorted((x, seeds) for series, at, x, seeds in points if series == name and at == length)
            inside = "white" if name.endswith("published") or line == ":" else colour
            style = {"color": colour, "marker": marker, "markerfacecolor": inside, "markersize": 8}
            if own:
                curve = [(x, mean(seeds)) for x, seeds in own]
                ax.plot(*zip(*curve, strict=True), **style, linestyle="" if name in unjoined else line, label=name)
            for x, seeds in own:
                if len(seeds) > 1:
                    ax.plot([x, x], [min(seeds), max(seeds)], color=colour, linewidth=1.2, marker="_", zorder=1)
        ax.set_xscale("log")
        ax.set_ylim(-3, 103)
        ax.set_xlabel("floats of a layer's state")
        ax.set_title(f"{length:,} tokens, {length // 4:,} pairs", loc="left", fontweight="bold")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("recalled (%): the mean of seeds,\nwith a bar from the least to the most")
    handles = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    shape.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    shape.suptitle(caption, fontsize="small", color="0.35")
    shape.savefig(figure, dpi=150)
    plt.close(shape)
