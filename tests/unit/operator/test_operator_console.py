"""The console as a part of the operator, with an API server that does not answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.operator.access.api_server import UserApiSettings
from rankscope.operator.console_access import ConsoleSettings
from rankscope.operator.runtime import Operator, OperatorSettings
from tests.certificates import Authority
from tools.played_runs import Played


def made(folder: Path, host: str = "127.0.0.1", serving: tuple[Path, Path] | None = None) -> Operator:
    config = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "x", "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    settings = OperatorSettings(
        kubeconfig=folder / "kubeconfig",
        listen_port=0,
        serving_files=serving,
        user_api=UserApiSettings("127.0.0.1", 0),
        console=ConsoleSettings(host, 0),
    )
    return Operator(settings)


def test_the_operators_console_asks_the_api_server_about_its_callers(tmp_path: Path) -> None:
    console = made(tmp_path).console
    assert console is not None
    console.start()

    def status(**headers: str) -> int:
        request = urllib.request.Request(f"{console.url}api/v1/runs", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        return error.value.code

    assert (status(), status(Authorization="Bearer token")) == (401, 503)
    console.stop()


def test_a_public_console_needs_tls_and_serves_the_operators_certificate(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("serving", "localhost")
    console = made(tmp_path, "0.0.0.0", (pair.certificate, pair.key)).console
    assert console is not None and console.url.startswith("https://")
    console.stop()
    with pytest.raises(ValueError, match="no TLS"):
        made(tmp_path, "0.0.0.0")


def test_a_replica_forgets_the_history_of_runs_that_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, played, held = made(tmp_path), Played(), {"lab/stays", "lab/taken"}
    monkeypatch.setattr(operator.leases, "keeps", held.__contains__)
    assert operator.console is not None
    history = operator.console._server._api.history
    for run in ("lab/stays", "lab/taken#2"):
        played.tick(run=run)
    history(tuple(played.view(run).state for run in ("lab/stays", "lab/taken#2")))
    operator._pulse.beat()
    assert {view.name for view in history.changed_since(-1)} == {"lab/stays", "lab/taken#2"}
    held.remove("lab/taken")
    operator._pulse.beat()
    assert {view.name for view in history.changed_since(-1)} == {"lab/stays"}
    operator.console.stop()


def test_runs_in_shards_of_other_replicas_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = made(tmp_path)
    phases = {"lab/held": "Running", "lab/far": "Running", "lab/over": "Ended"}
    objects = {
        place: SimpleNamespace(place=place, status=SimpleNamespace(phase=phase)) for place, phase in phases.items()
    }
    monkeypatch.setattr(type(operator.runs.watched), "objects", objects)
    monkeypatch.setattr(operator.leases, "keeps", lambda place: place == "lab/held")
    monkeypatch.setattr(operator.leases, "holder_of", lambda place: "operator-1")
    assert operator._elsewhere() == {"lab/far": "operator-1"}
    assert operator.console is not None
    operator.console.stop()
