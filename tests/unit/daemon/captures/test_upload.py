from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rankscope.common.object_store import ATTEMPTS, UploadError, check_store, shown, upload
from rankscope.daemon.captures.processing.upload import target_url


class Troubled(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory with troubles that pass, in the order in which they come."""

    protocol = "troubled"
    store: ClassVar[dict[str, Any]] = {}
    troubles: ClassVar[list[Exception | None]] = []
    attempts: ClassVar[int] = 0

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        type(self).attempts += 1
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None:
            raise trouble
        self.pipe_file(rpath, Path(lpath).read_bytes())


def _stored(url: str) -> bytes:
    content: bytes = Troubled().cat_file(url)
    return content


@pytest.fixture(autouse=True)
def _troubled() -> None:
    fsspec.register_implementation("troubled", Troubled, clobber=True)
    Troubled.store.clear()
    Troubled.troubles, Troubled.attempts = [], 0


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(b"trace" * 1000)
    return path


def test_troubles_that_pass_are_waited_out_with_growing_pauses(artifact: Path) -> None:
    Troubled.troubles = [OSError("503 Slow Down"), TimeoutError()]
    pauses: list[float] = []
    upload(artifact, "troubled://bucket/x/rank0.json.gz", sleep=pauses.append)
    assert _stored("troubled://bucket/x/rank0.json.gz") == artifact.read_bytes()
    assert len(pauses) == 2 and 0.5 <= pauses[0] <= 1.0 <= pauses[1] <= 2.0
    assert not any(path.endswith(".part") for path in Troubled.store)


def test_a_store_that_stays_down_is_given_up(artifact: Path) -> None:
    Troubled.troubles = [OSError("500 Internal Error")] * 99
    with pytest.raises(UploadError, match=rf"troubled://b/x: OSError: 500 Internal Error \({ATTEMPTS} attempts\)"):
        upload(artifact, "troubled://b/x", sleep=lambda seconds: None)
    assert Troubled.attempts == ATTEMPTS


@pytest.mark.parametrize("trouble", [PermissionError("Access Denied"), FileNotFoundError("no such bucket")])
def test_what_time_does_not_cure_is_not_tried_again(artifact: Path, trouble: Exception) -> None:
    Troubled.troubles = [trouble] * 99
    with pytest.raises(UploadError, match=str(trouble)):
        upload(artifact, "troubled://b/x", sleep=lambda seconds: None)
    assert Troubled.attempts == 1


def test_an_unknown_kind_of_store_is_named(artifact: Path) -> None:
    with pytest.raises(UploadError, match="nosuchthing"):
        upload(artifact, "nosuchthing://b/x", sleep=lambda seconds: None)


def test_a_file_that_did_not_arrive_whole_is_sent_again(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, cut_off = Troubled.put_file, [True]

    def put_file(self: Troubled, lpath: str, rpath: str, **options: Any) -> None:
        real(self, lpath, rpath, **options)
        if cut_off.pop() if cut_off else False:
            self.pipe_file(rpath, b"tra")

    monkeypatch.setattr(Troubled, "put_file", put_file)
    upload(artifact, "troubled://b/x", sleep=lambda seconds: None)
    assert Troubled.attempts == 2 and _stored("troubled://b/x") == artifact.read_bytes()


def test_a_shared_folder_shows_whole_files_only(artifact: Path, tmp_path: Path) -> None:
    upload(artifact, f"file://{tmp_path}/shared/j/rank0.json.gz")
    assert [path.name for path in (tmp_path / "shared" / "j").iterdir()] == ["rank0.json.gz"]
    assert (tmp_path / "shared" / "j" / "rank0.json.gz").read_bytes() == artifact.read_bytes()


def test_secrets_of_a_url_are_in_no_message(artifact: Path) -> None:
    assert shown("s3://key:secret@bucket/a?token=1") == "s3://bucket/a"
    Troubled.troubles = [PermissionError("user key with secret may not write to troubled://key:secret@b/x")]
    with pytest.raises(UploadError) as caught:
        upload(artifact, "troubled://key:secret@b/x", sleep=lambda seconds: None)
    assert "secret" not in str(caught.value) and "key" not in str(caught.value)


@pytest.mark.parametrize("job", ["../../etc", "..", "a/b", "", ".", "name with spaces", "x" * 500, "j\ud800"])
def test_any_job_name_becomes_one_plain_path_component(job: str) -> None:
    base, safe, capture, name = target_url("s3://b/prefix/", job, "c-1", "rank0.json.gz").rsplit("/", 3)
    assert (base, capture, name) == ("s3://b/prefix", "c-1", "rank0.json.gz")
    assert 1 <= len(safe) <= 100 and safe not in (".", "..") and all(c.isalnum() or c in "._-" for c in safe)


def test_jobs_of_different_names_never_share_a_folder() -> None:
    assert target_url("s3://b", "a/b", "c", "n") != target_url("s3://b", "a_b", "c", "n")
    assert target_url("s3://b", "train-7b", "c", "n") == "s3://b/train-7b/c/n"


@pytest.mark.parametrize("url", ["bucket/folder", "", "unheardof://bucket/x", "s3://[", "\x1b[31m"])
def test_a_place_that_is_no_store_is_found_before_uploading(url: str) -> None:
    with pytest.raises(UploadError) as caught:
        check_store(url)
    assert "\x1b" not in str(caught.value)
    check_store("troubled://bucket/folder")
    assert Troubled.attempts == 0
