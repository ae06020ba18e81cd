"""How the cost of a frame grows: with environments side by side, with the minibatch, with the width of the networks.

    python benchmarks/scaling.py --plot docs/performance.png

Each point is a PPO run on InvertedDoublePendulum-v5 (10 epochs, compiled, one torch thread) of which the part after the
first batches is timed by the parts of benchmarks/shares.py. A figure with microseconds a frame is drawn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

BASE = {"env.num_envs": 8, "algo.minibatch_size": 64, "network.hidden": [64, 64]}
# What is changed, to what, and with which backends: only the first touches the environments.
SERIES: dict[str, tuple[list[object], tuple[str, ...]]] = {
    "env.num_envs": ([1, 4, 16, 64], ("sync", "envpool")),
    "algo.minibatch_size": ([32, 64, 128, 256, 512], ("sync",)),
    "network.hidden": ([[32, 32], [64, 64], [128, 128], [256, 256]], ("sync",)),
}
WORDS = [
    "algo=ppo", "env=inverted_double_pendulum", "tuned=none", "algo.frames_per_batch=2048", "algo.epochs=10",
    "threads=1", "compile=true", "eval=none", "save=none", "total_frames=11_000",
]  # fmt: skip


def measure(changes: dict[str, object], backend: str) -> dict[str, float]:
    """Microseconds a frame of collecting, of updating, and of all the rest."""
    words = [*WORDS, f"env.backend={backend}", *(f"{key}={value}" for key, value in {**BASE, **changes}.items())]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "shares.json"
        command = [
            sys.executable,
            str(Path(__file__).parent / "shares.py"),
            *words,
            "--skip",
            "0.45",
            "--json",
            str(out),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shares: dict[str, float] = json.loads(out.read_text())
    groups = {"collecting": 0.0, "update": 0.0, "rest": 0.0}
    for part, cost in shares.items():
        head = part.partition(":")[0]
        groups[head if head in groups else "rest"] += cost
    return groups


def draw(figures: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    """A panel for each series: lines of collecting and updating, for each backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(SERIES), figsize=(11, 3.4), sharey=True, layout="constrained")
    colours = {"collecting": "#1f77b4", "update": "#d62728"}
    for panel, (key, (values, backends)) in zip(panels, SERIES.items(), strict=True):
        labels = ["-".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
        for backend, style in zip(backends, ("-", "--"), strict=False):
            for part, colour in colours.items():
                costs = [groups[part] for groups in figures[key][backend]]
                panel.plot(range(len(values)), costs, style, color=colour, marker="o", ms=3, label=f"{part}, {backend}")
        panel.set_xticks(range(len(values)), labels)
        panel.set_xlabel(key)
        panel.set_yscale("log")
        for place in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            place("{x:.0f}")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("µs a frame")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="where to draw the figure")
    arguments = parser.parse_args()
    if arguments.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install -e '.[peers]'")
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    print("| changed | backend | collecting | update | rest | all, µs a frame |\n|---|---|---|---|---|---|")
    for key, (values, backends) in SERIES.items():
        figures[key] = {backend: [] for backend in backends}
        for backend, rows in figures[key].items():
            for value in values:
                groups = measure({key: value}, backend)
                rows.append(groups)
                cells = " | ".join(f"{cost:,.0f}" for cost in (*groups.values(), sum(groups.values())))
                print(f"| {key}={value} | {backend} | {cells} |", flush=True)
    if arguments.plot:
        draw(figures, arguments.plot)


if __name__ == "__main__":
    main()
