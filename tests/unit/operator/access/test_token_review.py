from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from rankscope.operator.access import token_review
from rankscope.operator.access.token_review import Access, Caller, NoAnswerError, PathAccess, Reviews
from rankscope.operator.kube.api_client import Api, ApiError, UnreachableError

ADA = {"username": "ada", "uid": "u-1", "groups": ["team"], "extra": {"scopes": ["a", "b"]}}
TOKEN = "eyJhbGciOiJSUzI1NiJ9.e30.c2ln"


@dataclass
class FakeApi:
    """An API server's answers; `asked` is what it was asked."""

    token_status: Any = field(
        default_factory=lambda: {"authenticated": True, "user": dict(ADA), "audiences": ["rankscope"]}
    )
    access_status: Any = field(default_factory=lambda: {"allowed": True})
    error: Exception | None = None
    asked: list[Any] = field(default_factory=list)
    now: float = 0.0

    def create(self, path: str, body: Any, **query: Any) -> dict[str, Any]:
        self.asked.append(body)
        if self.error is not None:
            raise self.error
        return {"status": self.token_status if path == token_review.TOKEN_REVIEWS else self.access_status}


def made(api: FakeApi) -> Reviews:
    return Reviews(cast(Api, api), "rankscope", lambda: api.now)


def test_a_token_for_our_audience_tells_who_calls() -> None:
    api = FakeApi()
    assert made(api).caller(TOKEN) == Caller("ada", "u-1", ("team",), {"scopes": ("a", "b")})
    assert api.asked[0]["spec"] == {"token": TOKEN, "audiences": ["rankscope"]}


@pytest.mark.parametrize(
    "change",
    [
        {"authenticated": False},
        {"authenticated": "true"},
        {"audiences": ["other"]},
        {"audiences": []},
        {"audiences": None},
        {"audiences": "rankscope"},
        {"user": {}},
        {"user": None},
    ],
)
def test_only_a_plain_yes_for_our_audience_authenticates(change: dict[str, Any]) -> None:
    api = FakeApi()
    api.token_status |= change
    assert made(api).caller(TOKEN) is None


@pytest.mark.parametrize("token", ["", " ", "a b", "a\nb", "ä", "x" * (token_review.TOKEN_CHARACTERS + 1)])
def test_what_is_no_token_is_not_even_asked_about(token: str) -> None:
    api = FakeApi()
    assert made(api).caller(token) is None
    assert api.asked == []


def test_a_yes_is_cached_ten_seconds_and_a_no_two() -> None:
    api = FakeApi()
    reviews = made(api)
    reviews.caller(TOKEN)
    api.token_status = {"authenticated": False}
    api.now = 9.9
    assert reviews.caller(TOKEN) is not None
    api.now = 10.1
    assert reviews.caller(TOKEN) is None
    assert len(api.asked) == 2
    api.token_status = {"authenticated": True, "user": dict(ADA), "audiences": ["rankscope"]}
    api.now = 12.0
    assert reviews.caller(TOKEN) is None
    api.now = 12.2
    assert reviews.caller(TOKEN) is not None


def test_no_token_is_stored_and_cached_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_review, "MAX_REMEMBERED", 3)
    api = FakeApi()
    reviews = made(api)
    for number in range(10):
        reviews.caller(f"token{number}")
    assert "token9" not in repr(vars(reviews._callers))
    assert len(reviews._callers._answers) == 3


def test_the_access_review_names_everything_known_of_the_caller() -> None:
    api = FakeApi()
    reviews = made(api)
    caller = Caller("ada", "u-1", ("team",), {"scopes": ("a", "b")})
    assert reviews.allows(caller, Access("get", "lab", subresource="artifacts"))
    assert api.asked[0]["spec"] == {
        "user": "ada",
        "uid": "u-1",
        "groups": ["team"],
        "extra": {"scopes": ["a", "b"]},
        "resourceAttributes": {
            "group": "rankscope.dev",
            "resource": "captures",
            "subresource": "artifacts",
            "namespace": "lab",
            "verb": "get",
        },
    }
    reviews.allows(caller, PathAccess("/metrics"))
    assert api.asked[1]["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}


def test_a_cached_permission_holds_only_for_that_caller_and_access() -> None:
    api = FakeApi()
    reviews = made(api)
    ada = Caller("ada", groups=("team",))
    assert reviews.allows(ada, Access("create", "lab"))
    api.access_status = {"allowed": False}
    assert reviews.allows(ada, Access("create", "lab"))  # remembered
    for caller, access in (
        (ada, Access("delete", "lab")),
        (ada, Access("create", "other")),
        (ada, Access("create", "")),
        (Caller("ada"), Access("create", "lab")),
        (Caller("bob", groups=("team",)), Access("create", "lab")),
        (Caller("ada", "another", ("team",)), Access("create", "lab")),
    ):
        assert not reviews.allows(caller, access)
    api.now = 10.1
    assert not reviews.allows(ada, Access("create", "lab"))


def test_a_veto_beside_a_yes_is_a_no() -> None:
    api = FakeApi(access_status={"allowed": True, "denied": True})
    assert not made(api).allows(Caller("ada"), Access("create", "lab"))


@pytest.mark.parametrize("error", [UnreachableError("away"), ApiError(403, "Forbidden", "no")])
def test_without_an_answer_nobody_is_admitted_and_nothing_is_cached(error: Exception) -> None:
    api = FakeApi(error=error)
    reviews = made(api)
    with pytest.raises(NoAnswerError):
        reviews.caller(TOKEN)
    with pytest.raises(NoAnswerError):
        reviews.allows(Caller("ada"), Access("create", "lab"))
    api.error = None
    assert reviews.caller(TOKEN) is not None
