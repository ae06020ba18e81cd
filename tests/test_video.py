"""Videos of evaluation episodes: each whole, none moves a number, and what cannot be filmed is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image, ImageSequence
from probes import Rule, gym_config, run, run_config
from safetensors.torch import load_file
from test_evaluation import eval_config

from rltool import opengl
from rltool.envs import single_env
from rltool.errors import ConfigError, RltoolError
from rltool.evaluation import EvalReport, Evaluator, evaluate_checkpoint
from rltool.policy import load_policy
from rltool.seeding import Stream, seeds
from rltool.video import Film, new_directory

pytestmark = pytest.mark.long

ffmpeg = pytest.importorskip("imageio_ffmpeg")

ROOT = Path(__file__).resolve().parents[1]


class Painter(gym.Env[Any, Any]):
    """Paints each step in a shade of its own, with noise from its own generator and from NumPy's global one.

    Its reward comes from those generators as well, so that a picture too many would change it.

    Args:
        render_mode: Gymnasium's.
        size: height and width of a picture.
        fault: at the ``at``-th picture: ``raise``, ``none`` (gives None), ``float``, ``size`` (another one).
        fps: ``render_fps`` of the metadata.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own form
    observation_space = spaces.Box(0, 255, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self,
        render_mode: str | None = None,
        size: tuple[int, int] = (32, 48),
        fault: str | None = None,
        at: int = 5,
        fps: float | None = None,
    ) -> None:
        self.render_mode, self.size, self.fault, self.at = render_mode, tuple(size), fault, at
        if fps is not None:
            self.metadata = {**self.metadata, "render_fps": fps}
        self.t = self.pictures = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.base = 0, int(self.np_random.integers(60, 120))
        return np.array([0, self.base], np.float32), {}

    def step(self, action: object) -> Any:
        self.t += 1
        reward = self.np_random.normal() + np.random.normal()
        return np.array([self.t, self.base], np.float32), reward, self.t == self.base % 5 + 3, False, {}

    def render(self) -> Any:
        self.pictures += 1
        self.np_random.normal(), np.random.normal()
        picture = np.full((*self.size, 3), self.base + 10 * self.t, np.uint8)
        if self.pictures < self.at or self.fault is None:
            return picture
        if self.fault == "raise":
            raise ZeroDivisionError("no paint")
        return {"none": None, "float": picture / 255, "size": picture[:-2]}[self.fault]


class Blind(gym.Env[Any, Any]):
    """Takes a render mode, and knows none that draws."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
    observation_space, action_space = Painter.observation_space, Painter.action_space

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode


gym.register("Painter-v0", Painter)
gym.register("Blind-v0", Blind)


def frames_of(path: Path) -> np.ndarray[Any, Any]:
    """The pictures of a file, ``[frames, height, width, 3]``."""
    reader = ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


Filmed = Callable[..., EvalReport]


@pytest.fixture
def filmed(tmp_path: Path) -> Filmed:
    """Evaluates an environment, with a film in ``tmp_path / "videos"`` unless ``video=False``; always the first action."""

    def evaluate(
        env_id: str = "Painter-v0",
        *,
        num_envs: int = 1,
        episodes: int = 3,
        video: bool = True,
        kinds: tuple[str, ...] = ("mp4",),
        **changes: object,
    ) -> EvalReport:
        config: Any = gym_config(env_id, **changes)  # type: ignore[arg-type]
        mode = "rgb_array" if video else None
        with closing(Evaluator(config, num_envs=num_envs, device=torch.device("cpu"), render_mode=mode)) as made:
            rule = Rule(made.actions, None)
            if not video:
                return made(rule, episodes=episodes, seed=0, max_steps=50)
            with closing(Film(tmp_path / "videos", episodes, kinds)) as film:
                return made(rule, episodes=episodes, seed=0, max_steps=50, film=film)

    return evaluate


def numbers(report: EvalReport) -> EvalReport:
    return replace(report, videos=[], video_problem=None)


@pytest.fixture(scope="module")
def cartpole(dqn_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[EvalReport, EvalReport]:
    """The report of three filmed episodes, two side by side, and of the same without video."""
    directory = tmp_path_factory.mktemp("video")
    checkpoint = dqn_run / "checkpoints/last.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUJOCO_GL", "")  # what it is set to goes with the test
        patch.setenv("SDL_VIDEODRIVER", "dummy")
        report = evaluate_checkpoint(eval_config(checkpoint, video=True, video_dir=str(directory)))
    return report, evaluate_checkpoint(eval_config(checkpoint))


def test_every_episode_has_a_file_of_its_own(cartpole: tuple[EvalReport, EvalReport]) -> None:
    report, _ = cartpole
    paths = [Path(path) for path in report.videos]
    assert [path.name for path in paths] == [f"episode-{index}.mp4" for index in range(3)]
    assert sorted(paths[0].parent.iterdir()) == paths
    assert report.video_problem is None


def test_a_video_moves_no_number(cartpole: tuple[EvalReport, EvalReport]) -> None:
    report, without = cartpole
    assert numbers(report) == without
    assert len(set(report.returns)) > 1


def test_a_video_shows_its_episode_from_the_reset_to_the_last_step(
    cartpole: tuple[EvalReport, EvalReport], dqn_run: Path
) -> None:
    report, _ = cartpole
    policy = load_policy(dqn_run)
    first = []
    for path, seed, length in zip(report.videos, seeds(0, Stream.TEST_ENV, 3), report.lengths, strict=True):
        with closing(gym.make("CartPole-v1", render_mode="rgb_array")) as env:
            observation, _ = env.reset(seed=seed)
            expected = [env.render()]
            for _ in range(length):
                observation, *_ = env.step(policy(observation))
                expected.append(env.render())
        frames = frames_of(Path(path))
        assert frames.shape == (length + 1, 400, 600, 3)
        # The encoder loses a little at edges; the pole of another step would be many times as much.
        differences = np.abs(frames.astype(int) - np.stack(expected)).mean((1, 2, 3))  # type: ignore[arg-type]
        assert differences.max() < 0.3
        assert frames.mean() > 200
        assert frames.std((1, 2, 3)).min() > 5  # something is in it
        first.append(frames[0])
    assert min(np.abs(a.astype(int) - b).mean() for a, b in pairwise(first)) > 0.3


@pytest.mark.parametrize("num_envs", [1, 2, 4])
def test_frames_are_as_many_as_steps_and_one(filmed: Filmed, num_envs: int) -> None:
    report = filmed(num_envs=num_envs, episodes=12)
    assert [Path(path).name for path in report.videos] == [f"episode-{index:02d}.mp4" for index in range(12)]
    starts = [np.random.default_rng(seed).integers(60, 120) for seed in seeds(0, Stream.EVAL_ENV, 12)]
    for path, length, base in zip(report.videos, report.lengths, starts, strict=True):
        shades = frames_of(Path(path)).mean((1, 2, 3))
        np.testing.assert_allclose(shades, base + 10 * np.arange(length + 1), atol=4)
    assert numbers(report) == filmed(num_envs=num_envs, episodes=12, video=False)


def test_what_is_drawn_is_filmed_whatever_is_observed(filmed: Filmed, tmp_path: Path) -> None:
    wrappers = [
        "AddRenderObservation",
        "GrayscaleObservation",
        {"name": "FrameStackObservation", "kwargs": {"stack_size": 2}},
    ]
    report = filmed(render_mode="rgb_array", wrappers=wrappers, episodes=1)
    assert frames_of(tmp_path / "videos/episode-0.mp4").shape == (report.lengths[0] + 1, 32, 48, 3)


def test_odd_sides_are_made_even_and_the_speed_is_the_environment_s(filmed: Filmed, tmp_path: Path) -> None:
    filmed(size=[33, 35], fps=12.5, episodes=1)
    meta = next(ffmpeg.read_frames(str(tmp_path / "videos/episode-0.mp4")))
    assert (meta["size"], meta["fps"]) == ((36, 34), 12.5)
    assert frames_of(tmp_path / "videos/episode-0.mp4").min() > 50


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "drawing Painter-v0 raised ZeroDivisionError: no paint"),
        ("none", r"must give a picture, uint8 of shape \(height, width, 3\), found NoneType"),
        ("float", "found float64 of shape"),
        ("size", r"one frame has the shape \(30, 48, 3\), the first has \(32, 48, 3\)"),
    ],
)
def test_a_fault_ends_the_film_and_not_the_evaluation(filmed: Filmed, tmp_path: Path, fault: str, said: str) -> None:
    at = filmed(video=False).lengths[0] + 3  # in the second episode
    report = filmed(fault=fault, at=at)
    assert report.video_problem is not None
    assert re.search(said, report.video_problem), report.video_problem
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["episode-0.mp4"]
    assert numbers(report) == filmed(video=False)


def test_without_a_picture_nothing_is_left(filmed: Filmed, tmp_path: Path) -> None:
    report = filmed(fault="raise", at=1)
    assert report.videos == []
    assert not (tmp_path / "videos").exists()


def test_a_file_without_all_frames_is_none(filmed: Filmed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffmpeg, "count_frames_and_secs", lambda path: (3, 0.1))
    report = filmed(episodes=2)
    assert report.video_problem is not None
    assert "the file holds 3 of" in report.video_problem
    assert (report.videos, (tmp_path / "videos").exists()) == ([], False)


@pytest.mark.parametrize("program", ["false", "nowhere"])
def test_without_a_working_ffmpeg_the_numbers_are_there(
    filmed: Filmed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", shutil.which(program) or program)
    report = filmed()
    assert report.video_problem is not None
    assert report.video_problem.startswith(f"video: writing {tmp_path}/videos/episode-0.mp4 raised ")
    assert "\n" not in report.video_problem
    assert numbers(report) == filmed(video=False)


def test_a_gif_shows_the_episode_too(filmed: Filmed, tmp_path: Path) -> None:
    report = filmed(episodes=2, kinds=("mp4", "gif"), fps=50, size=[33, 48])
    assert [Path(path).name for path in report.videos] == [
        f"episode-{index}.{kind}" for index in range(2) for kind in ("gif", "mp4")
    ]
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [Path(path).name for path in report.videos]
    starts = [np.random.default_rng(seed).integers(60, 120) for seed in seeds(0, Stream.EVAL_ENV, 2)]
    for path, length, base in zip(report.videos[::2], report.lengths, starts, strict=True):
        with Image.open(path) as gif:
            assert (gif.size, gif.info["loop"]) == ((48, 33), 0)  # it plays again and again
            frames = [(each.info["duration"], np.asarray(each.convert("RGB"))) for each in ImageSequence.Iterator(gif)]
        assert {duration for duration, _ in frames} == {40}  # every second picture, of 20 ms each
        shades = np.array([picture.mean() for _, picture in frames])
        assert len(frames) in (length // 2 + 1, length // 2 + 2)
        np.testing.assert_allclose(shades[:-1], base + 20 * np.arange(len(frames) - 1), atol=11)
        np.testing.assert_allclose(shades[-1], base + 10 * length, atol=11)
    assert numbers(report) == filmed(episodes=2, video=False)


def test_a_large_gif_is_made_again_smaller(filmed: Filmed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltool.video._GIF_BYTES", 0)
    monkeypatch.setattr("rltool.video._GIF_SIZES", ((24, 25.0), (12, 5.0)))
    (path,) = filmed(episodes=1, kinds=("gif",), fps=30).videos
    with Image.open(path) as gif:
        assert (gif.size, gif.info["duration"]) == ((12, 8), 200)
    assert list((tmp_path / "videos").iterdir()) == [Path(path)]


def test_a_gif_that_cannot_be_made_leaves_the_other_film(
    filmed: Filmed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RltoolError("no room")

    monkeypatch.setattr("rltool.video._GifRoll._convert", refuse)
    report = filmed(episodes=1, kinds=("mp4", "gif"))
    assert report.video_problem is not None
    assert report.video_problem.startswith(
        f"video: writing {tmp_path}/videos/episode-0.gif raised RltoolError: no room"
    )
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["episode-0.mp4"]


# ----------------------------------------------------------------------------------------------------- while training


def test_a_run_films_and_shows_it_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("total_frames=200", "eval.max_steps=20", "logging=tensorboard")
    summary: Any = run(tmp_path / "filmed", "dqn", *words, "eval.video_interval=100")
    run(tmp_path / "plain", "dqn", *words)
    assert summary["faults"]["video"] == 0
    videos = tmp_path / "filmed/videos"
    assert {path.name for path in videos.iterdir()} == {f"{n}.{kind}" for n in (100, 200) for kind in ("gif", "mp4")}
    assert frames_of(videos / "200.mp4").mean() > 200
    events = EventAccumulator(str(tmp_path / "filmed"), {"images": 0})
    events.Reload()
    shown = events.Images("videos/evaluation")
    assert [image.step for image in shown] == [100, 200]
    assert (shown[1].width, shown[1].height) == (320, 213)
    assert shown[1].encoded_image_string == (videos / "200.gif").read_bytes()
    one, two = (load_file(tmp_path / name / "checkpoints/last.ckpt") for name in ("filmed", "plain"))
    assert all(torch.equal(one[key], two[key]) for key in one.keys() | two.keys())


def test_a_run_without_opengl_goes_on_and_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mujoco  # noqa: F401 - imported before, it does not mind

    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    words = ("env=inverted_pendulum", "total_frames=224", "eval.video_interval=64", "logging=none")
    summary: Any = run(tmp_path, "ppo", *words)
    assert (summary["status"], summary["faults"]["video"]) == ("finished", 3)
    said = capsys.readouterr().out
    (told,) = re.findall(r"warning: the video at .* failed: .*", said)
    assert "MUJOCO_GL=egl" in told
    assert re.search(r"faults +3 videos failed; see log\.txt", said)
    assert not (tmp_path / "videos").exists()


def test_what_draws_nothing_cannot_be_filmed_while_training(tmp_path: Path) -> None:
    words = ("env=gym", "env.id=Probe-v0", "eval.video_interval=10", "total_frames=40")
    with pytest.raises(ConfigError, match=r"^video: Probe-v0 cannot be watched: it takes no render_mode"):
        run(tmp_path / "run", "dqn", *words)
    assert not (tmp_path / "run").exists()


def test_an_environment_with_transforms_is_filmed(filmed: Filmed) -> None:
    report = filmed(transforms=["StepCounter"], fps=12.5)
    assert numbers(report) == filmed(transforms=["StepCounter"], video=False)
    assert [len(frames_of(Path(path))) for path in report.videos] == [length + 1 for length in report.lengths]
    assert next(ffmpeg.read_frames(report.videos[0]))["fps"] == 12.5


def test_a_torchrl_environment_is_refused() -> None:
    config: Any = run_config("algo=ppo", "env=torchrl", "env.entry_point=torchrl.envs:PendulumEnv").env
    with pytest.raises(
        ConfigError, match=r"^video: torchrl\.envs:PendulumEnv is a TorchRL environment, and those draw no"
    ):
        single_env(config, 0, render_mode="rgb_array")


def test_where_videos_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/x"
    made = [new_directory(Path("best.ckpt"), run) for _ in range(2)]
    assert made[0].parent == made[1].parent == run / "videos"
    assert made[0] != made[1]
    assert made[0].name.startswith("best-")
    assert new_directory(Path("elsewhere/best.ckpt"), None).parent == tmp_path / "videos"
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=r"^video_dir: cannot write into .*taken/x: .*video_dir=PATH"):
        Film(tmp_path / "taken/x", 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"env_id": "Probe-v0"},
            r"^video: Probe-v0 cannot be watched: it takes no render_mode\..* take render_mode in",
        ),
        (
            {"env_id": "Blind-v0"},
            r"^video: Blind-v0 draws no pictures: expected rgb_array .*found only ansi\. .*metadata",
        ),
        (
            {"env_id": "Painter-v0", "render_mode": "human"},
            r"^env\.kwargs\.render_mode: expected rgb_array with video=true, found human",
        ),
    ],
)
def test_what_draws_nothing_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        single_env(gym_config(**config), 0, render_mode="rgb_array")


def test_a_window_and_a_video_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="expected false with render=true"):
        eval_config(Path("x"), render=True, video=True)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"^video: module imageio_ffmpeg .*pip install 'rltool\[video\]'"):
        Film(tmp_path / "videos", 1)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- OpenGL


def test_egl_is_taken_where_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    import mujoco  # noqa: F401 - imported before, it loads nothing more

    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    opengl.settle_without_screen()
    assert (os.environ["MUJOCO_GL"], os.environ["SDL_VIDEODRIVER"]) == ("egl", "dummy")
    os.environ["MUJOCO_GL"] = "osmesa"
    opengl.settle_without_screen()
    assert os.environ["MUJOCO_GL"] == "osmesa"
    del os.environ["MUJOCO_GL"]
    monkeypatch.setenv("DISPLAY", ":0")
    opengl.settle_without_screen()
    assert "MUJOCO_GL" not in os.environ


def test_a_library_that_is_missing_ends_nothing() -> None:
    script = (
        "import os\nfrom rltool.opengl import settle\n"
        "settle()\nassert 'MUJOCO_GL' not in os.environ\nimport mujoco\nprint(mujoco.MjModel)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": "nonsense"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: MUJOCO_GL=nonsense does not work here (")
    assert len(done.stderr.splitlines()) == 1


def test_what_does_not_work_gives_way_to_what_may() -> None:
    script = (
        "import os, sys, types\nfrom rltool.opengl import settle\n"
        "sys.modules['OpenGL.platform'] = types.ModuleType('of another platform')\n"
        "settle('disabled')\nprint(os.environ['MUJOCO_GL'], 'OpenGL.platform' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": "nonsense"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout == "disabled False\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="EGL and OSMesa are Linux's")
def test_without_opengl_the_numbers_are_there_and_the_reason(filmed: Filmed, monkeypatch: pytest.MonkeyPatch) -> None:
    import mujoco  # noqa: F401 - imported before, it does not mind

    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    report = filmed("InvertedDoublePendulum-v5", episodes=2)
    assert report.video_problem is not None
    for part in (
        "drawing InvertedDoublePendulum-v5 raised",
        "MUJOCO_GL=egl",
        "MUJOCO_GL=osmesa",
        "libegl1",
        "libosmesa6",
    ):
        assert part in report.video_problem
    assert numbers(report) == filmed("InvertedDoublePendulum-v5", episodes=2, video=False)


@pytest.mark.skipif(sys.platform != "linux", reason="EGL is Linux's")
def test_mujoco_is_filmed_side_by_side(filmed: Filmed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several OpenGL contexts in one process: none may draw into another's picture, or black."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    together = filmed("InvertedDoublePendulum-v5", num_envs=3)
    if together.video_problem is not None:
        pytest.skip(together.video_problem)
    films = [frames_of(Path(path)) for path in together.videos]
    assert [len(frames) for frames in films] == [length + 1 for length in together.lengths]
    drawn = []
    for frames, seed in zip(films, seeds(0, Stream.EVAL_ENV, 3), strict=True):
        with closing(gym.make("InvertedDoublePendulum-v5", render_mode="rgb_array")) as env:
            env.reset(seed=seed)
            drawn.append([env.render()])
            for _ in frames[1:]:
                env.step(np.zeros(1))
                drawn[-1].append(env.render())
    shortest = min(map(len, films))
    for index, frames in enumerate(films):
        assert frames.mean((1, 2, 3)).min() > 20
        distances = [np.abs(frames[:shortest].astype(int) - np.stack(each[:shortest])).mean() for each in drawn]
        assert int(np.argmin(distances)) == index
    assert numbers(together) == filmed("InvertedDoublePendulum-v5", num_envs=3, video=False)


@pytest.mark.smoke
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of loaded libraries")
def test_training_touches_no_opengl(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom rltool.cli import main\n"
        "code = main(['train', 'algo=ppo', 'env=inverted_double_pendulum', 'total_frames=64', 'algo.frames_per_batch=32',"
        " 'algo.minibatch_size=16', 'algo.warmup_frames=16', 'env.num_envs=2', 'eval.episodes=1', 'tuned=none',"
        " 'compile=false', 'quiet=true'])\n"
        "assert code == 0, code\n"
        "renderers = {'OpenGL', 'pygame', 'mujoco.egl', 'mujoco.osmesa', 'imageio_ffmpeg'} & set(sys.modules)\n"
        "loaded = {line.split('/')[-1].strip() for line in Path('/proc/self/maps').read_text().splitlines()}\n"
        "found = {name for name in loaded if name.startswith(('libGL', 'libEGL', 'libOSMesa', 'libX11'))}\n"
        "sys.exit(str(renderers | found) if renderers | found else 0)\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
