"""Whether the code that a checkpoint names may be imported: the file may come from anywhere. No torch.

A configuration can name code: plugins, the module of an environment's id, entry points, wrappers and transforms. Typed, it
is the user's word. Read from a checkpoint it is so only if this user wrote that checkpoint, which a signature shows: an
HMAC (RFC 2104) of the configuration with a secret that only the user can read. Of any other checkpoint the user has to name
the modules in the same command.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from rltool.config import Tree, laid_over
from rltool.errors import ConfigError, Problem
from rltool.importing import import_object

if TYPE_CHECKING:
    from rltool.checkpoint import Header

# The groups of a configuration that a policy is rebuilt from.
POLICY = ("plugins", "algo", "network", "optim", "buffer")

# Keys whose text is module:name. Other texts of that form may be handed to a library that imports them.
_CODE_KEYS = ("id", "entry_point", "name")
_MODULE_AND_NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d].*", re.DOTALL)

# Packages whose ids rltool's own options and documentation use.
_PACKAGES = ("ale_py", "minigrid", "shimmy")

# Wrappers and transforms of the libraries that do more than compute: they write files, download, install, start servers.
_FAR_REACHING = frozenset(
    {
        "ModuleTransform",
        "R3MTransform",
        "RayTransform",
        "RecordVideo",
        "Tokenizer",
        "VC1Transform",
        "VIPRewardTransform",
        "VIPTransform",
    }
)
_SECRET_BYTES = 32


def configuration(header: Header, typed: Mapping[str, object], groups: Sequence[str] = ()) -> Tree:
    """The configuration of a checkpoint with what the user typed laid over it.

    Args:
        header: of the checkpoint.
        typed: the user's own values, as a tree; the modules that they name, and those under ``plugins``, are trusted.
        groups: what is wanted of it; everything by default.

    Raises:
        ConfigError: it names code that neither this user wrote down in it nor the user typed.
    """
    return allowed(header.path, header.config, typed, groups, signed=lambda: _is_signed(header))


def allowed(
    path: Path,
    config: Mapping[str, object],
    typed: Mapping[str, object],
    groups: Sequence[str] = (),
    *,
    signed: Callable[[], bool],
) -> Tree:
    """A configuration that a file holds with what the user typed laid over it.

    Args:
        path: the file.
        config: the configuration in it.
        typed, groups: see :func:`configuration`.
        signed: says whether this user wrote the file.

    Raises:
        ConfigError: it names code that neither this user wrote down in it nor the user typed.
    """
    whole = laid_over(config, typed)
    tree = {name: value for name, value in whole.items() if not groups or name in groups}
    words = {module for _, _, module in _named(typed)}
    named = [(place, text, module) for place, text, module in _named(tree) if not _known(place, module)]
    strange = list(dict.fromkeys(module for _, _, module in named if not _covered(module, words)))
    reaching = list(_reaching(tree, typed))
    if not (named or reaching) or signed():
        return tree
    if strange:
        plugins = [name for name in words if _named_as_plugin(name, typed)] + strange
        modules = f"the module{'s' if len(strange) > 1 else ''} {', '.join(strange)}"
        text = f"{path} names code of {modules}, and was not written by you on this machine"
        raise ConfigError(Problem("plugins", text, f"Give plugins=[{','.join(plugins)}] if you trust it"))
    if reaching:
        raise ConfigError(
            Problem(
                key,
                f"{path} names {name}, which reaches beyond the environment (files, downloads), and was not written "
                "by you on this machine",
                f"Give {key}=[…] yourself if you trust it",
            )
            for key, name in reaching
        )
    theirs = set(_named(typed))
    for place, text, module in named:
        if place[-1] == "entry_point" and (place, text, module) not in theirs:
            _check_home(place, text, words)
    return tree


def _named(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Where a configuration names code: the path of the key, the text, the module in it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item, path)
    elif isinstance(value, str) and path == ("plugins",):
        yield path, value, value
    elif isinstance(value, str) and path and path[-1] != "kind":  # which is looked up and never imported
        # A bare item of env.wrappers and env.transforms is a name.
        is_name = path[-1] in _CODE_KEYS or path in (("env", "wrappers"), ("env", "transforms"))
        match = _MODULE_AND_NAME.fullmatch(value)
        module = value.rpartition(":")[0] if is_name else match[1] if match else ""
        if module:
            yield path, value, module


def _known(path: tuple[str, ...], module: str) -> bool:
    return path == ("env", "id") and module in _PACKAGES


def _covered(module: str, words: Iterable[str]) -> bool:
    """Whether a module is one of those that the user named, or lies in one."""
    return any(module == word or module.startswith(f"{word}.") for word in words)


def _named_as_plugin(name: str, typed: Mapping[str, object]) -> bool:
    plugins = typed.get("plugins")
    return isinstance(plugins, list | tuple) and name in plugins


def _reaching(tree: Mapping[str, object], typed: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The key and the name of each wrapper or transform of the checkpoint's that is not for a stranger to choose."""
    env, typed_env = tree.get("env"), typed.get("env")
    for key in ("wrappers", "transforms"):
        items = env.get(key) if isinstance(env, Mapping) else None
        if not isinstance(items, list) or (isinstance(typed_env, Mapping) and key in typed_env):
            continue
        for item in items:
            name = str(item.get("name") if isinstance(item, Mapping) else item).rpartition(":")[2]
            if name in _FAR_REACHING:
                yield f"env.{key}", name


def _check_home(path: tuple[str, ...], text: str, words: Iterable[str]) -> None:
    """Asks whether an entry point is the module's own: ``my_module:system`` may be a function that it imported.

    Raises:
        ConfigError: it is another module's, or there is none.
    """
    key = ".".join(path)
    home = getattr(import_object(text, key), "__module__", None)
    if not (isinstance(home, str) and _covered(home, words)):
        raise ConfigError(
            Problem(
                key,
                f"expected a function or a class that {text.partition(':')[0]} defines, found {text}, which comes from {home}",
                f"Give plugins=[…] with that module too, or {key}={text} yourself, if you trust it",
            )
        )


def signature(config: Mapping[str, object]) -> str | None:
    """What shows later that this user wrote a configuration; None where no secret can be kept."""
    secret = _secret()
    if secret is None:
        return None
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hmac.new(secret, canonical.encode(), "sha256").hexdigest()


def is_own(header: Header | None, config: Mapping[str, object]) -> bool:
    """Whether this user wrote a configuration: it is that of a checkpoint with the user's signature."""
    if header is None or not _is_signed(header):
        return False
    keys = {*header.state.config, *config} - {"resume", "init"}  # paths, of which a checkpoint keeps none
    return all(header.state.config.get(key) == config.get(key) for key in keys)


def _is_signed(header: Header) -> bool:
    expected = signature(header.state.config) if header.signature is not None else None
    if expected is None or header.signature is None:
        return False
    return hmac.compare_digest(expected.encode(), header.signature.encode())


def _secret() -> bytes | None:
    """The user's own secret, made when it is first needed; None where none can be kept that only the user can read."""
    try:
        path = _secret_path()
        if not path.exists():
            _make_secret(path)
        seen, secret = path.stat(), path.read_bytes()
    except (OSError, RuntimeError):  # no home, no room, no permission, no locks
        return None
    open_to_others = hasattr(os, "getuid") and (seen.st_uid != os.getuid() or seen.st_mode & 0o077)
    return None if open_to_others or len(secret) != _SECRET_BYTES else secret


def _secret_path() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "rltool" / "secret"


def _make_secret(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # of two runs that start together, one makes it
        if path.exists():
            return
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        os.replace(temporary, path)
