"""Videos of evaluation episodes, one file each (extra: video).

Frames go to ffmpeg as they are drawn, so that no episode has to fit into memory. Gymnasium's ``RecordVideo`` and
``save_video`` keep whole episodes, and moviepy, which writes for them, counts frames by their time: at some lengths it
repeats the last frame (moviepy 1.0) or leaves it out (2.2).
"""

from __future__ import annotations

import os
import secrets
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rltool.errors import ConfigError, Problem, RltoolError
from rltool.importing import import_user_module, raised
from rltool.opengl import how_to_get
from rltool.seeding import untouched_world

if TYPE_CHECKING:
    from rltool.contract import EnvContract
    from rltool.spaces import Array

# Where an environment does not say how fast it is to be watched.
_FPS = 30
# Files of these raise where a machine has no OpenGL.
_OPENGL = ("mujoco", "dm_control", "OpenGL")


def new_directory(checkpoint: Path, run_directory: Path | None) -> Path:
    """A fresh path for the videos of one evaluation, in the checkpoint's run or else the working directory; nothing is made."""
    root = run_directory if run_directory is not None else Path.cwd()
    return root / "videos" / f"{checkpoint.stem}-{datetime.now():%Y-%m-%d-%H-%M-%S}-{secrets.token_hex(3)}"


class Film:
    """Films episodes that may run side by side: ``<directory>/episode-<number>.mp4``, from the reset to the last step.

    What goes wrong while it films ends the filming, not the evaluation: see :attr:`problem`.

    Args:
        directory: where the files go; made where it is missing. Files of the same names are replaced.
        episodes: how many there will be.

    Attributes:
        videos: the finished files, in the order in which they were finished.
        problem: why there are no more; None while all goes well.

    Raises:
        ConfigError: the directory cannot be made or written to, or ffmpeg is not there.
    """

    def __init__(self, directory: Path, episodes: int) -> None:
        self._ffmpeg = writer()
        self.videos: list[Path] = []
        self.problem: str | None = None
        self._directory, self._digits = directory, len(str(episodes - 1))
        self._rolling: dict[int, _Roll] = {}
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_place(directory, error.strerror or str(error)) from error
        if not os.access(directory, os.W_OK):
            raise _no_place(directory, "no permission")

    def add(self, episode: int, env: EnvContract) -> None:
        """Draws an environment as it stands; the first frame of an episode begins its file."""
        if self.problem is not None:
            return
        # What the error holds on to goes inside, too: half-made OpenGL contexts fail once more as they do.
        with _quietly():
            try:
                with untouched_world():
                    frame = _checked(env.render())
            except (Exception, SystemExit) as error:
                self._give_up(f"drawing {env.spec.id if env.spec else env} {_explained(error)}")
                return
        path = self._directory / f"episode-{episode:0{self._digits}d}.mp4"
        try:
            if episode not in self._rolling:
                self._rolling[episode] = _Roll(self._ffmpeg, path, frame, _fps(env))
            self._rolling[episode].add(frame)
        except Exception as error:
            self._give_up(f"writing {path} {_first_line(error)}")

    def end(self, episode: int) -> None:
        """Finishes the file of an episode."""
        roll = self._rolling.pop(episode, None)
        if roll is None:
            return
        try:
            roll.finish()
            self.videos.append(roll.path)
        except Exception as error:
            roll.discard()
            self._give_up(f"writing {roll.path} {_first_line(error)}")

    def close(self) -> None:
        """Leaves whole episodes only: files of others are deleted, as are directories made for none."""
        for roll in self._rolling.values():
            roll.discard()
        self._rolling.clear()
        for path in self._made:
            with suppress(OSError):
                path.rmdir()  # refused where something is in it

    def _give_up(self, reason: str) -> None:
        self.problem = f"video: {reason}"
        for roll in self._rolling.values():
            roll.discard()
        self._rolling.clear()


class _Roll:
    """One file while it is written."""

    def __init__(self, ffmpeg: Any, path: Path, first: Array, fps: float) -> None:
        self.path, self._ffmpeg, self._shape, self._count = path, ffmpeg, first.shape, 0
        height, width = (side + side % 2 for side in first.shape[:2])
        # One thread each: several episodes are written at once, and drawing takes longer than writing.
        self._frames: Generator[None, Array | None, None] = ffmpeg.write_frames(
            str(path),
            (width, height),
            fps=fps,
            macro_block_size=1,
            ffmpeg_log_level="error",
            output_params=["-threads", "1"],
        )
        self._frames.send(None)

    def add(self, frame: Array) -> None:
        if frame.shape != self._shape:
            raise RltoolError(f"one frame has the shape {frame.shape}, the first has {self._shape}")
        if frame.shape[0] % 2 or frame.shape[1] % 2:  # H.264 as every player takes it has even sides
            frame = np.pad(frame, [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)], mode="edge")
        self._frames.send(np.ascontiguousarray(frame))
        self._count += 1

    def finish(self) -> None:
        """Ends the file.

        Raises:
            RltoolError: it does not hold every frame (disk full).
        """
        self._frames.close()
        found, _ = self._ffmpeg.count_frames_and_secs(str(self.path))
        if found != self._count:
            raise RltoolError(f"the file holds {found} of {self._count} frames")

    def discard(self) -> None:
        """Deletes the file."""
        self._frames.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def writer() -> Any:
    """The module that writes videos.

    Raises:
        ConfigError: it is not installed, or finds no ffmpeg.
    """
    ffmpeg = import_user_module("imageio_ffmpeg", "video")
    try:
        ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise ConfigError(
            Problem(
                "video", f"imageio-ffmpeg finds no ffmpeg: {error}", "Install ffmpeg, or set IMAGEIO_FFMPEG_EXE to it"
            )
        ) from error
    return ffmpeg


def _fps(env: EnvContract) -> float:
    fps = env.metadata.get("render_fps")
    return float(fps) if isinstance(fps, int | float) and fps > 0 else _FPS


def _first_line(error: BaseException) -> str:
    """What was raised, without the command of ffmpeg's that follows; ffmpeg itself has told its reason by then."""
    return raised(error).splitlines()[0]


def _checked(frame: object) -> Array:
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
        return frame
    found = f"{frame.dtype} of shape {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise RltoolError(f"render() must give a picture, uint8 of shape (height, width, 3), found {found}")


def _explained(error: BaseException) -> str:
    """What was raised, and how to come by OpenGL where that is what is missing."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not any(name in file for file in files for name in _OPENGL):
        return raised(error)
    return f"{raised(error)}. {how_to_get()}"


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps back what libraries say beside the errors that they raise."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


def _no_place(directory: Path, reason: str) -> ConfigError:
    return ConfigError(
        Problem("video_dir", f"cannot write into {directory}: {reason}", "Name another place with video_dir=PATH")
    )
