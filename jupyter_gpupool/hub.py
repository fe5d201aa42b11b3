"""Make a pool one of a JupyterHub's services, in its `jupyterhub_config.py`.

    from jupyter_gpupool.hub import configure
    configure(c, url="https://head-node:8790", ca="/etc/gpupool/ca.pem")

The pool's controller asks the Hub who a token belongs to (`jupyter gpupool start --hub-api-url URL`).
The Hub's groups can then be members of projects as "@group", and its administrators are the pool's.
"""

from __future__ import annotations

from typing import Any

#: What the Hub itself gives the tokens of users and of their servers.
USUAL = {"user": ["self"], "server": ["users:activity!user", "access:servers!server"]}


def configure(config: Any, *, url: str, ca: str = "", service: str = "gpupool") -> None:
    """Let the Hub's people use a pool: their servers and notebooks find it, and get in by their Hub tokens.

    Args:
        config: The Hub's configuration, `c`.
        url: The pool's address, which `jupyter gpupool start` prints.
        ca: Path of the pool's certificate authority, where single-user servers can read it.
        service: The pool's name among the Hub's services.
    """
    config.JupyterHub.services.append({"name": service, "display": False})
    access = f"access:services!service={service}"
    for role, scopes in USUAL.items():
        config.JupyterHub.load_roles.append({"name": role, "scopes": [*scopes, access]})
    said = {"GPUPOOL_URL": url, "GPUPOOL_HUB": "1", **({"GPUPOOL_CA": ca} if ca else {})}
    config.Spawner.environment.update(said)
