"""Whether the daemon's certificates can be used, and for how long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from rankscope.daemon.certificates import SOON_DAYS, CertificateError, check_pair, validity
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.examining import Finding, Level

OTHERS_READ = 0o004


def certificates_are_good(config: Config) -> Iterator[Finding]:
    if config.tls_certificate == NONE:
        return
    certificate, key = Path(config.tls_certificate), Path(config.tls_key)
    try:
        findings = [_finding(certificate), _finding(Path(config.tls_client_authority))]
        key.read_bytes()
        check_pair(certificate, key)
        if key.stat().st_mode & OTHERS_READ:
            findings.append(Finding("tls", Level.WARNING, f"{key} can be read by everybody", f"chmod 600 {key}"))
    except CertificateError as error:
        yield Finding("tls", Level.PROBLEM, str(error), "name a certificate and its own key, both PEM, no password")
    except OSError as error:
        text = f"{error.filename} cannot be read: {error.strerror}"
        yield Finding("tls", Level.PROBLEM, text, f"mend the file, or let user {os.geteuid()} read it")
    else:
        yield from findings


def _finding(path: Path) -> Finding:
    now = datetime.now(timezone.utc)
    held = validity(path.read_bytes())
    days = held.days_left(now)
    if held.begin > now:
        text = f"{path} is not valid before {held.begin:%Y-%m-%d %H:%M} UTC"
        return Finding("tls", Level.PROBLEM, text, "check this machine's clock")
    if days < 0:
        text = f"{path} expired at {held.end:%Y-%m-%d %H:%M} UTC: no operator can connect"
        return Finding("tls", Level.PROBLEM, text, "replace the file; the daemon reads it anew by itself")
    if days < SOON_DAYS:
        text = f"{path} expires in {days:.1f} days"
        return Finding("tls", Level.WARNING, text, "replace the file; the daemon reads it anew by itself")
    return Finding("tls", Level.OK, f"{path} is good for {days:.0f} days")
