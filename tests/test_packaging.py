"""What is shipped: a wheel that works by itself, requirements that agree with each other."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rltool.commands.init import TEMPLATE_NAME, project

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(out), cwd=ROOT)
    return out


def _run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_config_files_and_nothing_foreign(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"rltool/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rltool").rglob("*.py")}
    template = {f"rltool/templates/project/{path.as_posix()}" for path in project(TEMPLATE_NAME)}
    assert shipped | modules | template <= names
    assert {name.split("/")[0] for name in names} == {"rltool", f"rltool-{metadata_version(built)}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def metadata_version(built: Path) -> str:
    (wheel,) = built.glob("*.whl")
    return wheel.name.split("-")[1]


def test_the_sdist_can_be_tested(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert "rltool/templates/project/README.md" in names
    assert {"conf/train.yaml", "rltool/cli.py", "tests/test_packaging.py", "constraints.txt", "LICENSE"} <= names


@pytest.mark.long
def test_an_installed_wheel_works_from_another_directory(built: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = next(path for path in scripts.iterdir() if path.stem == "python")
    site = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # The dependencies come from the environment of the tests; a .pth inside that directory is not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = built.glob("*.whl")
    _run(
        sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel),
        cwd=tmp_path,
    )  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    rltool = str(next(path for path in scripts.iterdir() if path.stem == "rltool"))
    assert "cartpole" in _run(rltool, "list", "envs", cwd=elsewhere, env=env)
    where = _run(rltool, "config", "algo=ppo", "env=cartpole", "--yaml", cwd=elsewhere, env=env)
    assert "id: CartPole-v1" in where
    conf = _run(str(python), "-c", "from rltool.configfiles import conf_dir; print(conf_dir())", cwd=elsewhere, env=env)
    assert Path(conf.strip()) == site / "rltool" / "conf"
    assert _run(str(python), "-m", "rltool", "--version", cwd=elsewhere, env=env).startswith("rltool ")
    assert not list(elsewhere.iterdir())
    assert "arm/envs.py" in _run(rltool, "init", "arm", cwd=elsewhere, env=env)
    assert "point" in _run(rltool, "list", "envs", "--config-dir", "conf", cwd=elsewhere / "arm", env=env)


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_normal(name): version for name, version in pins}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_constraints_fit_every_requirement() -> None:
    """But for ray, which would pull the others down to an older cloudpickle."""
    pins = constraints()
    for text in [
        *PROJECT["dependencies"],
        *(line for name, lines in EXTRAS.items() if name != "ray" for line in lines),
    ]:
        requirement = Requirement(text)
        if requirement.name == "rltool":  # a bundle of extras
            assert requirement.extras <= set(EXTRAS), text
            continue
        assert _normal(requirement.name) in pins, text
        assert requirement.specifier.contains(pins[_normal(requirement.name)]), text


def test_constraints_name_no_build_and_no_gpu_library() -> None:
    for name, version in constraints().items():
        assert "+" not in version, f"{name}: a local version fits one index only"
        assert not name.startswith(("nvidia-", "cuda-")), name


def test_what_is_imported_is_required() -> None:
    """Every third-party module that rltool imports belongs to a declared requirement; inside a function, where an extra
    can be asked for by name, to that of an extra."""
    required = {_normal(Requirement(text).name) for text in PROJECT["dependencies"]}
    optional = {_normal(Requirement(text).name) for lines in EXTRAS.values() for text in lines}
    owners = metadata.packages_distributions()
    missing: set[str] = set()
    for path in (ROOT / "rltool").rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) < 2 or words[0] not in ("import", "from"):
                continue
            name = words[1].split(".")[0].rstrip(",")
            if name not in owners or name == "rltool" or name in sys.stdlib_module_names:
                continue
            declared = required if line[0] != " " else required | optional
            if not declared & {_normal(owner) for owner in owners[name]}:
                missing.add(name)
    assert missing <= {"mujoco"}  # gymnasium's extras bring it


def test_extras_that_messages_name_exist() -> None:
    from rltool.importing import EXTRAS as NAMED

    assert set(NAMED.values()) <= set(EXTRAS)


def test_the_makefile_leaves_pips_settings_to_the_user() -> None:
    for name in ("Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        for word in ("index-url", "http", "find-links", "trusted-host"):
            assert word not in text, f"{name}: {word}"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
