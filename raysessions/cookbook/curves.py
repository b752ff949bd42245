"""A picture of how a run went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def draw_curves(path: str, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Draws each curve against the optimizer step into a PNG. One value more than the shortest curve has is step 0."""
    try:
        import matplotlib
    except ImportError:
        print("No plot: `pip install matplotlib` draws one.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = min(map(len, curves.values()))
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for label, values in curves.items():
        axes.plot(range(last - len(values) + 1, last + 1), values, marker="o", markersize=3, label=label)
    axes.set(xlabel="optimizer step", ylim=(0, 1.05), title=title)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"Curve: {path}")
