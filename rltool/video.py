"""Videos of evaluation episodes, MP4 or GIF, a file each (extra: video).

Frames go to ffmpeg as they are drawn, so that no episode has to fit into memory. Gymnasium's ``RecordVideo`` and
``save_video`` keep whole episodes, and moviepy, which writes for them, counts frames by their time: at some lengths it
repeats the last frame (moviepy 1.0) or leaves it out (2.2).
"""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
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
# Longest side in pixels and frames a second of a GIF: the first that is small enough is kept.
_GIF_SIZES = ((320, 25.0), (320, 12.5), (240, 10.0), (160, 5.0))
_GIF_BYTES = 3_000_000
# Files of these raise where a machine has no OpenGL.
_OPENGL = ("mujoco", "dm_control", "OpenGL")


def new_directory(checkpoint: Path, run_directory: Path | None) -> Path:
    """A fresh path for the videos of one evaluation, in the checkpoint's run or else the working directory; nothing is made."""
    root = run_directory if run_directory is not None else Path.cwd()
    return root / "videos" / f"{checkpoint.stem}-{datetime.now():%Y-%m-%d-%H-%M-%S}-{secrets.token_hex(3)}"


def formats(choice: str) -> tuple[str, ...]:
    """The endings of the files that ``video_format`` asks for."""
    return ("mp4", "gif") if choice == "both" else (choice,)


class Film:
    """Films episodes that may run side by side: ``<directory>/episode-<number>.mp4``, from the reset to the last step.

    What goes wrong while it films ends the filming, not the evaluation: see :attr:`problem`.

    Args:
        directory: where the files go; made where it is missing. Files of the same names are replaced.
        episodes: how many there will be.
        kinds: ``mp4``, ``gif``, or both: a file of each.
        name: of the file, without its ending, of a single episode.

    Attributes:
        videos: the finished files, in the order in which they were finished.
        problem: why there are no more; None while all goes well.

    Raises:
        ConfigError: the directory cannot be made or written to, or ffmpeg is not there.
    """

    def __init__(
        self, directory: Path, episodes: int, kinds: Sequence[str] = ("mp4",), name: str | None = None
    ) -> None:
        self._ffmpeg, self._kinds, self._name = writer(), kinds, name
        self.videos: list[Path] = []
        self.problem: str | None = None
        self._directory, self._digits = directory, len(str(episodes - 1))
        self._rolling: dict[int, list[_Roll]] = {}
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
        stem = self._name or f"episode-{episode:0{self._digits}d}"
        try:
            if episode not in self._rolling:
                rolls = self._rolling[episode] = []
                for kind in self._kinds:
                    rolls.append(_ROLLS[kind](self._ffmpeg, self._directory / f"{stem}.{kind}", frame, _fps(env)))
            for roll in self._rolling[episode]:
                roll.add(frame)
        except Exception as error:
            self._give_up(f"writing {self._directory / stem}.{self._kinds[0]} {_first_line(error)}")

    def end(self, episode: int) -> None:
        """Finishes the files of an episode."""
        rolls = self._rolling.pop(episode, [])
        for roll in rolls:
            try:
                roll.finish()
                self.videos.append(roll.path)
            except Exception as error:
                roll.discard()
                self._give_up(f"writing {roll.path} {_first_line(error)}")

    def close(self) -> None:
        """Leaves whole episodes only: files of others are deleted, as are directories made for none."""
        self._discard()
        for path in self._made:
            with suppress(OSError):
                path.rmdir()  # refused where something is in it

    def _give_up(self, reason: str) -> None:
        self.problem = f"video: {reason}"
        self._discard()

    def _discard(self) -> None:
        for roll in (roll for rolls in self._rolling.values() for roll in rolls):
            roll.discard()
        self._rolling.clear()


class _Roll:
    """One file while it is written.

    Args:
        ffmpeg: the module that writes.
        path: the file.
        first: the first picture, for its shape.
        fps: frames a second.
        options: of ``write_frames``, besides.
        parameters: of ffmpeg's, besides.
    """

    def __init__(
        self, ffmpeg: Any, path: Path, first: Array, fps: float, parameters: Sequence[str] = (), **options: object
    ) -> None:
        self.path = self._file = path
        self._ffmpeg, self._shape, self._count = ffmpeg, first.shape, 0
        height, width = (side + side % 2 for side in first.shape[:2])
        # One thread each: several episodes are written at once, and drawing takes longer than writing.
        self._frames: Generator[None, Array | None, None] = ffmpeg.write_frames(
            str(path),
            (width, height),
            fps=fps,
            macro_block_size=1,
            ffmpeg_log_level="error",
            output_params=["-threads", "1", *parameters],
            **options,
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
        found, _ = self._ffmpeg.count_frames_and_secs(str(self._file))
        if found != self._count:
            raise RltoolError(f"the file holds {found} of {self._count} frames")

    def discard(self) -> None:
        """Deletes the file."""
        self._frames.close()
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


class _GifRoll(_Roll):
    """A GIF. Its palette is of all frames, so they are kept first, without loss, in a film beside it."""

    def __init__(self, ffmpeg: Any, path: Path, first: Array, fps: float) -> None:
        film = path.with_name(f".{path.stem}-{secrets.token_hex(3)}.mkv")
        lossless = ("-qp", "0", "-preset", "ultrafast")
        super().__init__(ffmpeg, film, first, fps, lossless, codec="libx264rgb", pix_fmt_out="rgb24", quality=None)
        self.path, self._fps = path, fps

    def finish(self) -> None:
        super().finish()
        palette = self._file.with_suffix(".png")
        try:
            for side, most in _GIF_SIZES:
                self._convert(palette, side, self._fps / math.ceil(self._fps / most))
                if self.path.stat().st_size <= _GIF_BYTES:
                    break
        finally:
            for path in (palette, self._file):
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        super().discard()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _convert(self, palette: Path, side: int, fps: float) -> None:
        height, width = self._shape[:2]
        scale = min(1.0, side / max(height, width))
        # Sides were made even for the film.
        picture = f"fps={fps},crop={width}:{height}:0:0,scale={round(width * scale)}:{round(height * scale)}:flags=area"
        self._run("-i", self._file, "-vf", f"{picture},palettegen", palette)
        use = f"{picture}[frames];[frames][1:v]paletteuse=dither=bayer:bayer_scale=5:diff_mode=rectangle"
        self._run("-i", self._file, "-i", palette, "-lavfi", use, "-loop", "0", self.path)

    def _run(self, *words: str | Path) -> None:
        """Runs ffmpeg.

        Raises:
            RltoolError: it fails; with its last line.
        """
        command = [self._ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RltoolError((done.stderr.strip().splitlines() or [f"ffmpeg ended with {done.returncode}"])[-1])


_ROLLS: dict[str, type[_Roll]] = {"mp4": _Roll, "gif": _GifRoll}


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
