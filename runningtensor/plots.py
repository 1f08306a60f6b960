"""The figures, each from its CSV alone."""

import csv
from pathlib import Path
from typing import Any

STYLE = {  # colours of Okabe and Ito, which the colour-blind can tell apart; markers differ too
    "runningtensor-torch": ("#0072B2", "o", "runningtensor"),
    "transformers-kronecker": ("#D55E00", "s", "transformers, keys multiplied out"),
    "transformers-kronecker, malloc keeps": ("#CC79A7", "D", "the same, malloc keeps memory"),
    "runningtensor-recurrent": ("#009E73", "^", "step by step"),
}
GPU_STYLE = {
    "runningtensor": ("#0072B2", "o", "runningtensor"),
    "power-retention": ("#009E73", "^", "power retention, degree 2"),
    "fla-gated-deltanet": ("#D55E00", "s", "fla, Gated DeltaNet"),
    "fla-deltanet": ("#E69F00", "D", "fla, DeltaNet"),
    "torch-sdpa": ("#000000", "X", "torch, softmax attention"),
}
OTHERS = [("#CC79A7", "v"), ("#56B4E9", "P"), ("#000000", "X")]


def plot_ops(table: Path, figure: Path) -> None:
    """Time and extra memory against T, with the ratios to our own where another was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    spare = iter(OTHERS)
    styles = {name: STYLE.get(name) or (*next(spare), name) for name in _names(rows)}
    lengths = sorted({int(row["T"]) for row in rows})

    shape, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for ax, column, title, unit in (
        (axes[0], "ms_total", "Time, forward and backward", "ms"),
        (axes[1], "extra_peak_mib", "Extra peak memory", "MiB"),
    ):
        _panel(ax, rows, styles, column, "runningtensor-torch")
        _dress(ax, f"{title} ({unit})", lengths)
    handles, labels = axes[0].get_legend_handles_labels()
    shape.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    first = rows[0]
    shape.suptitle(
        f"{first['device']}, {first['cores']} cores, {first['dtype']}, B{first['B']} H{first['H']}, "
        f"keys {first['K']} and {first['R']}, V {first['V']}, torch {first['torch']}, commit {first['commit']}",
        fontsize="small",
        color="0.35",
    )
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def plot_ops_gpu(table: Path, figure: Path) -> None:
    """Time against T, forward and both ways, at the same number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["implementation"] in GPU_STYLE and row["ms_total"] != "nan"]
    tokens = max((int(row["B"]) * int(row["T"]) for row in rows), default=0)
    rows = [row for row in rows if int(row["B"]) * int(row["T"]) == tokens]
    # Of each the curve is what has the most heads: others are single points of another comparison.
    heads = {name: max(int(r["H"]) for r in rows if r["implementation"] == name) for name in _names(rows)}
    rows = [row for row in rows if int(row["H"]) == heads[row["implementation"]]]
    if not rows:
        return
    styles = {}
    for name in [name for name in GPU_STYLE if name in heads]:
        colour, marker, label = GPU_STYLE[name]
        row = next(row for row in rows if row["implementation"] == name)
        widths = "×".join(row[mode] for mode in "KRV" if row[mode] != "1")
        styles[name] = (colour, marker, f"{label}, H{row['H']} {widths}")
    lengths = sorted({int(row["T"]) for row in rows})

    shape, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    for ax, column, title in (
        (axes[0], "ms_forward", "Forward (ms)"),
        (axes[1], "ms_total", "Forward and backward (ms)"),
    ):
        _panel(ax, rows, styles, column, None)  # curves this close leave no room for ratios
        _dress(ax, title, lengths)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.tick_params(labelleft=True)
        ax.margins(x=0.05)
        ax.set_xlabel(f"tokens of a sequence, {tokens:,} in all")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    handles, labels = axes[0].get_legend_handles_labels()
    shape.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    first = next((row for row in rows if row["implementation"] == "runningtensor"), rows[0])
    shape.suptitle(
        f"{first['device']}, {first['dtype']}, torch {first['torch']}, Triton {first['triton']}, "
        f"commit {first['commit']}",
        fontsize="small",
        color="0.35",
    )
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def _names(rows: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for row in rows))


def _dress(ax: Any, title: str, lengths: list[int]) -> None:
    ax.set_title(title, loc="left", fontweight="bold")
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.set_xlabel("tokens")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _panel(
    ax: Any, rows: list[dict[str, str]], styles: dict[str, tuple[str, str, str]], column: str, reference: str | None
) -> None:
    ours = {int(row["T"]): float(row[column]) for row in rows if row["implementation"] == reference}
    for name, (colour, marker, label) in styles.items():
        points = sorted((int(row["T"]), float(row[column])) for row in rows if row["implementation"] == name)
        ax.loglog(*zip(*points, strict=True), color=colour, marker=marker, markersize=7, linewidth=2, label=label)
        for length, y in points:
            if name != reference and length in ours:
                ax.annotate(
                    f"{y / ours[length]:.1f}×" if y < 9.95 * ours[length] else f"{y / ours[length]:.0f}×",
                    (length, y),
                    xytext=(-9, 3),
                    textcoords="offset points",
                    ha="right",
                    color=colour,
                )
    ax.margins(x=0.17, y=0.1)
