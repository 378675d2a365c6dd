"""`rankscope captures`: the captures that a server knows: list, show, download, cancel, remove."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rankscope.cli import options
from rankscope.cli.capture_download import fetch, prepare, print_capture
from rankscope.cli.capture_output import elsewhere, list_table, make_console, make_progress, to_object
from rankscope.cli.connection import CALL_SECONDS, connected
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import CommandError, Exit, to_stdout
from rankscope.common.rank_selection import rank_ranges
from rankscope.operator.console.capture_answers import FINAL, delivered, safe_name, state_word
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    listing = actions.add_parser("ls", help="list captures, the latest first")
    options.add_options(listing, "--run NAMESPACE/")
    showing = actions.add_parser("show", help="show what each rank of a capture did")
    getting = actions.add_parser("get", help="download the recordings; what was begun is continued")
    options.add_options(getting, "--ranks", "--max-bytes")
    options.add_output_argument(getting, "DIR", "where to (default: a directory named ID, here)")
    cancelling = actions.add_parser("cancel", help="end a capture; what its ranks have delivered is kept")
    removing = actions.add_parser("rm", help="remove a capture that is over, its recordings included")
    for action in (showing, getting, cancelling, removing):
        action.add_argument("id", metavar="ID", help="as `rankscope captures ls` lists it")
    for action in (listing, showing):
        options.add_options(action, "--json")
    for action in (listing, showing, getting, cancelling, removing):
        add_connection_arguments(action)


def run(arguments: argparse.Namespace) -> int:
    with connected(arguments) as (target, channel):
        stub = CaptureServiceStub(channel)
        if arguments.action == "get":
            return _get(stub, target, arguments)
        actions = {"ls": _list, "show": _show, "rm": _remove, "cancel": _cancel}
        return actions[arguments.action](stub, arguments)


def _list(stub: CaptureServiceStub, arguments: argparse.Namespace) -> int:
    captures = stub.ListCaptures(pb.ListCapturesRequest(job=arguments.run), timeout=CALL_SECONDS).captures
    if arguments.json:
        to_stdout(json.dumps({"captures": [to_object(capture) for capture in captures]}))
    elif captures:
        make_console().print(list_table(captures))
    else:
        of_job = f" of {arguments.run}" if arguments.run else ""
        to_stdout(f"no capture{of_job} yet; `rankscope capture` takes one")
    return 0


def _show(stub: CaptureServiceStub, arguments: argparse.Namespace) -> int:
    capture = _find(stub, arguments.id)
    if arguments.json:
        to_stdout(json.dumps(to_object(capture)))
    else:
        print_capture(capture)
    return 0


def _get(stub: CaptureServiceStub, target: str, arguments: argparse.Namespace) -> int:
    capture = _find(stub, arguments.id)
    entries = {entry.rank: entry for entry in capture.ranks}
    wanted = options.selected_ranks(arguments) or sorted(entries)
    unknown = [rank for rank in wanted if rank not in entries]
    if unknown:
        text = f"rank {unknown[0]} was not part of capture {capture.id}; it has {rank_ranges(entries)}"
        raise CommandError(text, Exit.NOT_FOUND)
    here = [entry for entry in delivered(capture) if entry.rank in wanted]
    if not here:
        print_capture(capture)
        return Exit.FAILED
    folder: Path = arguments.output or Path(safe_name(arguments.id))
    prepare(folder)
    with make_progress(make_console(stderr=True)) as progress:
        try:
            fetched = fetch(stub, target, capture, here, folder, progress, arguments.max_bytes)
        except KeyboardInterrupt:
            progress.say("interrupted; the same command continues the download")
            return Exit.INTERRUPTED
    print_capture(capture, fetched)
    return Exit.OK if set(fetched.files) == set(wanted) else Exit.FAILED


def _cancel(stub: CaptureServiceStub, arguments: argparse.Namespace) -> int:
    capture = stub.CancelCapture(pb.CancelCaptureRequest(id=arguments.id), timeout=CALL_SECONDS).capture
    if capture.state in FINAL:
        to_stdout(f"capture {capture.id} is over: {state_word(capture.state)}")
    else:
        command = f"rankscope captures show {capture.id}{elsewhere(capture.id)}"
        to_stdout(f"capture {capture.id} was asked to stop; `{command}` shows how it ended")
    return 0


def _remove(stub: CaptureServiceStub, arguments: argparse.Namespace) -> int:
    capture = _find(stub, arguments.id)
    if capture.state not in FINAL:
        command = f"rankscope captures cancel {capture.id}{elsewhere(capture.id)}"
        raise CommandError(f"capture {capture.id} is under way; next: {command}", Exit.REFUSED)
    stub.DeleteCapture(pb.DeleteCaptureRequest(id=arguments.id), timeout=CALL_SECONDS)
    to_stdout(f"capture {arguments.id} is removed")
    return 0


def _find(stub: CaptureServiceStub, capture_id: str) -> pb.Capture:
    capture: pb.Capture = stub.GetCapture(pb.GetCaptureRequest(id=capture_id), timeout=CALL_SECONDS).capture
    return capture
