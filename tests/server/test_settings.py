"""Settings are checked once; a flag wins over its variable, a variable over the default."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dgemma.cli.server_options import SERVER_FLAGS, add_flags, read_flags
from dgemma.errors import InputError
from dgemma.server.http.settings import Adapter, Settings


def settings_from(*argv: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings, SERVER_FLAGS)
    return read_flags(Settings, SERVER_FLAGS, parser.parse_args(argv), environment)


def test_without_words_a_server_is_for_this_machine_only() -> None:
    settings = settings_from()
    assert settings == Settings()
    assert settings.is_loopback
    assert not Settings(host="0.0.0.0").is_loopback  # noqa: S104
    assert not settings.log_text


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    variables = {"DGEMMA_PORT": "81", "DGEMMA_HOST": "::1", "DGEMMA_LOG_TEXT": "yes"}
    settings = settings_from("--port", "82", **variables)
    assert (settings.port, settings.host, settings.log_text) == (82, "::1", True)
    assert settings_from("--log-text").log_text
    assert not settings_from(DGEMMA_LOG_TEXT="0").log_text
    assert not settings_from("--no-log-text", DGEMMA_LOG_TEXT="1").log_text
    assert settings_from(DGEMMA_MAX_MODEL_LEN="").max_model_len is None


def test_flags_that_may_be_repeated_have_variables_with_commas() -> None:
    by_flag = settings_from("--allowed-host", "a", "--allowed-host", "b", "--adapter", "sums=runs/sums")
    by_variable = settings_from(DGEMMA_ALLOWED_HOST="a,b", DGEMMA_ADAPTER="sums=runs/sums")
    assert by_flag == by_variable
    assert by_flag.allowed_hosts == ("a", "b")
    assert by_flag.adapters == (Adapter(name="sums", path=Path("runs/sums")),)


def test_limits_of_keys_go_with_keys() -> None:
    limits = ("--requests-per-minute", "9", "--tokens-per-minute", "9", "--max-key-seqs", "2")
    assert settings_from(*limits, DGEMMA_API_KEY="a").max_key_seqs == 2
    assert settings_from(*limits, "--api-key-file", "keys").requests_per_minute == 9


def test_a_key_is_never_taken_from_the_command_line() -> None:
    assert settings_from(DGEMMA_API_KEY="a,b").api_keys == ("a", "b")
    with pytest.raises(InputError, match="process list; set the variable DGEMMA_API_KEY") as caught:
        settings_from("--api-key", "very-secret")
    assert "very-secret" not in str(caught.value)


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    assert {flag.field for flag in SERVER_FLAGS} == {entry.name for entry in fields(Settings)}


def test_keys_are_not_in_what_is_printed() -> None:
    assert "very-secret" not in repr(Settings(api_keys=("very-secret",)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 70000}, "port is 70000; it must be a whole number from 0 to 65535."),
        ({"port": True}, "port is True"),
        ({"max_choices": 1.5}, "max_choices is 1.5; it must be a whole number"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5; it must be a number"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s is nan"),
        ({"host": ""}, "host is empty"),
        ({"max_key_seqs": 2}, "max_key_seqs is a limit of each API key, and this server has none"),
        ({"api_keys": ("a key",)}, "an API key is empty, too long or has spaces"),
        ({"served_model_name": "a b"}, "the served name 'a b' is not usable"),
        ({"adapters": (Adapter(name="dgemma", path=Path("x")),)}, "'dgemma' stands for two models"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "variables", "message"),
    [
        (["--port", "x"], {}, "--port is 'x'; it must be a whole number."),
        ([], {"DGEMMA_REQUEST_TIMEOUT": "long"}, "DGEMMA_REQUEST_TIMEOUT is 'long'; it must be a number."),
        ([], {"DGEMMA_LOG_TEXT": "maybe"}, "DGEMMA_LOG_TEXT is 'maybe'; give 1 or 0."),
        ([], {"DGEMMA_PORT": "70000"}, "DGEMMA_PORT: port is 70000; it must be a whole number from 0"),
        (["--port", "70000"], {"DGEMMA_PORT": "80"}, "--port: port is 70000"),
        (["--requests-per-minute", "9"], {}, "--requests-per-minute: requests_per_minute is a limit of each"),
        (["--adapter", "sums"], {}, "--adapter: adapter is 'sums'; give it as name=path."),
        ([], {"DGEMMA_ADAPTER": "a=b,,c=d"}, "DGEMMA_ADAPTER: adapter is ''; give it as name=path."),
        ([], {"DGEMMA_ADAPTER": "dgemma=x"}, "DGEMMA_ADAPTER: the served name 'dgemma' stands for two"),
        ([], {"DGEMMA_API_KEY": "secret,"}, "DGEMMA_API_KEY: an API key is empty, too long or has spaces"),
    ],
)
def test_a_wrong_word_is_refused_with_where_it_stands(
    argv: list[str], variables: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        settings_from(*argv, **variables)
    assert message in str(caught.value)
