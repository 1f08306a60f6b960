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
OTHERS = [("#CC79A7", "v"), ("#56B4E9", "P"), ("#000000", "X")]


def plot_ops(table: Path, figure: Path) -> None:
    """Time and extra memory against T, with the ratios to our own where another was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    spare = iter(OTHERS)
    styles = {
        name: STYLE.get(name) or (*next(spare), name) for name in dict.fromkeys(r["implementation"] for r in rows)
    }
    lengths = sorted({int(row["T"]) for row in rows})

    shape, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for ax, column, title, unit in (
        (axes[0], "ms_total", "Time, forward and backward", "ms"),
        (axes[1], "extra_peak_mib", "Extra peak memory", "MiB"),
    ):
        _panel(ax, rows, styles, column)
        ax.set_title(f"{title} ({unit})", loc="left", fontweight="bold")
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.minorticks_off()
        ax.set_xlabel("tokens")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
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


def _panel(ax: Any, rows: list[dict[str, str]], styles: dict[str, tuple[str, str, str]], column: str) -> None:
    ours = {int(row["T"]): float(row[column]) for row in rows if row["implementation"] == "runningtensor-torch"}
    for name, (colour, marker, label) in styles.items():
        points = sorted((int(row["T"]), float(row[column])) for row in rows if row["implementation"] == name)
        ax.loglog(*zip(*points, strict=True), color=colour, marker=marker, markersize=7, linewidth=2, label=label)
        for length, y in points:
            if name != "runningtensor-torch" and length in ours:
                ax.annotate(
                    f"{y / ours[length]:.1f}×" if y < 9.95 * ours[length] else f"{y / ours[length]:.0f}×",
                    (length, y),
                    xytext=(-9, 3),
                    textcoords="offset points",
                    ha="right",
                    color=colour,
                )
    ax.margins(x=0.17, y=0.1)
