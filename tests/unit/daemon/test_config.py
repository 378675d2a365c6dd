from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.daemon.config import Config, ConfigError, Value, parse_address, resolve, unknown_variables


def test_defaults_are_stated_once() -> None:
    assert resolve({}, {}, Path("/dev/null")).config == Config()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text('window_seconds = 4\nstack_rate_hertz = 20.0\nnode = "from-file"\n')
    environment = {"RANKSCOPE_DAEMON_NODE": "from-environment", "RANKSCOPE_DAEMON_STACK_RATE_HERTZ": "30"}
    resolved = resolve({"node": "from-flag", "socket": None}, environment, file)
    assert resolved.config.node == "from-flag"
    assert resolved.config.stack_rate_hertz == 30.0
    assert resolved.config.window_seconds == 4.0
    assert resolved.config.watch_readers == 16
    assert resolved.origins["node"] == "--node"
    assert resolved.origins["stack_rate_hertz"] == "RANKSCOPE_DAEMON_STACK_RATE_HERTZ"
    assert resolved.origins["window_seconds"] == str(file)
    assert resolved.origins["watch_readers"] == "default"
    assert 'node = "from-flag"' in resolved.describe()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("window_seconds = -1", "window_seconds = -1: must be between 0.5 and 60"),
        ("window_seconds = nan", "window_seconds = nan: must be between 0.5 and 60"),
        ("window_seconds = true", "window_seconds = true: must be a number"),
        ("watch_readers = 1.5", "watch_readers = 1.5: must be a whole number"),
        ('metrics_tls = "maybe"', 'metrics_tls = "maybe": must be true or false'),
        ("node = 7", "node = 7: must be one line of text"),
        ('log_level = "loud"', 'log_level = "loud": must be one of debug, info, warning, error'),
        ("windw_seconds = 2", "windw_seconds: no such setting; there are node, window_seconds"),
        ("window_seconds = [", "not TOML"),
    ],
)
def test_a_wrong_line_is_named_with_its_allowed_values(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        resolve({}, {}, file)
    assert str(raised.value).startswith(f"{file}: {complaint}")


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve({}, {"RANKSCOPE_DAEMON_CONFIG": str(tmp_path / "missing.toml")})


def test_grpc_without_tls_stays_on_this_machine() -> None:
    for routable in ("0.0.0.0:9465", "[::]:9465", "192.0.2.1:9465", "127.example.com:9465", "node-a:9465"):
        with pytest.raises(ConfigError, match="there is no TLS; set tls_certificate"):
            resolve({"grpc_listen": routable}, {})
    assert resolve({"grpc_listen": "[::1]:9465"}, {}).config.grpc_listen == "[::1]:9465"
    assert resolve({"grpc_listen": "127.0.0.1:9465"}, {}).config.grpc_listen == "127.0.0.1:9465"


def test_metrics_behind_tls_need_certificates() -> None:
    with pytest.raises(ConfigError, match="metrics_tls = true needs certificates"):
        resolve({"metrics_tls": True}, {})


def test_addresses_are_parsed_or_explained() -> None:
    assert parse_address("127.0.0.1:0", "x") == ("127.0.0.1", 0)
    assert parse_address("[::1]:80", "x") == ("::1", 80)
    assert parse_address("none", "x") is None
    for wrong in ("9464", ":9464", "host:", "host:99999", "host:http", "::1:80"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            parse_address(wrong, "metrics_listen")


def test_a_misspelt_variable_is_noticed() -> None:
    variables = {"RANKSCOPE_DAEMON_WINDOW": "3", "RANKSCOPE_DAEMON_NODE": "a", "RANKSCOPE_PROBE": "1"}
    assert unknown_variables(variables) == ("RANKSCOPE_DAEMON_WINDOW",)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"profile_push_url": "pyroscope:4040"}, "must be like https://"),
        ({"profile_push_url": "ftp://pyroscope"}, "must be like https://"),
        ({"profile_push_url": "https://"}, "must be like https://"),
        ({"profile_push_url": "https://pyroscope:99999"}, "must be like https://"),
        ({"profile_push_url": "https://p", "profile_dir": "none"}, "set profile_dir as well"),
        ({"profile_push_tenant": "a"}, "need profile_push_url"),
        ({"profile_push_url": "https://p", "profile_push_tenant": "a b"}, "profile_push_tenant = 'a b': must be"),
        ({"profile_push_url": "http://p", "profile_push_token_file": "/t"}, "others could read the token"),
        ({"profile_push_url": "http://localhost", "profile_push_authority": "/ca"}, "no certificate without TLS"),
    ],
)
def test_a_wrong_server_of_profiles_is_refused(settings: dict[str, Value | None], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(settings, {})
    assert complaint in str(raised.value)


@pytest.mark.parametrize("url", ["https://me:hunter2@pyroscope", "https://p/?token=hunter2", "https://me:hunter2@[p"])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="set profile_push_token_file") as raised:
        resolve({"profile_push_url": url}, {})
    assert "hunter2" not in str(raised.value)


def test_a_token_may_go_to_this_machine_without_tls() -> None:
    resolve({"profile_push_url": "http://localhost:4040", "profile_push_token_file": "/t"}, {})
