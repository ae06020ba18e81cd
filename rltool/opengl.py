"""OpenGL, which only pictures need: where to look for it, and that nothing else stumbles over it."""

from __future__ import annotations

import os
import sys


def settle(default: str | None = None) -> None:
    """Sees to a ``MUJOCO_GL`` that MuJoCo can be imported with. Call before torchrl is imported.

    MuJoCo loads what it names as it is imported, and torchrl imports MuJoCo: a library that is missing would end every
    command, training too.

    Args:
        default: its value where the user has set none, or one that does not work; forgotten without a word where it does
            not work either.
    """
    name, platform = "MUJOCO_GL", "PYOPENGL_PLATFORM"
    asked, before = os.environ.get(name), os.environ.get(platform)
    if not asked:
        if default is None:
            return
        os.environ[name] = default
    try:
        import mujoco  # noqa: F401
    except ImportError:
        return  # it is not installed, and nobody will miss it
    except Exception as error:
        del os.environ[name]
        os.environ.pop(platform, None)  # MuJoCo has set it by then, and it would bar other ways
        if before is not None:
            os.environ[platform] = before
        # So would what PyOpenGL has imported for that platform.
        for module in [module for module in sys.modules if module.partition(".")[0] == "OpenGL"]:
            del sys.modules[module]
        if asked:
            print(f"warning: MUJOCO_GL={asked} does not work here ({error}) and is left out", file=sys.stderr)
            settle(default)


def settle_without_screen() -> None:
    """Lets MuJoCo and SDL (pygame) draw where there is no screen, unless the user has said how."""
    screen = sys.platform != "linux" or os.environ.get("DISPLAY")
    settle(None if screen else "egl")
    if not screen and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def how_to_get() -> str:
    """What to do where a picture failed for want of OpenGL."""
    chosen = os.environ.get("MUJOCO_GL")
    found = f"It needs OpenGL, which {f'MUJOCO_GL={chosen}' if chosen else 'MuJoCo'} did not find."
    if sys.platform != "linux":
        return found
    return (
        f"{found} Without a screen use MUJOCO_GL=egl (a graphics driver, or apt-get install libegl1 libgl1-mesa-dri) or "
        "MUJOCO_GL=osmesa (apt-get install libosmesa6)"
    )
