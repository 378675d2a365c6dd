from __future__ import annotations

import socket

import pytest

from rankscope.cli import up
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.cli.standalone import ConsoleListen, Standalone
from rankscope.daemon.config import resolve
from rankscope.daemon.server.sockets import ListenError

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("address", "advice"), [("0.0.0.0:9469", "ssh -L"), ("192.0.2.1:0", "ssh -L"), ("9469", "HOST:PORT")]
)
def test_the_console_is_not_served_where_others_can_reach_it(address: str, advice: str, capsys: Output) -> None:
    assert main(["up", "--console-listen", address]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "--console-listen" in error and advice in error


def test_only_the_default_console_port_may_be_replaced() -> None:
    assert up._console_listen(None) == ConsoleListen("127.0.0.1", 9469, or_any_port=True)
    assert up._console_listen("[::1]:7") == ConsoleListen("::1", 7, or_any_port=False)
    assert up._console_listen("none") is None


def test_a_port_that_is_taken_stops_everything_that_was_started(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("d")
    places = {"socket": str(folder / "s"), "metrics_listen": "none", "log_level": "error"}
    places |= {name: str(folder / name) for name in ("capture_dir", "profile_dir")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = ConsoleListen("127.0.0.1", taken.getsockname()[1], or_any_port=False)
        standalone = Standalone(resolve(places, {}).config, console=listen)
        with pytest.raises(ListenError, match="pass another --console-listen, or none"):
            standalone.start()
    assert not (folder / "s").exists()
