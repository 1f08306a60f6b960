"""The figures, each from its CSV alone."""

import csv
import math
from collections.abc import Iterator
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
LAYER_STYLE = {
    "runningtensor": GPU_STYLE["runningtensor"],
    "runningtensor-compiled": ("#56B4E9", "P", "runningtensor, torch.compile"),
    "fla-gated-deltanet": GPU_STYLE["fla-gated-deltanet"],
    "transformers-qwen3": ("#000000", "X", "transformers, Qwen3"),
}
DEMO_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # the first is ours
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


def plot_layers_gpu(table: Path, figure: Path) -> None:
    """Bars of the layers' times, the forward within both ways; a decoded token's time against the context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ms_forward"] != "nan"]
    if not rows:
        return
    shape, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _bars(axes[0], [row for row in rows if row["task"] == "layer"])
    _decoding(axes[1], [row for row in rows if row["task"] == "decode"])
    for ax in axes:
        ax.grid(alpha=0.25, axis="y")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(bottom=0)
        if ax.has_data():
            ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    first = next((row for row in rows if row["implementation"] == "runningtensor"), rows[0])
    shape.suptitle(
        f"{first['device']}, bfloat16, torch {first['torch']}, Triton {first['triton']}, commit {first['commit']}",
        fontsize="small",
        color="0.35",
    )
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def plot_demo(table: Path, figure: Path) -> None:
    """Accuracy against steps, a line a model, named at its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    colours = dict(zip(dict.fromkeys(row["model"] for row in rows), DEMO_COLOURS, strict=True))
    curves = {
        name: [(int(row["step"]), 100 * float(row["accuracy"])) for row in rows if row["model"] == name]
        for name in colours
    }
    states = {row["model"]: int(row["state_floats"]) for row in rows}
    last, final = curves[first["model"]][-1][0], {name: curve[-1][1] for name, curve in curves.items()}

    shape, ax = plt.subplots(figsize=(9, 4.8), layout="constrained")
    place, beside = -math.inf, {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    for name in sorted(curves, key=lambda name: final[name]):
        style: dict[str, Any] = {"color": colours[name]}
        ax.plot(*zip(*curves[name], strict=True), **style, linewidth=3 if name == first["model"] else 2)
        ax.plot(last, final[name], "o", **style, markersize=7, clip_on=False, zorder=3)
        place = max(place + 12, final[name])  # names of lines that end together stand above one another
        style |= beside
        ax.annotate(name, (last, place), xytext=(10, 6), fontweight="bold", **style)
        what = f"{final[name]:.1f}%, state of {states[name]:,} numbers"
        ax.annotate(what, (last, place), xytext=(10, -7), fontsize="small", **style)
    tensor, matrix, *_ = final.values()
    ax.set_title(
        f"Of {first['pairs']} pairs, a tensor state recalls {tensor:.1f}% after {last} steps, "
        f"a matrix state {matrix:.1f}%",
        loc="left",
        fontweight="bold",
        pad=16,
    )
    ax.set_xlim(0, last)
    ax.set_ylim(0, 100)
    ax.set_ylabel(f"pairs recalled, of {first['pairs']} in {first['length']} tokens")
    ax.set_xlabel(f"training steps, on the same batches: {max(float(row['seconds']) for row in rows):.0f} s in all")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0f}%")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    shape.savefig(figure, dpi=150)
    plt.close(shape)


def _bars(ax: Any, rows: list[dict[str, str]]) -> None:
    shapes = list(dict.fromkeys((row["D"], row["T"], row["B"]) for row in rows))
    names = [name for name in LAYER_STYLE if name in _names(rows)]
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        colour, _, label = LAYER_STYLE[name]
        for row in (row for row in rows if row["implementation"] == name):
            x = shapes.index((row["D"], row["T"], row["B"])) + (i - (len(names) - 1) / 2) * width
            forward, total = float(row["ms_forward"]), float(row["ms_total"])
            ax.bar(x, total, 0.94 * width, color=colour, alpha=0.35)
            ax.bar(x, forward, 0.94 * width, color=colour, label=label)
            label = "_"  # which has no entry in the legend: one is enough
            ax.annotate(
                f"{total:.2f}\n{forward:.2f}",
                (x, total),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
    ax.set_xticks(range(len(shapes)), [f"{int(D):,} wide\n{B} × {int(T):,} tokens" for D, T, B in shapes])
    ax.set_title("A layer (ms): forward, and with backward", loc="left", fontweight="bold")
    ax.margins(y=0.12)  # for the numbers


def _decoding(ax: Any, rows: list[dict[str, str]]) -> None:
    contexts = sorted({int(row["T"]) for row in rows})
    for name in [name for name in LAYER_STYLE if name in _names(rows)]:
        colour, marker, label = LAYER_STYLE[name]
        for B, line, inside in ((1, "-", colour), (64, "--", "white")):
            points = sorted(
                (int(row["T"]), float(row["ms_forward"]))
                for row in rows
                if row["implementation"] == name and int(row["B"]) == B
            )
            if points:
                style = {"color": colour, "marker": marker, "markerfacecolor": inside, "linestyle": line}
                ax.plot(*zip(*points, strict=True), **style, markersize=8, linewidth=2, label=f"{label}, batch {B}")
    ax.set_xscale("log")
    ax.set_xticks(contexts, [f"{context:,}" for context in contexts])
    ax.minorticks_off()
    ax.set_xlabel("tokens of context")
    ax.set_title("Decoding: a token of every sequence (ms)", loc="left", fontweight="bold")
    ax.margins(x=0.08, y=0.1)


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


EVALUATED = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


def plot_evaluation(results: dict[str, list[dict[str, Any]]], figure: Path) -> bool:
    """Accuracies of tasks, needles against length, recall and perplexity against tokens; False: there are none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points: dict[str, dict[str, list[tuple[Any, float, float]]]] = {}  # panel, then line, of model and kind
    for model, records in results.items():
        for record in records:
            for panel, kind, x, measure in _evaluated(record):
                point = (x, measure["value"], measure["stderr"] or 0.0)
                points.setdefault(panel, {}).setdefault(f"{model}\t{kind}", []).append(point)
    if not points:
        return False
    panels = [name for name in ("tasks", "needle", "recall", "perplexity") if name in points]
    titles = {
        "tasks": "Tasks (%)",
        "needle": "Needles found (%), RULER; dashed: of many keys",
        "recall": "Recalled (%); dashed: never read",
        "perplexity": "Perplexity of the tokens before a position",
    }
    names = list(dict.fromkeys(point[0] for line in points.get("tasks", {}).values() for point in line))
    colours = {model: (EVALUATED[i % 7], MARKERS[i % 7]) for i, model in enumerate(results)}
    size = (5.2 * len(panels), max(4.2, 1.4 + 0.32 * len(names)))
    shape, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for ax, panel in zip(axes[0], panels, strict=True):
        for line, found in points[panel].items():
            model, kind = line.split("\t")
            colour, marker = colours[model]
            x, y, error = zip(*(found if panel == "tasks" else sorted(found)), strict=True)
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 7, "capsize": 2}
            if panel == "tasks":
                heights = [names.index(name) + 0.12 * list(results).index(model) for name in x]
                ax.errorbar(y, heights, xerr=error, linestyle="", **style)
            else:
                dashed = kind in ("control", "niah_multikey_2")
                inside = "white" if dashed else colour
                line_style = "--" if dashed else "-"
                ax.errorbar(x, y, yerr=error, linestyle=line_style, markerfacecolor=inside, **style)
        ax.set_title(titles[panel], loc="left", fontweight="bold")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        if panel == "tasks":
            ax.set_yticks(range(len(names)), names)
            ax.invert_yaxis()
            continue
        lengths = sorted({point[0] for line in points[panel].values() for point in line})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        ax.minorticks_off()
        ax.set_xlabel({"needle": "tokens of the haystack", "recall": "tokens since"}.get(panel, "position, in tokens"))
        if panel != "perplexity":
            highest = max(value + error for line in points[panel].values() for _, value, error in line)
            top = next(limit for limit in (10, 20, 50, 101) if highest <= limit or limit > 100)
            ax.set_ylim(-0.03 * top, 1.03 * top)
    for model, (colour, marker) in colours.items():
        axes[0][0].plot([], [], color=colour, marker=marker, label=model)
    shape.legend(loc="outside lower center", ncols=min(4, len(results)), frameon=False)
    origin = next(record for records in results.values() for record in records)["origin"]
    caption = f"{origin['device']}, torch {origin['torch']}, commit {origin['commit']}; bars: standard errors"
    shape.suptitle(caption, fontsize="small", color="0.35")
    shape.savefig(figure, dpi=150)
    plt.close(shape)
    return True


def _evaluated(record: dict[str, Any]) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Panel, kind of line, x and measure of what a record of an evaluation shows; accuracies in percent."""
    task = record["key"]["task"]
    for name, measure in record["measures"].items():
        percent = {key: 100 * (measure[key] or 0.0) for key in ("value", "stderr")}
        kind, _, tokens = name.partition("/")
        if measure["value"] is None:
            continue
        if tokens:
            yield ("perplexity", "", int(tokens), measure) if kind == "perplexity" else (
                "recall", kind, int(tokens), percent,
            )  # fmt: skip
        elif name == record["metric"] and record["suite"] == "needle":
            yield "needle", task.rpartition("_")[0], int(task.rpartition("_")[2]), percent
        elif name == record["metric"] and "perplexity" not in name:
            yield "tasks", "", task, percent


RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def plot_pretraining(runs: dict[str, list[dict[str, Any]]], figure: Path) -> None:
    """Losses against tokens, from the lines of logs: of training a mean over the steps before, of validation points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shape, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    lowest, highest = math.inf, -math.inf
    for i, (name, lines) in enumerate(runs.items()):
        colour, model = RUN_COLOURS[i % len(RUN_COLOURS)], lines[0]["recipe"]["model"]
        steps = [(line["tokens"], line["loss"]) for line in lines if line.get("loss") is not None]
        tests = [(line["tokens"], line["validation_loss"]) for line in lines if line.get("validation_loss") is not None]
        if not steps:
            continue
        over = max(1, len(steps) // 50)
        sums = [0.0]
        for _, loss in steps:
            sums.append(sums[-1] + loss)
        means = [(sums[j + 1] - sums[max(0, j + 1 - over)]) / min(j + 1, over) for j in range(len(steps))]
        tokens = [x for x, _ in steps]
        label = name if name.startswith(model) else f"{model} ({name})"
        if tests:  # training goes up and down with the text, alike in all: behind
            ax.plot(tokens, means, color=colour, linewidth=1, alpha=0.3)
            ended = f"{label}: {tests[-1][1]:.3f} in the end"
            ax.plot(*zip(*tests, strict=True), "o-", color=colour, linewidth=2, markersize=6, label=ended)
        else:
            ax.plot(tokens, means, color=colour, linewidth=2, label=label)
        # The first tenth falls so far that nothing else could be seen beside it.
        later = means[len(means) // 10 :] + [loss for x, loss in tests if x >= tokens[len(tokens) // 10]]
        lowest, highest = min(lowest, *later), max(highest, *later)
    if lowest < highest:
        ax.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.1 * (highest - lowest))
    ax.xaxis.set_major_formatter(lambda x, _: next((f"{x / n:g}{unit}" for n, unit in UNITS if x >= n), f"{x:g}"))
    ax.set_xlabel("tokens")
    ax.set_title("Loss: validation with points, training faint", loc="left", fontweight="bold")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.has_data():
        ax.legend(frameon=False)
    origins = dict.fromkeys(
        f"{at['device']}, torch {at['torch']}, commit {at['commit']}" for at in (x[0]["origin"] for x in runs.values())
    )
    shape.suptitle("; ".join(origins), fontsize="small", color="0.35")
    shape.savefig(figure, dpi=150)
    plt.close(shape)
