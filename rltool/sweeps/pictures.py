"""Pictures of a sweep: parallel coordinates and importance of the keys, for paper (PNG) and to look around in (HTML).

Drawn by Optuna, of grids too (extra: sweep).
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from rltool.grouping import short_names, value_shown
from rltool.importing import extra_for
from rltool.runs import replace_file
from rltool.sweeps.answer import Answer, Configuration, Ranking, suffix

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure
    from optuna.distributions import BaseDistribution
    from optuna.importance import BaseImportanceEvaluator
    from optuna.study import Study

PARALLEL, IMPORTANCE = "parallel", "importance"
# Values of a key that each get a place of their own on its axis; of more, numbers are laid out by size, and so are fractions
# that nobody typed.
_PLACES = 8
# Digits of a number that somebody typed, at the most.
_DIGITS = 4
# Numbers whose largest is so many times their smallest are laid out by their logarithm.
_MANY_TIMES = 10.0
# Configurations that the importance of a key can be read off, and those of them at the top, at the least.
_FEWEST, _TOP, _TOP_SHARE = 6, 5, 0.1
_SCORE = "Mean score"
_SCRIPT = "plotly.min.js"
# Points of text; where in its 256 shades the colours of lines begin, so that none is white.
_TEXT, _TITLE, _PALE = 9, 10, 64


def draw(found: Answer, *, anew: bool) -> tuple[list[str], list[str]]:
    """Draws the pictures into the sweep's directory, those of several environments with their names.

    Args:
        found: what there is to draw.
        anew: False where nothing has changed since it was drawn, if it was.

    Returns:
        the names of all that there are, and what is missing for the rest. Of one configuration there is none, and no word.

    Raises:
        OSError: a file cannot be written.
    """
    wanted: list[tuple[Ranking, str]] = []
    notes: list[str] = []
    for ranking in found.rankings:
        if len(_rows(ranking)) > 1 and ranking.keys:
            end = suffix(found, ranking)
            wanted.append((ranking, PARALLEL + end))
            if reason := _no_importance(ranking):
                notes.append(f"there is no {IMPORTANCE}{end}.png: {reason}")
            elif len(ranking.keys) > 1:
                wanted.append((ranking, IMPORTANCE + end))
    names = [f"{name}.{kind}" for _, name in wanted for kind in ("png", "html")]
    if not anew and all((found.sweep.path / name).is_file() for name in names):
        return names, notes
    try:
        import matplotlib
        import optuna  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        return [], [f"pictures need a package that is not installed: {error.name}. {extra_for('optuna')}"]
    matplotlib.use("agg")  # no window, also where there is a screen
    with _quietly():
        for ranking, name in wanted:
            picture = _parallel if name.startswith(PARALLEL) else _importance
            picture(_study(ranking), ranking, found.sweep.path, name)
    return names, notes


def _rows(ranking: Ranking) -> list[Configuration]:
    """The configurations with a score that were not cut off."""
    return [row for row in ranking.ranked if row.mean is not None and row.tier < 2]


def _no_importance(ranking: Ranking) -> str:
    """Why the keys cannot be weighed; empty where they can, or where there is one alone and nothing to weigh."""
    rows = _rows(ranking)
    if len(ranking.keys) < 2:
        return ""
    if len(rows) < _FEWEST:
        return f"{len(rows)} configurations are too few to weigh keys by; {_FEWEST} are the least"
    if len({row.mean.value for row in rows if row.mean is not None}) == 1:
        return "all configurations score the same"
    return ""


# ---------------------------------------------------------------------------------------------------------------- study


def _study(ranking: Ranking) -> Study:
    """What Optuna draws: a finished trial for each configuration."""
    from optuna import create_study, create_trial

    rows = _rows(ranking)
    spaces = {
        name: _distribution([row.values.get(key) for row in rows]) for key, name in short_names(ranking.keys).items()
    }
    study = create_study(direction="maximize")
    for row in rows:
        assert row.mean is not None
        values = {name: _plain(row.values.get(key)) for key, name in short_names(ranking.keys).items()}
        study.add_trial(create_trial(params=values, distributions=spaces, value=row.mean.value))
    return study


def _distribution(values: Sequence[JsonValue]) -> BaseDistribution:
    """Numbers by size, where they are many; else a place for each value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    plain = list({json.dumps(value, sort_keys=True): _plain(value) for value in values}.values())
    typed = all(float(f"{value:.{_DIGITS}g}") == value for value in numbers)
    if len(numbers) < len(values) or len(plain) < 2 or (len(plain) <= _PLACES and typed):
        return CategoricalDistribution(plain)
    low, high = min(numbers), max(numbers)
    log = low > 0 and high >= _MANY_TIMES * low
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(low, high, log=log)


def _plain(value: JsonValue) -> bool | int | float | str | None:
    """What Optuna takes for a category: lists and mappings as text."""
    return value_shown(value) if isinstance(value, list | Mapping) else value


# ------------------------------------------------------------------------------------------------------------- pictures


def _parallel(study: Study, ranking: Ranking, path: Path, name: str) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from optuna.visualization import matplotlib as paper
    from optuna.visualization import plot_parallel_coordinate

    title = f"{ranking.env}: {len(study.trials)} configurations"
    with _style():
        axes = paper.plot_parallel_coordinate(study, target_name=_SCORE)
        axes.set_title(title, y=1.03)
        axes.tick_params(axis="x", labelrotation=0)
        (lines,) = axes.collections
        lines.set_clip_on(False)  # those along the edge are as wide as the others
        lines.set_cmap(ListedColormap(colormaps["Blues"].resampled(256)(range(_PALE, 256))))
        bar = lines.colorbar
        assert bar is not None
        beside = bar.ax.get_position()  # away from the numbers of the last axis
        bar.ax.set_position((beside.x0 + 0.25 / len(ranking.keys), beside.y0, beside.width, beside.height))
        _save(axes.figure, path / f"{name}.png", width=3.0 + 1.6 * len(ranking.keys))
    figure = plot_parallel_coordinate(study, target_name=_SCORE).update_layout(title_text=title)
    _page(figure, path / f"{name}.html")


def _importance(study: Study, ranking: Ranking, path: Path, name: str) -> None:
    from optuna.visualization import matplotlib as paper
    from optuna.visualization import plot_param_importances

    evaluator, share = _evaluator(len(study.trials))
    title = f"{ranking.env}: what decides who is among the best {share:.0%}"
    with _style():
        axes = paper.plot_param_importances(study, evaluator=evaluator, target_name=_SCORE)
        axes.set(title="", ylabel="", facecolor="white")
        axes.set_title(title, loc="left", fontsize=_TITLE)
        axes.set_xlabel("Importance", fontsize=_TEXT)
        axes.tick_params(labelsize=_TEXT, labelcolor="black")
        axes.grid(visible=False)
        axes.legend().remove()
        _save(axes.figure, path / f"{name}.png", width=6.0, height=1.2 + 0.4 * len(ranking.keys))
    figure = plot_param_importances(study, evaluator=evaluator, target_name=_SCORE)
    figure.update_layout(title_text=title, xaxis_title="Importance", yaxis_title="")
    _page(figure, path / f"{name}.html")


def _evaluator(count: int) -> tuple[BaseImportanceEvaluator, float]:
    """PED-ANOVA, which needs no scikit-learn, and which share of the configurations are the best to it."""
    from optuna.importance import PedAnovaImportanceEvaluator

    share = min(max(_TOP / count, _TOP_SHARE), 0.5)
    return PedAnovaImportanceEvaluator(target_quantile=share), share


def _save(figure: Figure | SubFigure, path: Path, *, width: float, height: float = 4.0) -> None:
    """Writes a figure with all its labels, and lets go of it."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    figure.set_size_inches(width, height)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    replace_file(path, content.getvalue())


def _page(figure: Any, path: Path) -> None:
    """Writes a page, and once beside it the script that all pages share."""
    from plotly.offline import get_plotlyjs

    script = path.with_name(_SCRIPT)
    if not script.is_file():
        replace_file(script, get_plotlyjs().encode())
    replace_file(path, figure.to_html(include_plotlyjs="directory").encode())


@contextmanager
def _style() -> Iterator[None]:
    """Whatever Optuna changes of matplotlib's settings ends with the picture."""
    from matplotlib import rc_context

    with rc_context({"font.size": _TEXT, "axes.titlesize": _TITLE}):
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what Optuna says of itself: that this part of it may change, and that a study was made."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
