"""Which pool: what the caller says, $GPUPOOL_URL, the configuration file, or the embedded pool here.

Rule 1: the first of these that says anything is taken whole; a broken one is an error, never passed over.
Rule 2: a token is written only to files that nobody else can read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from jupyter_gpupool._http import HERE, Address, PoolError, Trouble

#: Looked for in Jupyter's configuration folder, where `jupyter gpupool login` writes it.
FILE = "gpupool.yaml"
KEYS = ("url", "token", "ca")


def find(
    url: str | None,
    token: str | None,
    ca: str | None,
    *,
    start: bool,
    source: str = HERE,
) -> Address:
    """Find a pool.

    Args:
        url: Its address, where the caller says it.
        token: The token for it.
        ca: Its certificate authority, as a path or as PEM text.
        start: Whether to start the embedded pool where there is no other.
        source: Where the caller has the address from, for sentences.

    Raises:
        PoolError: What is said of it is broken, or there is none.
    """
    if url:
        known = None if token or ca or _environment("TOKEN") else _known(_bare(url))
        return known or Address(
            url=_bare(url),
            token=token or _environment("TOKEN"),
            ca=_pem(ca or _environment("CA")),
            source=source,
        )
    from_environment = _environment("URL")
    if from_environment:
        return Address(
            url=_bare(from_environment),
            token=token or _environment("TOKEN") or _hub_token(),
            ca=_pem(ca or _environment("CA")),
            source="$GPUPOOL_URL",
        )
    said = configured()
    if said is not None:
        return said
    from jupyter_gpupool import embedded

    return embedded.start() if start else embedded.find()


def _known(url: str) -> Address | None:
    """Return the pool at an address with its token, where this user has logged in to it or it is here."""
    from jupyter_gpupool import embedded

    for look in (configured, embedded.find):
        with contextlib.suppress(PoolError):
            known = look()
            if known is not None and known.url == url:
                return known
    return None


def _environment(name: str) -> str:
    return os.environ.get(f"GPUPOOL_{name}", "")


def _hub_token() -> str:
    """Return the token that this process has from its JupyterHub, where the Hub says it is for the pool."""
    return os.environ.get("JUPYTERHUB_API_TOKEN", "") if _environment("HUB") else ""


def _bare(url: str) -> str:
    return str(url).strip().rstrip("/").removesuffix("/v1")


def _pem(ca: str) -> str:
    """Read a certificate authority that is given as a path or as PEM text.

    Raises:
        PoolError: The file cannot be read.
    """
    if not ca or "-----BEGIN" in ca:
        return ca
    try:
        return Path(ca).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PoolError(
            Trouble.BAD_CONFIG,
            f"The certificate {ca!r} cannot be read ({_short(error)}).",
            "Correct $GPUPOOL_CA, or log in with `jupyter gpupool login LINE`.",
        ) from error


def _first_line(words: object) -> str:
    return str(words).partition("\n")[0]


def _short(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# ------------------------------------------------------------------------------------- the configuration file


def configuration() -> Path:
    """Say where the configuration file is, or would be."""
    from jupyter_core.paths import jupyter_config_dir

    return Path(jupyter_config_dir()) / FILE


def configured() -> Address | None:
    """Read the configuration file; `None` where there is none.

    Raises:
        PoolError: It is broken.
    """
    path = configuration()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, _short(error)) from error
    said = _parsed(path, text)
    if not said:
        return None
    return Address(
        url=_bare(said["url"]), token=said.get("token", ""), ca=_pem(said.get("ca", "")), source=str(path)
    )


def _parsed(path: Path, text: str) -> dict[str, str]:
    import yaml

    try:
        said: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise _broken(path, line + _first_line(getattr(error, "problem", error))) from error
    if said is None:
        return {}
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        raise _broken(path, "it must be lines such as `url: https://head-node:8790`")
    unknown = sorted(str(key) for key in said if key not in KEYS)
    if unknown:
        raise _broken(path, f"it says {unknown[0]!r}, but only {', '.join(KEYS)} can be said")
    if not said.get("url"):
        raise _broken(path, "the line with `url:` is missing")
    return said


def _broken(path: Path, why: str) -> PoolError:
    return PoolError(
        Trouble.BAD_CONFIG,
        f"The configuration file {path} is broken ({why}).",
        "Correct it, or remove it and log in again with `jupyter gpupool login LINE`.",
    )


def write_private(path: Path, text: str) -> None:
    """Write a file, whole or not at all, that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def save(address: Address) -> Path:
    """Write the configuration file, so that this pool is found from now on; return its path."""
    import yaml

    path = configuration()
    said = {"url": address.url, "token": address.token, "ca": address.ca}
    write_private(path, yaml.safe_dump(said, sort_keys=False))
    return path
