"""Environment variables of workers on other hosts: those that were declared, never a secret.

On the driver's own host a worker inherits the environment. Another host has its own, to which is
added what the platform and the plugins declare for their workers, and those of the driver's
variables that ``forward_env`` names. A value that the other host has already is kept, and told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from attrs import frozen

SECRET = (
    "*TOKEN*",
    "*KEY*",
    "*SECRET*",
    "*PASSWORD*",
    "*PASSWD*",
    "*PASSPHRASE*",
    "*CREDENTIAL*",
    "*COOKIE*",
    "*AUTH*",
    "*PRIVATE*",
    "*PASS",
    "*_PWD",
    "*_PAT",
    "*DSN*",
    "*JWT*",
    "*BEARER*",
    "*WEBHOOK*",
    "*SESSION*",
)
"""Forms of names, in capitals, whose values never leave this host."""

NEVER = frozenset(
    {
        "DATABASE_URL",
        "KRB5CCNAME",
        "KUBECONFIG",
        "NETRC",
        "PGPASSFILE",
        "PIP_EXTRA_INDEX_URL",
        "PIP_INDEX_URL",
        "REDIS_URL",
        "UV_INDEX_URL",
    }
)
"""Names of no such form that hold secrets all the same: addresses with passwords in them, say."""

HARMLESS = (
    "TOKENIZERS_*", "*_MAX_TOKENS", "*_NUM_TOKENS", "*KEYBOARD*", "*_KEYWORDS", "*BYPASS",
)  # fmt: skip
"""Names that only look like one of these."""

CREDENTIALS = re.compile(r"://[^/?#\s]*@|-----BEGIN ")
"""What makes a value a secret, whatever its name: an address with a user or a password, a key."""

OWN = ("HARDPOINT_*",)
"""Each host's own configuration: what the driver's says, workers are told another way."""


@frozen(kw_only=True)
class Forwarded:
    """What a worker on another host is sent, and what was not: name -> why."""

    variables: Mapping[str, str]
    withheld: Mapping[str, str]


def is_secret(name: str) -> bool:
    """Whether the value of a variable must not leave this host, by its name; some must not by what
    they are (``CREDENTIALS``).
    """
    upper = name.upper()
    if upper in NEVER:
        return True
    if any(fnmatchcase(upper, form) for form in HARMLESS):
        return False
    return any(fnmatchcase(upper, form) for form in SECRET)


def across_hosts(
    declared: Mapping[str, str], environ: Mapping[str, str], allowed: Sequence[str]
) -> Forwarded:
    """Return what a worker on another host gets: what was ``declared`` for it, and the variables of
    ``environ`` that ``allowed`` names (names, or forms such as ``GLOO_*``).

    A secret is withheld though it was declared or is allowed by name.
    """
    chosen = {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, form) for form in allowed)
    }
    chosen |= declared
    withheld = {}
    for name in sorted(chosen):
        if is_secret(name):
            withheld[name] = "its name is that of a secret"
        elif CREDENTIALS.search(chosen[name]):
            withheld[name] = "its value holds a secret"
        elif any(fnmatchcase(name, form) for form in OWN):
            withheld[name] = "it configures the host that it is set on"
    kept = {name: value for name, value in chosen.items() if name not in withheld}
    return Forwarded(variables=kept, withheld=withheld)


def merged(own: Mapping[str, str], sent: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return a worker's environment on its host, and a line for each value of the host's ``own``
    that was kept against a ``sent`` one.
    """
    conflicts = [
        f"{name} = {_told(name, own[name])} of this host is kept; the driver's is {value!r}"
        for name, value in sorted(sent.items())
        if name in own and own[name] != value
    ]
    return {**sent, **own}, conflicts


def _told(name: str, value: str) -> str:
    return "(a secret)" if is_secret(name) or CREDENTIALS.search(value) else repr(value)
