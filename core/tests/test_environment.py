"""Which variables travel to other hosts."""

from __future__ import annotations

import pytest
from hardpoint.environment import across_hosts, is_secret, merged


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DB_PASSWORD", "my_secret_thing",
     "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "PIP_INDEX_URL", "KUBECONFIG",
     "WANDB_API_KEY", "GITHUB_TOKEN", "TLS_PRIVATE_PEM", "MYSQL_PWD", "SMTP_PASS", "MY_PAT",
     "DATABASE_DSN", "APP_JWT", "BEARER", "SLACK_WEBHOOK", "SESSION_ID", "sentry_dsn"],
)  # fmt: skip
def test_secrets_are_known_by_their_names(name):
    assert is_secret(name)
    sent = across_hosts({name: "x"}, {name: "x"}, (name, "*"))
    assert name not in sent.variables
    assert name in sent.withheld


@pytest.mark.parametrize(
    "name",
    ["OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GLOO_IB_HCA", "PYTHONHASHSEED", "PATH", "PWD",
     "PROXY_BYPASS", "COMPASS_DIR", "PATTERN"],
)  # fmt: skip
def test_what_only_looks_like_one_is_sent(name):
    assert across_hosts({}, {name: "x"}, (name,)).variables == {name: "x"}


@pytest.mark.parametrize(
    "value",
    ["mongodb://u:pw@h/db", "http://user:pw@proxy:8080", "https://ghp_x@github.com",
     "a=1 -----BEGIN RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_a_value_that_holds_a_secret_is_withheld_and_not_shown(value):
    sent = across_hosts({"PROXY": value}, {"OTHER": value}, ("*",))
    assert sent.variables == {}
    assert sent.withheld == dict.fromkeys(("OTHER", "PROXY"), "its value holds a secret")
    plain = {"PROXY": "http://proxy:8080/?a@b", "MAIL": "me@host"}
    assert across_hosts(plain, {}, ()).variables == plain
    _, conflicts = merged({"PROXY": value}, plain)
    assert conflicts == [
        "PROXY = (a secret) of this host is kept; the driver's is 'http://proxy:8080/?a@b'"
    ]


def test_only_what_was_declared_or_allowed_is_sent():
    environ = {"GLOO_A": "1", "GLOO_B": "2", "HOME": "/root", "PYTHONHASHSEED": "7",
               "HARDPOINT_DTYPE": "x"}  # fmt: skip
    sent = across_hosts({"PLUGIN_MODE": "fast", "GLOO_B": "3"}, environ, ("GLOO_*", "HARDPOINT_*"))
    assert sent.variables == {"GLOO_A": "1", "GLOO_B": "3", "PLUGIN_MODE": "fast"}
    assert sent.withheld == {"HARDPOINT_DTYPE": "it configures the host that it is set on"}
    assert across_hosts({}, environ, ()).variables == {}


def test_a_value_of_the_host_is_kept_and_told():
    own = {"A": "own", "B": "same"}
    variables, conflicts = merged(own, {"A": "sent", "B": "same", "C": "new"})
    assert variables == {"A": "own", "B": "same", "C": "new"}
    assert conflicts == ["A = 'own' of this host is kept; the driver's is 'sent'"]
